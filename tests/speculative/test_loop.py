"""The loop with drafts of every kind writes what it writes without: token for token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from quantkit.runtime.generation import Generation
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.text import TextStream
from quantkit.runtime.verification import Draft, choose_rows
from tests.runtime.fake_engine import FakeEngine
from tests.runtime.tokenizers import byte_level
from tests.speculative import toy
from tests.speculative.scripted import (
    SCRIPTS,
    Script,
    Scripted,
    beyond_the_end,
    result,
    right,
    right_then_wrong,
    run,
    wrong,
)

VOCAB = 32
PROMPTS = [[1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [2]]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.8, "top_k": 9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.8},
    "repetition-reward": {"repetition_penalty": 0.6, "temperature": 0.7},
    "frequency": {"frequency_penalty": 2.0},
    "negative-frequency": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 1.5, "temperature": 0.6},
    "bias": {"logit_bias": {3: 2.0, 9: -float("inf")}, "temperature": 0.9},
    "ends": {"eos_token_ids": frozenset([3, 8, 20]), "temperature": 1.0},
    "late-ends": {"eos_token_ids": frozenset([3, 8, 20, 21]), "min_new_tokens": 7},
}
EVERY_SCRIPT = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


def params(**values: Any) -> ResolvedParams:
    return ResolvedParams(**{"seed": 3, "max_new_tokens": 21, "logprobs": 2, **values})


@EVERY_SCRIPT
@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_change_nothing(setting: str, script: Script) -> None:
    resolved = params(**SETTINGS[setting])
    for prompts in ([PROMPTS[1]], PROMPTS):
        plain = run(FakeEngine(), prompts, resolved)
        future = [completion.ids for completion in plain]
        for lengths in ([1], [2], [5], [8], [0, 3, 1, 7]):
            drafted = Scripted(script, future, VOCAB, lengths)
            assert result(run(FakeEngine(), prompts, resolved, drafted)) == result(plain)


@pytest.mark.parametrize("option", ["repetition", "frequency", "negative-frequency", "presence"])
def test_b38_a_penalty_counts_tokens_of_the_same_draft(option: str) -> None:
    # Without penalties this engine repeats one token for ever, also inside of one draft.
    table = torch.tensor([0.0, 5.0, 4.5, 4.0, 0.0, 0.0])
    resolved = params(**SETTINGS[option])
    plain = run(FakeEngine(6, row=lambda _: table), [[4, 5]], resolved)
    if option != "negative-frequency":
        assert len(set(plain[0].ids)) > 1
    for length in range(1, 9):
        for script in (right, right_then_wrong):
            drafted = Scripted(script, [plain[0].ids], 6, [length])
            engine = FakeEngine(6, row=lambda _: table)
            assert result(run(engine, [[4, 5]], resolved, drafted)) == result(plain)


def test_a_right_draft_saves_its_length_in_steps() -> None:
    resolved = params(max_new_tokens=21)
    plain = run(FakeEngine(), [[1, 2]], resolved)
    drafted = Scripted(right, [plain[0].ids], VOCAB, [4])
    run(FakeEngine(), [[1, 2]], resolved, drafted)
    # The first token comes from prefill; 20 follow in steps of 4 drafted tokens and one more.
    assert drafted.steps == [([4], [5])] * 4


def test_a_wrong_draft_costs_no_token() -> None:
    resolved = params(max_new_tokens=6)
    plain = run(FakeEngine(), [[1, 2]], resolved)
    drafted = Scripted(wrong, [plain[0].ids], VOCAB, [4])
    run(FakeEngine(), [[1, 2]], resolved, drafted)
    assert [counts for _, counts in drafted.steps] == [[1]] * 5


def test_all_rows_of_a_step_run_in_one_pass() -> None:
    engine, resolved = FakeEngine(), params(max_new_tokens=9)
    plain = run(FakeEngine(), PROMPTS, resolved)
    run(engine, PROMPTS, resolved, Scripted(right, [c.ids for c in plain], VOCAB, [3]))
    assert engine.calls[4:] == [([0, 1, 2, 3], [4, 4, 4, 4]), ([0, 1, 2, 3], [4, 4, 4, 4])]


@pytest.mark.parametrize("budget", [1, 2, 3, 6])
@pytest.mark.parametrize("limit", ["max_new_tokens", "context"])
def test_a_draft_never_exceeds_its_limit(limit: str, budget: int) -> None:
    values = {"max_new_tokens": budget} if limit == "max_new_tokens" else {}
    context = 4096 if limit == "max_new_tokens" else 5 + budget
    resolved = params(**values)
    plain = run(FakeEngine(max_context=context), [PROMPTS[1]], resolved)
    engine = FakeEngine(max_context=context)  # asserts that no position is beyond the context
    drafted = Scripted(beyond_the_end, [plain[0].ids], VOCAB, [50])
    assert result(run(engine, [PROMPTS[1]], resolved, drafted)) == result(plain)
    assert (len(plain[0].ids), plain[0].finish_reason) == (budget, "length")


def test_an_end_inside_a_draft_ends_the_sequence_there() -> None:
    vocab = 60
    engine = FakeEngine(vocab, row=lambda prefix: torch.eye(vocab)[(prefix[-1] + 1) % vocab] * 9)
    resolved = params(eos_token_ids=frozenset([14]), max_new_tokens=40)
    past_the_end = [list(range(11, 60)), list(range(31, 60))]
    drafted = Scripted(right, past_the_end, vocab, [9])
    first, second = run(engine, [[10], [30]], resolved, drafted)
    assert (first.ids, first.finish_reason) == ([11, 12, 13, 14], "stop")
    assert second.ids == [*range(31, 60), *range(11)]
    assert len(first.logprobs or []) == 4
    assert engine.caches[0].released == [0, 1]
    # Only what was kept counts.
    assert drafted.steps[0] == ([9, 9], [3, 10])
    assert first.stats.new_tokens == 4


def test_a_stop_inside_a_draft_beats_the_limit_at_its_end() -> None:
    vocab = 60
    resolved = params(stop_token_ids=frozenset([14]), max_new_tokens=4)
    engine = FakeEngine(vocab, row=lambda prefix: torch.eye(vocab)[(prefix[-1] + 1) % vocab] * 9)
    (done,) = run(engine, [[10]], resolved, Scripted(right, [list(range(11, 60))], vocab, [9]))
    assert (done.ids, done.finish_reason) == ([11, 12, 13, 14], "stop")


@pytest.mark.parametrize("values", [{"stop": ("ef",)}, {"stop": ("jk", "efX")}, {"stop": ("z",)}])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_text_and_stop_strings_are_those_of_plain_decoding(
    values: dict[str, Any], length: int
) -> None:
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab()
    alphabet = [vocab[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]
    follow, table = dict(pairwise(alphabet)), torch.eye(len(tokenizer)) * 9
    resolved = params(max_new_tokens=15, **values)

    def pieces(speculation: Scripted | None) -> list[tuple[int, str]]:
        engine = FakeEngine(len(tokenizer), row=lambda prefix: table[follow[prefix[-1]]])
        if speculation is not None:
            speculation.engine = engine
        generation = Generation(
            engine,
            [[vocab["a"]]],
            resolved,
            lambda: TextStream(tokenizer, resolved.stop),
            speculation,
        )
        return [(token.id, token.text) for token in generation.tokens()]

    plain = pieces(None)
    # A stop string may be completed in the middle of a draft: nothing after it is kept or shown.
    assert pieces(Scripted(right, [alphabet[1:]], len(tokenizer), [length])) == plain


def test_abandoning_the_tokens_in_the_middle_of_a_step_frees_the_cache() -> None:
    engine, resolved = FakeEngine(), params(max_new_tokens=9)
    plain = run(FakeEngine(), PROMPTS, resolved)
    speculation = Scripted(right, [c.ids for c in plain], VOCAB, [3])
    speculation.engine = engine
    tokens = Generation(engine, PROMPTS, resolved, None, speculation).tokens()
    for _ in range(6):
        next(tokens)
    tokens.close()
    assert sorted(engine.caches[0].released) == [0, 1, 2, 3]


@pytest.mark.parametrize("script", [right, wrong, right_then_wrong])
def test_a_fixed_width_runs_as_many_rows_in_every_pass(script: Script) -> None:
    resolved = params(max_new_tokens=12)
    plain = run(FakeEngine(max_context=20), PROMPTS, resolved)
    engine = FakeEngine(max_context=20)
    drafted = Scripted(script, [c.ids for c in plain], VOCAB, [7])
    assert result(run(engine, PROMPTS, resolved, drafted, width=4)) == result(plain)
    for sequences, counts in engine.calls[len(PROMPTS) :]:
        assert len(sequences) == 1
        assert counts[0] == 4 or sequences == [2]  # the longest prompt meets the context's end
    assert all(max(lengths) <= 3 for lengths, _ in drafted.steps)


def test_a_fixed_width_without_drafts_writes_the_same() -> None:
    resolved = params(temperature=0.9)
    plain = run(FakeEngine(), PROMPTS, resolved)
    assert result(run(FakeEngine(), PROMPTS, resolved, width=5)) == result(plain)


def test_choosing_many_rows_at_once_chooses_the_same() -> None:
    resolved = toy.params(temperature=0.8, presence_penalty=0.5)
    running = toy.requests(300, resolved)
    table = toy.table(4, seed=1)
    tokens = torch.randint(4, (300, 6)).tolist()
    drafts = [Draft(row[: number % 7]) for number, row in enumerate(tokens)]
    logits = toy.target_logits(running, drafts, table)
    one_by_one = choose_rows(logits, running, drafts, resolved, 1)
    assert max(map(len, one_by_one)) > 3
    for span in (2, 3, 7):
        assert choose_rows(logits, running, drafts, resolved, span) == one_by_one
