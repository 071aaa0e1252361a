"""The model drafter: any smaller checkpoint with the same tokenizer runs ahead of the target.

It has a cache of its own. What it has read of a draft that was refused is rolled back when the
next draft begins.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import PREFILL_CHUNK
from quantkit.runtime.request import Request
from quantkit.runtime.verification import NO_DRAFT, Draft, Guess
from quantkit.speculative.drafter import DraftSession, Judge
from quantkit.speculative.drawing import Draw
from quantkit.speculative.vocabulary import fit_logits

CONFIDENCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Edges of the classes in which a drafter's own probabilities are counted."""


@dataclass(slots=True)
class Attempt:
    """A draft in the making."""

    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    survival: float = 1.0  # P(the first `judged` guesses are accepted)
    judged: int = 0

    def add(self, source: str, token: int, confidence: float, law: Tensor | None) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.guesses.append(Guess(source, bisect(CONFIDENCES, confidence), confidence))
        if law is not None:
            self.laws.append(law)

    def goes_on(self, source: str, judge: Judge, num_drafts: int) -> bool:
        """Return whether to draft another token."""
        if len(self.tokens) >= self.limit:
            return False
        if self.tokens and self.tokens[-1] in self.request.params.ending_ids:
            return False
        for place in range(self.judged, len(self.guesses)):
            self.survival *= judge.chance(self.guesses[place], place)
        self.judged = len(self.guesses)
        return judge.pays(source, self.judged, self.survival, num_drafts)

    def draft(self) -> Draft:
        """Return what came of it."""
        if not self.tokens:
            return NO_DRAFT
        return Draft(self.tokens, self.guesses, torch.stack(self.laws) if self.laws else None)


class ModelSession:
    """Drafting for one generation; implements DraftSession."""

    def __init__(self, model: Engine, target: Engine, num_sequences: int, draw: Draw) -> None:
        self.passes = 0
        self._model = model
        self.engine = target
        self._draw = draw
        self._cache = model.new_cache(num_sequences, min(model.max_context, 1024))
        # What the cache of a sequence holds, and how much of it was committed when it was read.
        self._read: list[list[int]] = [[] for _ in range(num_sequences)]
        self._committed = [0] * num_sequences

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], judge: Judge
    ) -> list[Draft]:
        """Draft while it pays, all sequences in one pass; see DraftSession."""
        attempts = [
            Attempt(request, min(limit, self._model.max_context - request.length))
            for request, limit in zip(requests, limits, strict=True)
        ]
        active = self._still_active(attempts, judge)
        inputs = [self._unread(attempt.request) for attempt in active]
        while active:
            self._extend(active, inputs)
            active = self._still_active(active, judge)
            inputs = [attempt.tokens[-1:] for attempt in active]
        return [attempt.draft() for attempt in attempts]

    def finish(self, request: Request) -> None:
        """Free the cache of a request."""
        self._cache.release(request.sequence)
        self._read[request.sequence], self._committed[request.sequence] = [], 0

    def _still_active(self, attempts: Sequence[Attempt], judge: Judge) -> list[Attempt]:
        count = len(attempts)
        return [attempt for attempt in attempts if attempt.goes_on("model", judge, count)]

    def _extend(self, attempts: Sequence[Attempt], inputs: Sequence[list[int]]) -> None:
        """Draw one more token of each attempt."""
        logits = fit_logits(self._forward(attempts, inputs), self.engine.vocab_size)
        drawn = self._draw(
            logits.to(self.engine.device),
            [attempt.request for attempt in attempts],
            [attempt.tokens for attempt in attempts],
        )
        for row, attempt in enumerate(attempts):
            law = None if drawn.laws is None else drawn.laws[row]
            attempt.add("model", drawn.tokens[row], drawn.confidences[row], law)

    def _unread(self, request: Request) -> list[int]:
        """Return the committed tokens that are not in the cache, having rolled back all others."""
        sequence, read = request.sequence, self._read[request.sequence]
        start = self._committed[sequence]
        new = request.tokens_from(start)
        # The last token is read again if need be: it is what the next one follows.
        pairs = zip(read[start:], new[:-1], strict=False)
        agreed = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if agreed is None:
            agreed = min(len(read) - start, len(new) - 1)
        if start + agreed < len(read):
            self._cache.truncate(sequence, start + agreed)
            del read[start + agreed :]
        self._committed[sequence] = request.length
        return new[agreed:]

    def _forward(self, attempts: Sequence[Attempt], inputs: Sequence[list[int]]) -> Tensor:
        """Read tokens of several sequences; float32 logits [len(attempts), vocab of the draft]."""
        inputs = [
            self._read_ahead(attempt.request.sequence, tokens)
            for attempt, tokens in zip(attempts, inputs, strict=True)
        ]
        sequences = [attempt.request.sequence for attempt in attempts]
        logits = self._append([token for row in inputs for token in row], sequences, inputs)
        self.passes += 1
        return logits

    def _read_ahead(self, sequence: int, tokens: list[int]) -> list[int]:
        """Read all but the end of a long input by itself; return the end."""
        while len(tokens) > PREFILL_CHUNK:
            chunk, tokens = tokens[:PREFILL_CHUNK], tokens[PREFILL_CHUNK:]
            self._append(chunk, [sequence], [chunk])
        return tokens

    @torch.inference_mode()
    def _append(self, packed: list[int], sequences: list[int], rows: Sequence[list[int]]) -> Tensor:
        for sequence, row in zip(sequences, rows, strict=True):
            self._read[sequence] += row
        # The target may write ids that this vocabulary lacks; any token does in their place.
        known = [token if token < self._model.vocab_size else 0 for token in packed]
        ids = torch.tensor(known, dtype=torch.int64)
        return self._model.forward(ids, sequences, [len(row) for row in rows], self._cache)


class ModelDrafter:
    """Drafts with a smaller model; implements Drafter."""

    def __init__(self, model: Engine) -> None:
        self._model = model

    def session(self, target: Engine, num_sequences: int, draw: Draw) -> DraftSession:
        """Return a session with a cache of its own."""
        return ModelSession(self._model, target, num_sequences, draw)

    def forget(self) -> None:
        """Do nothing: a model keeps no texts."""
