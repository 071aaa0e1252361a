from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.evaluate import continuations
from quantkit.evaluate.continuations import ContinuationScorer, Likelihood, Question
from quantkit.runtime.loading import load_engine
from tests import tiny
from tests.runtime.fake_engine import FakeCache, FakeEngine

IDS = tiny.random_ids(300).tolist()
QUESTIONS = [
    Question(IDS[:30], [IDS[30:33], IDS[40:41], IDS[50:57]]),
    Question(IDS[:30] + IDS[100:110], [IDS[60:61], IDS[61:62]]),
    Question(IDS[70:71], [IDS[71:95]]),
    Question(IDS[:12], [IDS[3:9], IDS[12:14], IDS[3:9], IDS[5:6]]),
    Question(IDS[:30], [IDS[30:33]]),
]


def by_definition(engine: FakeEngine, question: Question) -> list[Likelihood]:
    found = []
    for continuation in question.continuations:
        total, greedy = 0.0, True
        for position, token in enumerate(continuation):
            row = engine._row([*question.context, *continuation[:position]]).double()
            total += float(row.log_softmax(-1)[token])
            greedy &= int(row.argmax()) == token
        found.append(Likelihood(pytest.approx(total, rel=1e-6), greedy))
    return found


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("pass_tokens", [3, 7, 512])
def test_every_continuation_follows_its_own_context(
    batch_size: int, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuations, "PREFILL_CHUNK", pass_tokens)
    engine = FakeEngine(tiny.VOCAB_SIZE)
    scorer = ContinuationScorer(engine, batch_size)
    for start in range(0, len(QUESTIONS), batch_size):
        batch = QUESTIONS[start : start + batch_size]
        assert scorer.score(batch) == [by_definition(engine, question) for question in batch]
    assert max(sum(counts) for _, counts in engine.calls) <= pass_tokens


def test_greedy_is_what_decoding_would_write() -> None:
    engine = FakeEngine(tiny.VOCAB_SIZE)
    written: list[int] = []
    for _ in range(4):
        written.append(int(engine._row([*IDS[:5], *written]).argmax()))
    other = [*written[:3], (written[3] + 1) % tiny.VOCAB_SIZE]
    ((found, last_wrong),) = ContinuationScorer(engine, 1).score(
        [Question(IDS[:5], [written, other])]
    )
    assert found.is_greedy
    assert not last_wrong.is_greedy


def test_a_shared_beginning_is_read_once() -> None:
    engine = FakeEngine(tiny.VOCAB_SIZE)
    scorer = ContinuationScorer(engine, 1)
    for number in range(3):
        scorer.score([Question([*IDS[:200], *IDS[200 + number : 210]], [[5], [6, 7]])])
    read = sum(sum(counts) for _, counts in engine.calls)
    assert read == 200 + (10 + 9 + 8) + 3  # and the first token of every two-token continuation


class Forgetful(FakeEngine):
    """Has layers with a state."""

    def new_cache(self, num_sequences: int, max_tokens: int) -> FakeCache:
        class Cache(FakeCache):
            def truncate(self, sequence: int, length: int) -> None:
                raise UnsupportedError("cannot be rolled back")

            def release(self, sequence: int) -> None:
                self.tokens[sequence] = []

        self.caches.append(Cache(num_sequences))
        return self.caches[-1]


def test_a_cache_that_cannot_go_back_is_filled_again() -> None:
    engine = Forgetful(tiny.VOCAB_SIZE)
    scorer = ContinuationScorer(engine, 2)
    for start in range(0, len(QUESTIONS), 2):
        batch = QUESTIONS[start : start + 2]
        assert scorer.score(batch) == [by_definition(engine, question) for question in batch]


def test_logits_that_are_not_finite_are_no_number() -> None:
    def row(prefix: object) -> Tensor:
        return torch.full((tiny.VOCAB_SIZE,), torch.nan)

    scorer = ContinuationScorer(FakeEngine(tiny.VOCAB_SIZE, row=row), 1)
    with pytest.raises(CheckpointError, match="not finite"):
        scorer.score([Question(IDS[:3], [[4]])])


@pytest.mark.parametrize("kv", ["none", "fp8"])
def test_a_real_engine_gives_what_it_gives_without_batching(quantized: Path, kv: str) -> None:
    engine = load_engine(quantized / "fp8", dtype="float32", kv=kv)
    together = ContinuationScorer(engine, 5).score(QUESTIONS)
    for question, found in zip(QUESTIONS, together, strict=True):
        for continuation, likelihood in zip(question.continuations, found, strict=True):
            ids = torch.tensor([*question.context, *continuation[:-1]])
            logits = engine.forward(ids, [0], [len(ids)], engine.new_cache(1, 64), last_only=False)
            rows = logits[-len(continuation) :].double().log_softmax(-1)
            expected = float(rows[torch.arange(len(continuation)), list(continuation)].sum())
            assert likelihood.log_probability == pytest.approx(expected, abs=1e-4)
