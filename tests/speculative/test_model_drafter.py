from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quantkit.runtime.request import Request
from quantkit.runtime.verification import Draft, Guess
from quantkit.speculative.drawing import draw_coupled
from quantkit.speculative.model_drafter import Attempt, ModelDrafter
from tests.runtime.fake_engine import FakeEngine
from tests.speculative import toy
from tests.speculative.judges import FixedJudge

VOCAB = 32


def greedy(engine: FakeEngine, tokens: Sequence[int], count: int) -> list[int]:
    """What the engine itself writes after `tokens`."""
    written: list[int] = []
    for _ in range(count):
        written.append(int(engine.logits(torch.tensor([[*tokens, *written]]))[0, -1].argmax()))
    return written


def request(prompt: Sequence[int], sequence: int = 0, **values: float) -> Request:
    params = toy.params(**{"temperature": 0.0, **values})
    return Request(sequence, list(prompt), 10**6, params, None)


def session(drafter: FakeEngine, target_vocab: int = VOCAB, sequences: int = 3):  # type: ignore[no-untyped-def] # noqa: ANN201
    draw = draw_coupled(toy.params(temperature=0))
    return ModelDrafter(drafter).session(FakeEngine(target_vocab), sequences, draw)


def test_drafts_are_what_the_model_writes_whatever_was_refused_before() -> None:
    engine = FakeEngine(VOCAB)
    drafting, one = session(engine), request([3, 1, 4])
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        length, kept = torch.randint(0, 7, (2,), generator=generator).tolist()
        committed = [*one.prompt, *one.ids]
        (draft,) = drafting.propose([one], [length], FixedJudge())
        assert list(draft.tokens) == greedy(engine, committed, length)
        cached = engine.caches[0].tokens[0]
        if length:
            assert cached == [*committed, *draft.tokens[:-1]]
        # Accept some of it, and a token that the draft does not have there.
        one.ids += [*draft.tokens[:kept], int(torch.randint(VOCAB, (1,), generator=generator))]


def test_a_batch_shares_passes_and_drafts_as_each_alone() -> None:
    engine = FakeEngine(VOCAB)
    prompts = [[1, 2], [3, 4, 5, 6], [7]]
    requests = [request(prompt, number) for number, prompt in enumerate(prompts)]
    drafting = session(engine)
    drafts = drafting.propose(requests, [4, 0, 2], FixedJudge())
    assert [list(draft.tokens) for draft in drafts] == [
        greedy(engine, [1, 2], 4),
        [],
        greedy(engine, [7], 2),
    ]
    assert drafting.passes == 4
    assert engine.calls == [([0, 2], [2, 1]), ([0, 2], [1, 1]), ([0], [1]), ([0], [1])]


def test_a_long_prompt_is_read_in_chunks() -> None:
    engine = FakeEngine(VOCAB)
    (draft,) = session(engine).propose([request([1] * 1100)], [1], FixedJudge())
    assert [counts for _, counts in engine.calls] == [[512], [512], [76]]
    assert list(draft.tokens) == greedy(engine, [1] * 1100, 1)


def test_the_judge_ends_a_draft_before_the_next_pass() -> None:
    engine = FakeEngine(VOCAB)

    class Two(FixedJudge):
        def pays(self, source: str, place: int, survival: float, num_drafts: int) -> bool:
            return source == "model" and place < 2

    drafting = session(engine)
    (draft,) = drafting.propose([request([1, 2])], [9], Two())
    assert (len(draft), drafting.passes) == (2, 2)
    (draft,) = session(engine).propose([request([1, 2])], [9], FixedJudge(answer=False))
    assert draft == Draft()


def test_the_judge_is_told_how_likely_a_draft_survives() -> None:
    told: list[tuple[int, float]] = []

    class Told(FixedJudge):
        def chance(self, guess: Guess, place: int) -> float:
            return 0.5**place

        def pays(self, source: str, place: int, survival: float, num_drafts: int) -> bool:
            told.append((place, survival))
            return True

    attempt = Attempt(request([1]), 9)
    for token in (3, 4, 5):
        assert attempt.goes_on("model", Told(), 1)
        attempt.add("model", token, 0.7, None)
    attempt.goes_on("model", Told(), 1)
    attempt.goes_on("model", Told(), 1)  # asking again changes nothing
    assert told == [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.125), (3, 0.125)]


def test_an_end_is_the_last_token_of_a_draft() -> None:
    engine = FakeEngine(VOCAB)
    written = greedy(engine, [1, 2], 6)
    one = request([1, 2], eos_token_ids=frozenset(written[2:3]))
    (draft,) = session(engine).propose([one], [6], FixedJudge())
    assert list(draft.tokens) == written[: written.index(written[2]) + 1]


def test_a_draft_stays_within_the_context_of_its_model() -> None:
    engine = FakeEngine(VOCAB, max_context=6)
    one = request([1, 2, 3])
    drafting = session(engine)
    (draft,) = drafting.propose([one], [9], FixedJudge())
    assert len(draft) == 3
    one.ids += [1, 1, 1]
    assert drafting.propose([one], [9], FixedJudge()) == [Draft()]


@pytest.mark.parametrize("draft_vocab", [24, 48])
def test_b37_ids_of_one_side_only_are_neither_drafted_nor_read(draft_vocab: int) -> None:
    engine = FakeEngine(draft_vocab)
    drafting = session(engine)
    one = request([1, 2, 30])
    for _ in range(30):
        (draft,) = drafting.propose([one], [5], FixedJudge())
        assert max(draft.tokens) < min(VOCAB, draft_vocab)
        one.ids += [31]
    assert max(engine.caches[0].tokens[0]) < draft_vocab


def test_confidences_are_the_models_own_probabilities() -> None:
    engine = FakeEngine(VOCAB)
    (draft,) = session(engine).propose([request([1, 2])], [1], FixedJudge())
    law = engine.logits(torch.tensor([[1, 2]]))[0, -1].softmax(-1)
    assert draft.guesses[0].prior == pytest.approx(float(law.max()))


def test_a_finished_sequence_frees_its_cache() -> None:
    engine = FakeEngine(VOCAB)
    drafting, one = session(engine), request([1, 2])
    drafting.propose([one], [3], FixedJudge())
    drafting.finish(one)
    assert engine.caches[0].released == [0]
