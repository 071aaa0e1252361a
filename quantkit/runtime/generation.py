"""The generation loop: prefill every prompt, then decode all unfinished sequences together.

A step proposes drafts, runs the target once over all rows, verifies, and commits what holds;
without drafts a row is a sequence and this is plain decoding. The loop knows an Engine (tokens in,
logits out), and neither the model behind it, nor the tokenizer, nor who drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quantkit.errors import GenerationError
from quantkit.runtime.drafting import Speculation
from quantkit.runtime.engine import Engine, SequenceCache
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Completion, Request, Token
from quantkit.runtime.sampling import log_probabilities
from quantkit.runtime.stats import Stats
from quantkit.runtime.text import TextStream
from quantkit.runtime.verification import NO_DRAFT, Draft, Verifier, row_starts, verify_coupled

PREFILL_CHUNK = 512
"""Most prompt tokens in one forward pass; bounds the activations' memory."""

CUDA_PREFILL_CHUNK = 8192
"""The same on a GPU, where a few hundred tokens leave most of it idle."""


class Generation:
    """One call: prompts, run to their ends.

    Prompts are prefilled one at a time and rows are chosen from independently, so a sequence does
    not depend on what else is in the batch. With a `width` every decoding pass runs exactly that
    many rows of one sequence, padded, so that not even roundings depend on drafts or on the batch.
    Raises GenerationError, naming the prompt, on prompts that are empty, do not fit the context, or
    hold ids outside the vocabulary.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: ResolvedParams,
        new_text: Callable[[], TextStream] | None = None,
        speculation: Speculation | None = None,
        width: int | None = None,
    ) -> None:
        drafts = speculation.stats if speculation is not None else None
        self.stats = Stats(seed=params.seed_used, drafts=drafts)
        self._engine = engine if speculation is None else speculation.engine
        self._params = params
        self._speculation = speculation
        self._width = width
        self._requests = [
            self._new_request(number, prompt, new_text) for number, prompt in enumerate(prompts)
        ]

    def completions(self) -> list[Completion]:
        """Run to the end and return one completion per prompt, in order."""
        for _ in self.tokens():
            pass
        return [request.completion() for request in self._requests]

    def tokens(self) -> Iterator[Token]:
        """Yield every token of every sequence as it is chosen; abandoning the iterator is fine."""
        if not self._running():
            return
        longest = max(len(r.prompt) + r.budget for r in self._requests)
        cache = self._engine.new_cache(len(self._requests), longest)
        try:
            started = time.perf_counter()
            for request in self._running():
                yield self._prefill(request, cache, started)
            while running := self._running():
                yield from self._step(running, cache)
        finally:
            for request in self._running():
                cache.release(request.sequence)

    def _running(self) -> list[Request]:
        """Return the requests that are not finished."""
        return [request for request in self._requests if request.finish_reason is None]

    def _prefill(self, request: Request, cache: SequenceCache, started: float) -> Token:
        """Read one prompt, in chunks, and choose its first token."""
        begin = time.perf_counter()
        on_cpu = self._engine.device.type == "cpu"
        size = PREFILL_CHUNK if on_cpu else CUDA_PREFILL_CHUNK
        for at in range(0, len(request.prompt), size):
            chunk = request.prompt[at : at + size]
            logits = self._forward(chunk, [request.sequence], [len(chunk)], cache)
        chosen = self._verify(logits, [request], [NO_DRAFT], verify_coupled)
        end = time.perf_counter()
        request.stats.time_to_first_token = self.stats.time_to_first_token = end - started
        for stats in (self.stats, request.stats):
            stats.prefill_seconds += end - begin
        (token,) = self._commit(request, NO_DRAFT, chosen[0], cache)
        return token

    def _step(self, running: list[Request], cache: SequenceCache) -> list[Token]:
        """Propose, run the target once, verify, commit, observe; at least one token a sequence."""
        begin = time.perf_counter()
        drafts, verify = [NO_DRAFT] * len(running), verify_coupled
        if self._speculation is not None:
            drafts, verify = self._propose(self._speculation, running), self._speculation.verify
        drafted = time.perf_counter()
        logits = self._target(running, drafts, cache)
        ran = time.perf_counter()
        chosen = self._verify(logits, running, drafts, verify)
        if logits.device.type != "cpu":  # the pass is over when its answer is here
            ran = time.perf_counter()
        tokens = [
            self._commit(request, draft, ids, cache)
            for request, draft, ids in zip(running, drafts, chosen, strict=True)
        ]
        counts = [len(committed) for committed in tokens]
        if self._speculation is not None:
            self._speculation.observe(running, drafts, counts, drafted - begin, ran - drafted)
        self._count(running, counts, time.perf_counter() - begin)
        return [token for committed in tokens for token in committed]

    def _propose(self, speculation: Speculation, running: Sequence[Request]) -> list[Draft]:
        """Return the drafts, cut before what cannot be: beyond the budget, or not a token."""
        drafts = []
        for request, draft in zip(running, speculation.propose(running), strict=True):
            # Whatever becomes of the draft, one token more is chosen and needs its place.
            room = (request.room if self._width is None else min(request.room, self._width)) - 1
            valid = 0
            for token_id in draft.tokens[:room]:
                if not 0 <= token_id < self._engine.vocab_size:
                    break
                valid += 1
            drafts.append(draft.first(valid))
        return drafts

    def _target(
        self, running: Sequence[Request], drafts: Sequence[Draft], cache: SequenceCache
    ) -> Tensor:
        """Run the last token and the draft of every request; logits [sum of 1 + draft, vocab]."""
        rows = [
            [request.ids[-1], *draft.tokens] for request, draft in zip(running, drafts, strict=True)
        ]
        sequences = [request.sequence for request in running]
        if self._width is None:
            counts = [len(row) for row in rows]
            packed = [token_id for row in rows for token_id in row]
            return self._forward(packed, sequences, counts, cache, last_only=False)
        parts = []
        for sequence, row in zip(sequences, rows, strict=True):
            fits = min(self._width, self._engine.max_context - cache.lengths[sequence])
            padded = [*row, *row[-1:] * (fits - len(row))]
            logits = self._forward(padded, [sequence], [fits], cache, last_only=False)
            parts.append(logits[: len(row)])
        return torch.cat(parts)

    @torch.inference_mode()
    def _forward(
        self,
        ids: list[int],
        sequences: list[int],
        counts: list[int],
        cache: SequenceCache,
        last_only: bool = True,
    ) -> Tensor:
        """Append tokens and return float32 logits, [len(sequences), vocab] or [len(ids), vocab]."""
        tokens = torch.tensor(ids, dtype=torch.int64)
        return self._engine.forward(tokens, sequences, counts, cache, last_only)

    @torch.inference_mode()
    def _verify(
        self, logits: Tensor, running: list[Request], drafts: Sequence[Draft], verify: Verifier
    ) -> list[list[int]]:
        """Return the new tokens of every request, and keep their log-probabilities if asked to."""
        chosen = verify(logits, running, drafts, self._params)
        if self._params.logprobs is not None:
            for request, ids, start in zip(running, chosen, row_starts(drafts), strict=True):
                rows = logits[start : start + len(ids)]
                request.logprobs += log_probabilities(rows, ids, self._params.logprobs)
        return chosen

    def _commit(
        self, request: Request, draft: Draft, ids: Sequence[int], cache: SequenceCache
    ) -> list[Token]:
        """Append tokens up to the one that ends the sequence; forget what the cache has beyond."""
        tokens = []
        for token_id in ids:
            tokens.append(request.accept(token_id))
            if request.finish_reason is not None:
                cache.release(request.sequence)
                break
        else:
            if len(draft) or self._width is not None:
                # The last token is not in the cache: it is the input of the next step.
                cache.truncate(request.sequence, request.length - 1)
        del request.logprobs[len(request.ids) :]
        for stats in (self.stats, request.stats):
            stats.new_tokens += len(tokens)
        return tokens

    def _count(self, running: Sequence[Request], counts: Sequence[int], seconds: float) -> None:
        for request, count in zip(running, counts, strict=True):
            request.stats.decode_tokens += count
            request.stats.decode_seconds += seconds
        self.stats.decode_tokens += sum(counts)
        self.stats.decode_seconds += seconds

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
        request = Request(number, ids, budget, self._params, new_text() if new_text else None)
        request.finish_reason = "length" if budget == 0 else None
        request.stats = Stats(prompt_tokens=len(ids), seed=self._params.seed_used)
        self.stats.prompt_tokens += len(ids)
        return request
