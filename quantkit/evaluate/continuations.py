"""Log-likelihoods of continuations under an Engine; what several of them share is read once.

Takes token ids, gives numbers; knows neither tokenizers nor the harness. Sequences are packed into
passes without padding. A sequence's cache is kept from one context to the next, as far as both
begin alike, so that the few-shot examples of a task are read once, and not once per question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.evaluate.models import chunk_rows
from quantkit.evaluate.scores import score
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import CUDA_PREFILL_CHUNK, PREFILL_CHUNK

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Question:
    """A context of at least one token, and what may follow it: continuations of at least one."""

    context: Ids
    continuations: Sequence[Ids]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """log p(continuation | context) in nats, and whether greedy decoding would write it."""

    log_probability: float
    is_greedy: bool


class ContinuationScorer:
    """Scores up to `batch_size` questions at a time, each in a sequence of its own."""

    def __init__(self, engine: Engine, batch_size: int) -> None:
        self._engine = engine
        self._cache = engine.new_cache(batch_size, 0)
        self._held: list[list[int]] = [[] for _ in range(batch_size)]
        on_cpu = engine.device.type == "cpu"
        self._pass_tokens = PREFILL_CHUNK if on_cpu else CUDA_PREFILL_CHUNK
        self._scored_rows = min(self._pass_tokens, chunk_rows(engine.vocab_size))

    @torch.inference_mode()
    def score(self, questions: Sequence[Question]) -> list[list[Likelihood]]:
        """Return one Likelihood per continuation of every question, in order.

        Raises CheckpointError if a log-probability is not finite.
        """
        first = self._read([question.context for question in questions])
        found: list[list[Likelihood]] = [[] for _ in questions]
        for turn in range(max(len(question.continuations) for question in questions)):
            asked = {
                number: question.continuations[turn]
                for number, question in enumerate(questions)
                if turn < len(question.continuations)
            }
            for number, likelihood in self._turn(questions, asked, first).items():
                found[number].append(likelihood)
        return found

    def _read(self, contexts: Sequence[Ids]) -> dict[int, Tensor]:
        """Read every context; returns the logits that follow it, [1, vocab]."""
        # The last token is read in any case: its logits are what is wanted.
        rest = {
            sequence: context[self._keep(sequence, context[:-1]) :]
            for sequence, context in enumerate(contexts)
        }
        return {
            sequence: logits for sequence, _, logits in self._feed(rest, self._pass_tokens, True)
        }

    def _turn(
        self,
        questions: Sequence[Question],
        asked: Mapping[int, Ids],
        first: Mapping[int, Tensor],
    ) -> dict[int, Likelihood]:
        """Score one continuation of several questions, whose contexts have been read."""
        parts = {number: [_Part.of(first[number], ids[:1])] for number, ids in asked.items()}
        longer = {number: ids for number, ids in asked.items() if len(ids) > 1}
        missing = {}
        for number in longer:
            context = questions[number].context
            missing[number] = context[self._keep(number, context) :]
        for _ in self._feed(missing, self._pass_tokens, True):
            pass
        inputs = {number: ids[:-1] for number, ids in longer.items()}
        for number, start, logits in self._feed(inputs, self._scored_rows, False):
            targets = longer[number][start + 1 : start + 1 + len(logits)]
            parts[number].append(_Part.of(logits, targets))
        return {number: _Part.join(found) for number, found in parts.items()}

    def _feed(
        self, tokens: Mapping[int, Ids], limit: int, last_only: bool
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Append tokens to their sequences; yields (sequence, position in `tokens`, logits)."""
        for step in _steps(tokens, limit):
            packed = [token for number, a, b in step for token in tokens[number][a:b]]
            counts = [b - a for _, a, b in step]
            logits = self._engine.forward(
                torch.tensor(packed, dtype=torch.int64),
                [number for number, _, _ in step],
                counts,
                self._cache,
                last_only,
            )
            rows = torch.split(logits, [1] * len(step) if last_only else counts)
            for (number, start, end), part in zip(step, rows, strict=True):
                self._held[number] += tokens[number][start:end]
                yield number, start, part

    def _keep(self, sequence: int, ids: Ids) -> int:
        """Forget what a sequence holds beyond a beginning of `ids`; returns what is left of it."""
        held = self._held[sequence]
        length = _common(held, ids)
        if length < len(held):
            try:
                self._cache.truncate(sequence, length)
            except UnsupportedError:  # layers that keep a state cannot go back
                self._cache.release(sequence)
                length = 0
            del held[length:]
        return length


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tokens of a continuation."""

    nll: Tensor  # float64 [n]
    likeliest: bool

    @classmethod
    def of(cls, logits: Tensor, ids: Ids) -> _Part:
        """Score tokens. Shapes: logits [n, vocab]."""
        targets = torch.tensor(ids, dtype=torch.int64, device=logits.device)
        nll = score(logits, targets).nll
        if not bool(nll.isfinite().all()):
            raise CheckpointError(
                "the logits of the quantized model are not finite (NaN or infinity) for one of the "
                "task's questions; the model is damaged, or this dtype too narrow"
            )
        return cls(nll, bool((logits.argmax(dim=-1) == targets).all()))

    @staticmethod
    def join(parts: Sequence[_Part]) -> Likelihood:
        total = sum(float(part.nll.sum()) for part in parts)
        return Likelihood(-total, all(part.likeliest for part in parts))


def _steps(tokens: Mapping[int, Ids], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut tokens of several sequences into passes of at most `limit`: (sequence, start, end)."""
    step: list[tuple[int, int, int]] = []
    room = limit
    for sequence, ids in tokens.items():
        start = 0
        while start < len(ids):
            end = min(len(ids), start + room)
            step.append((sequence, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield step
                step, room = [], limit
    if step:
        yield step


def _common(left: Ids, right: Ids) -> int:
    """Return how many tokens two sequences share from their beginning."""
    shorter = min(len(left), len(right))
    for position in range(shorter):
        if left[position] != right[position]:
            return position
    return shorter
