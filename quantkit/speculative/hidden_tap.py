"""An engine that remembers the hidden states that its logits came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quantkit.errors import UnsupportedError
from quantkit.runtime.engine import Engine, SequenceCache


@runtime_checkable
class OpenEngine(Protocol):
    """An Engine whose pass can be had in two parts; `forward` is one after the other."""

    vocab_size: int
    max_context: int
    device: torch.device
    dtype: torch.dtype

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        ...

    def new_cache(self, num_sequences: int, max_tokens: int) -> SequenceCache:
        """Return an empty cache; see Engine."""
        ...

    def hidden(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        cache: SequenceCache,
    ) -> Tensor:
        """Append tokens as `forward` does; return what the output head reads.

        Shapes: int64 [num_tokens] -> [num_tokens, hidden_size], valid until the next call.
        """
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits. Shapes: [rows, hidden_size] -> float32 [rows, vocab]."""
        ...

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences; see Engine."""
        ...


def open_engine(engine: Engine) -> OpenEngine:
    """Return the engine; raises UnsupportedError if its hidden states cannot be had."""
    if isinstance(engine, OpenEngine):
        return engine
    raise UnsupportedError(
        f"a drafter head reads hidden states, which {type(engine).__name__} does not give; use "
        "draft='suffix' or a draft model"
    )


class HiddenTap:
    """Runs an engine, and keeps the hidden state of every position until it is taken.

    Implements Engine for the sequences of one generation. What is rolled back in the cache is
    overwritten here by what takes its place.
    """

    def __init__(self, engine: Engine, num_sequences: int) -> None:
        self._engine = open_engine(engine)
        self.vocab_size = engine.vocab_size
        self.max_context = engine.max_context
        self.device = engine.device
        self.dtype = engine.dtype
        self._first = [0] * num_sequences  # position of the first state kept
        self._kept: list[list[Tensor]] = [[] for _ in range(num_sequences)]
        self._count = [0] * num_sequences  # of positions kept

    def new_cache(self, num_sequences: int, max_tokens: int) -> SequenceCache:
        """Return an empty cache; see Engine."""
        return self._engine.new_cache(num_sequences, max_tokens)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        cache: SequenceCache,
        last_only: bool = True,
    ) -> Tensor:
        """Run the engine and keep the hidden states; see Engine."""
        starts = [cache.lengths[sequence] for sequence in sequences]
        hidden = self._engine.hidden(input_ids, sequences, num_new_tokens, cache).clone()
        parts = torch.split(hidden, list(num_new_tokens))
        for sequence, start, part in zip(sequences, starts, parts, strict=True):
            self._keep(sequence, start, part)
        return self._engine.head(torch.stack([part[-1] for part in parts]) if last_only else hidden)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences; see Engine."""
        return self._engine.logits(input_ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the engine's logits. Shapes: [rows, hidden_size] -> float32 [rows, vocab]."""
        return self._engine.head(hidden)

    def take(self, sequence: int, end: int) -> Tensor:
        """Return the states of all kept positions before `end`, and keep them no longer.

        Shapes: [num_positions, hidden_size].
        """
        kept = torch.cat(self._kept[sequence])
        taken, left = kept.tensor_split([end - self._first[sequence]])
        self._first[sequence], self._kept[sequence], self._count[sequence] = end, [left], len(left)
        return taken

    def drop(self, sequence: int) -> None:
        """Keep nothing of a sequence."""
        self._first[sequence], self._kept[sequence], self._count[sequence] = 0, [], 0

    def _keep(self, sequence: int, start: int, states: Tensor) -> None:
        kept = self._kept[sequence]
        refused = self._first[sequence] + self._count[sequence] - start
        while refused and refused >= len(kept[-1]):
            refused -= len(kept.pop())
        if refused:
            kept[-1] = kept[-1][:-refused]
        kept.append(states)
        self._count[sequence] = start + len(states) - self._first[sequence]
