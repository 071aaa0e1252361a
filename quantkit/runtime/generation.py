"""The generation loop: prefill every prompt, then decode all unfinished sequences together.

It knows an Engine (tokens in, logits out), sampling, and where sequences end. It does not know the
model behind the Engine, nor the tokenizer: text is what a TextStream makes of the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from quantkit.errors import GenerationError
from quantkit.runtime.engine import Engine, SequenceCache
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.sampling import Prefix, log_probabilities, sample
from quantkit.runtime.stats import Stats
from quantkit.runtime.text import TextStream

PREFILL_CHUNK = 512
"""Most prompt tokens in one forward pass; bounds the activations' memory."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model wrote after one prompt.

    `ids` are the new tokens, the one that ended the sequence included. `text` is their text
    without special tokens and without the stop string; None if the model has no tokenizer.
    `logprobs` has one {token id: log p} per id when asked for.
    """

    ids: list[int]
    text: str | None
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    stats: Stats


@dataclass(frozen=True, slots=True)
class Token:
    """One new token: its sequence, and the text it released (held back text follows later)."""

    sequence: int
    id: int
    text: str


@dataclass(slots=True)
class Request:
    """One sequence on its way: the prompt, what was generated, and how much may follow."""

    prompt: list[int]
    budget: int  # most new tokens, by max_new_tokens and by the context
    text: TextStream | None
    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


class Generation:
    """One call: prompts, run to their ends.

    Prompts are prefilled one at a time and rows are sampled independently, so a sequence does not
    depend on what else is in the batch. Raises GenerationError, naming the prompt, on prompts that
    are empty, do not fit the context, or hold ids outside the vocabulary.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: ResolvedParams,
        new_text: Callable[[], TextStream] | None = None,
    ) -> None:
        self.stats = Stats(seed=params.seed_used)
        self._engine = engine
        self._params = params
        self._requests = [
            self._new_request(number, prompt, new_text) for number, prompt in enumerate(prompts)
        ]

    def completions(self) -> list[Completion]:
        """Run to the end and return one completion per prompt, in order."""
        for _ in self.tokens():
            pass
        return [
            Completion(
                ids=request.ids,
                text=request.text.text if request.text else None,
                finish_reason=request.finish_reason or "length",
                logprobs=None if self._params.logprobs is None else request.logprobs,
                stats=request.stats,
            )
            for request in self._requests
        ]

    def tokens(self) -> Iterator[Token]:
        """Yield every token of every sequence as it is chosen; abandoning the iterator is fine."""
        running = self._running()
        if not running:
            return
        longest = max(len(r.prompt) + r.budget for r in self._requests)
        cache = self._engine.new_cache(len(self._requests), longest)
        try:
            started = time.perf_counter()
            for sequence in running:
                yield self._prefill(sequence, cache, started)
            while running := self._running():
                yield from self._decode(running, cache)
        finally:
            for sequence in self._running():
                cache.release(sequence)

    def _running(self) -> list[int]:
        """Return the sequences that are not finished."""
        return [i for i, request in enumerate(self._requests) if request.finish_reason is None]

    def _prefill(self, sequence: int, cache: SequenceCache, started: float) -> Token:
        """Read one prompt, in chunks, and choose its first token."""
        request = self._requests[sequence]
        begin = time.perf_counter()
        for at in range(0, len(request.prompt), PREFILL_CHUNK):
            chunk = request.prompt[at : at + PREFILL_CHUNK]
            logits = self._forward(chunk, [sequence], [len(chunk)], cache)
        (chosen,) = self._choose(logits, [sequence])
        end = time.perf_counter()
        request.stats.time_to_first_token = self.stats.time_to_first_token = end - started
        for stats in (self.stats, request.stats):
            stats.prefill_seconds += end - begin
        return self._accept(sequence, chosen, cache)

    def _decode(self, running: list[int], cache: SequenceCache) -> list[Token]:
        """Choose one more token for every running sequence."""
        begin = time.perf_counter()
        last = [self._requests[sequence].ids[-1] for sequence in running]
        logits = self._forward(last, running, [1] * len(running), cache)
        chosen = self._choose(logits, running)
        seconds = time.perf_counter() - begin
        for stats in (self.stats, *(self._requests[sequence].stats for sequence in running)):
            stats.decode_seconds += seconds
        for sequence in running:
            self._requests[sequence].stats.decode_tokens += 1
        self.stats.decode_tokens += len(running)
        return [self._accept(s, token, cache) for s, token in zip(running, chosen, strict=True)]

    @torch.inference_mode()
    def _forward(
        self, ids: list[int], sequences: list[int], counts: list[int], cache: SequenceCache
    ) -> Tensor:
        """Append tokens and return float32 logits [len(sequences), vocab]."""
        tokens = torch.tensor(ids, dtype=torch.int64, device=self._engine.device)
        return self._engine.forward(tokens, sequences, counts, cache)

    @torch.inference_mode()
    def _choose(self, logits: Tensor, sequences: list[int]) -> list[int]:
        """Sample one token per row; rows belong to `sequences`."""
        requests = [self._requests[sequence] for sequence in sequences]
        prefixes = [
            Prefix(sequence, request.prompt, request.ids)
            for sequence, request in zip(sequences, requests, strict=True)
        ]
        chosen: list[int] = sample(logits, prefixes, self._params).tolist()
        if self._params.logprobs is not None:
            rows = log_probabilities(logits, chosen, self._params.logprobs)
            for request, row in zip(requests, rows, strict=True):
                request.logprobs.append(row)
        return chosen

    def _accept(self, sequence: int, token_id: int, cache: SequenceCache) -> Token:
        """Append a chosen token; end its sequence if it does."""
        request = self._requests[sequence]
        request.ids.append(token_id)
        for stats in (self.stats, request.stats):
            stats.new_tokens += 1
        piece = ""
        if token_id in self._params.ending_ids:
            request.finish_reason = "stop"
        elif request.text is not None:
            armed = len(request.ids) >= self._params.min_new_tokens
            piece = request.text.push(token_id, armed)
            if request.text.stopped:
                request.finish_reason = "stop"
        if request.finish_reason is None and len(request.ids) == request.budget:
            request.finish_reason = "length"
        if request.finish_reason is not None:
            piece += request.text.finish() if request.text else ""
            cache.release(sequence)
        return Token(sequence, token_id, piece)

    def _new_request(
        self, number: int, prompt: Sequence[int], new_text: Callable[[], TextStream] | None
    ) -> Request:
        """Check one prompt and prepare its request."""
        ids, room = list(prompt), self._engine.max_context - len(prompt)
        if not ids:
            raise GenerationError(f"prompt {number} has no tokens; give at least one")
        for token_id in ids:
            if not 0 <= token_id < self._engine.vocab_size:
                raise GenerationError(
                    f"prompt {number} has token {token_id}, outside the vocabulary of "
                    f"{self._engine.vocab_size} tokens"
                )
        if room < 1 and self._params.max_new_tokens > 0:
            raise GenerationError(
                f"prompt {number} has {len(ids)} tokens and the model's context is "
                f"{self._engine.max_context}, which must also hold the new ones; shorten it"
            )
        budget = max(0, min(self._params.max_new_tokens, room))
        request = Request(ids, budget, new_text() if new_text else None)
        request.finish_reason = "length" if budget == 0 else None
        request.stats = Stats(prompt_tokens=len(ids), seed=self._params.seed_used)
        self.stats.prompt_tokens += len(ids)
        return request
