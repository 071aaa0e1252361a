from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from quantkit.errors import GenerationError
from quantkit.runtime.generation import PREFILL_CHUNK, Generation
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Completion
from quantkit.runtime.text import TextStream
from tests.runtime.fake_engine import FakeEngine
from tests.runtime.tokenizers import byte_level

PROMPTS = [[1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [2]]


def params(**values: Any) -> ResolvedParams:
    return ResolvedParams(**{"seed": 0, "max_new_tokens": 12, **values})


def run(engine: FakeEngine, prompts: Sequence[Sequence[int]], **values: Any) -> list[Completion]:
    return Generation(engine, prompts, params(**values)).completions()


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]


def counting(vocab: int = 300) -> FakeEngine:
    """An engine whose likeliest next token is the last one plus one."""
    return FakeEngine(vocab, row=lambda prefix: torch.eye(vocab)[(prefix[-1] + 1) % vocab] * 9)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.8, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.5, "eos_token_ids": frozenset([3, 8]), "min_new_tokens": 3},
]


@pytest.mark.parametrize("values", SETTINGS)
def test_b35_a_batch_equals_single_prompts(values: dict[str, Any]) -> None:
    batch = ids(run(FakeEngine(), PROMPTS, **values))
    for number, prompt in enumerate(PROMPTS):
        # Noise is keyed by the place in the batch, so keep the place: the others get no tokens.
        if values.get("temperature"):
            others = [[0]] * number
            assert ids(run(FakeEngine(), [*others, prompt], **values))[-1] == batch[number]
        else:
            assert ids(run(FakeEngine(), [prompt], **values)) == [batch[number]]


def test_b35_greedy_tokens_do_not_depend_on_the_order() -> None:
    forward = ids(run(FakeEngine(), PROMPTS))
    assert ids(run(FakeEngine(), PROMPTS[::-1])) == forward[::-1]


def test_equal_prompts_in_one_batch_are_sampled_differently() -> None:
    first, second = ids(run(FakeEngine(), [[1, 2], [1, 2]], temperature=1.0))
    assert first != second


def test_greedy_equals_the_argmax_of_whole_sequences() -> None:
    engine = FakeEngine()
    (completion,) = run(engine, [[1, 2, 3]])
    for n, token in enumerate(completion.ids):
        logits = engine.logits(torch.tensor([[1, 2, 3, *completion.ids[:n]]]))
        assert token == int(logits[0, -1].argmax())


def test_prompts_are_prefilled_alone_in_chunks_then_decoded_together() -> None:
    engine = FakeEngine()
    long = [1] * (2 * PREFILL_CHUNK + 3)
    run(engine, [long, [2, 3]], max_new_tokens=3)
    assert engine.calls == [
        ([0], [PREFILL_CHUNK]),
        ([0], [PREFILL_CHUNK]),
        ([0], [3]),
        ([1], [2]),
        ([0, 1], [1, 1]),
        ([0, 1], [1, 1]),
    ]


def test_finished_sequences_leave_the_batch_and_free_their_cache() -> None:
    engine = counting()
    completions = run(engine, [[10], [50]], eos_token_ids=frozenset([13]), max_new_tokens=5)
    assert [(c.ids, c.finish_reason) for c in completions] == [
        ([11, 12, 13], "stop"),
        ([51, 52, 53, 54, 55], "length"),
    ]
    assert engine.calls[-1] == ([1], [1])
    assert engine.caches[0].released == [0, 1]


@pytest.mark.parametrize("eos", [[13, 12], [12, 13]])
def test_b30_any_eos_id_ends_a_sequence(eos: list[int]) -> None:
    assert ids(run(counting(), [[10]], eos_token_ids=frozenset(eos))) == [[11, 12]]


def test_ignore_eos_keeps_going_but_not_past_stop_token_ids() -> None:
    ends = {"eos_token_ids": frozenset([12]), "stop_token_ids": frozenset([14])}
    assert ids(run(counting(), [[10]], **ends)) == [[11, 12]]
    assert ids(run(counting(), [[10]], ignore_eos=True, **ends)) == [[11, 12, 13, 14]]


def test_min_new_tokens_keeps_ends_away() -> None:
    (completion,) = run(FakeEngine(4), [[1]], eos_token_ids=frozenset([0, 1, 2]), min_new_tokens=6)
    assert completion.ids[:6] == [3] * 6


def test_no_new_tokens_means_no_work() -> None:
    engine = FakeEngine()
    (completion,) = run(engine, [[1, 2]], max_new_tokens=0)
    assert (completion.ids, completion.finish_reason) == ([], "length")
    assert engine.caches == []
    assert run(engine, []) == []


def test_a_full_context_ends_with_length() -> None:
    engine = FakeEngine(max_context=8)
    completions = run(engine, [[1] * 5, [2] * 7], max_new_tokens=50)
    assert [(len(c.ids), c.finish_reason) for c in completions] == [(3, "length"), (1, "length")]


def test_a_prompt_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(GenerationError, match="prompt 1 has 8 tokens and the model's context is 8"):
        run(FakeEngine(max_context=8), [[1], [1] * 8])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt 0 has no tokens"), ([1, 32], "token 32, outside"), ([-1], "token -1, outside")],
)
def test_bad_prompts_are_errors(prompt: list[int], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        run(FakeEngine(), [prompt])


def test_abandoning_the_tokens_frees_the_cache() -> None:
    engine = FakeEngine()
    tokens = Generation(engine, PROMPTS, params()).tokens()
    next(tokens)
    tokens.close()
    assert sorted(engine.caches[0].released) == [0, 1, 2, 3]


def test_the_consumer_is_not_left_in_inference_mode() -> None:
    for _ in Generation(FakeEngine(), [[1]], params()).tokens():
        assert not torch.is_inference_mode_enabled()


def test_log_probabilities_come_with_every_token() -> None:
    (completion,) = run(FakeEngine(), [[1, 2]], temperature=1.0, logprobs=2)
    assert completion.logprobs is not None
    assert [next(iter(row)) for row in completion.logprobs] == completion.ids
    assert all(2 <= len(row) <= 3 for row in completion.logprobs)
    assert run(FakeEngine(), [[1, 2]])[0].logprobs is None


def test_the_statistics_add_up() -> None:
    generation = Generation(counting(), [[10, 11], [50]], params(max_new_tokens=4))
    completions = generation.completions()
    total = generation.stats
    assert (total.prompt_tokens, total.new_tokens, total.decode_tokens) == (3, 8, 6)
    assert [c.stats.decode_tokens for c in completions] == [3, 3]
    assert total.prefill_seconds == pytest.approx(sum(c.stats.prefill_seconds for c in completions))
    assert total.decode_seconds == pytest.approx(completions[0].stats.decode_seconds)
    assert completions[0].stats.time_to_first_token < completions[1].stats.time_to_first_token
    assert total.tokens_per_second == pytest.approx(6 / total.decode_seconds)


def test_the_seed_is_recorded_where_it_was_used() -> None:
    assert run(FakeEngine(), [[1]], seed=9, temperature=1.0)[0].stats.seed == 9
    assert run(FakeEngine(), [[1]], seed=9)[0].stats.seed is None


class TestText:
    """Byte-level ids below 256 are characters, so the counting engine writes the alphabet."""

    def run(self, start: str, **values: Any) -> tuple[Completion, list[str]]:
        tokenizer = byte_level()
        vocab = tokenizer.get_vocab()
        alphabet = [vocab[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]
        follow = dict(pairwise(alphabet))
        table = torch.eye(len(tokenizer)) * 9
        engine = FakeEngine(len(tokenizer), row=lambda prefix: table[follow[prefix[-1]]])
        resolved = params(**values)
        pieces = [
            token.text
            for token in Generation(
                engine, [[vocab[start]]], resolved, lambda: TextStream(tokenizer, resolved.stop)
            ).tokens()
        ]
        (completion,) = Generation(
            engine, [[vocab[start]]], resolved, lambda: TextStream(tokenizer, resolved.stop)
        ).completions()
        assert "".join(pieces) == completion.text
        return completion, pieces

    def test_text_is_what_was_streamed(self) -> None:
        completion, pieces = self.run("a", max_new_tokens=5)
        assert (completion.text, completion.finish_reason) == ("bcdef", "length")
        assert pieces == ["b", "c", "d", "e", "f"]

    def test_a_stop_string_ends_the_sequence(self) -> None:
        completion, pieces = self.run("a", stop=("ef",))
        assert (completion.text, completion.finish_reason, len(completion.ids)) == (
            "bcd",
            "stop",
            5,
        )
        assert pieces == ["b", "c", "d", "", ""]

    def test_held_back_text_comes_with_the_last_token(self) -> None:
        completion, pieces = self.run("a", stop=("efX",), max_new_tokens=5)
        assert (completion.text, completion.finish_reason) == ("bcdef", "length")
        assert pieces == ["b", "c", "d", "", "ef"]

    def test_min_new_tokens_disarms_stop_strings(self) -> None:
        completion, _ = self.run("a", stop=("c", "g"), min_new_tokens=3)
        assert completion.text == "bcdef"

    def test_without_a_tokenizer_there_is_no_text(self) -> None:
        assert run(FakeEngine(), [[1]])[0].text is None
