"""What generation may ask of a model: two interfaces, and what no implementation lets pass.

The decoder and the transformers fallback implement them; generation and speculation use nothing
else, so neither knows which model family it drives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import GenerationError


class SequenceCache(Protocol):
    """Keys and values of several sequences that grow independently."""

    @property
    def lengths(self) -> list[int]:
        """Tokens stored per sequence."""
        ...

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every token of `sequence` from position `length` on (rollback)."""
        ...

    def release(self, sequence: int) -> None:
        """Forget `sequence` and free its memory; its length becomes 0 and it may be used again."""
        ...


class Engine(Protocol):
    """A loaded model."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence that the model can attend to."""
        ...

    @property
    def device(self) -> torch.device:
        """Where inputs go and logits are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        ...

    def new_cache(self, num_sequences: int, max_tokens: int) -> SequenceCache:
        """Return an empty cache; `max_tokens` per sequence is a hint, the cache grows beyond it."""
        ...

    def forward(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        cache: SequenceCache,
        last_only: bool = True,
    ) -> Tensor:
        """Append tokens to the cache and return the logits that follow them.

        `input_ids` holds the new tokens of `sequences[0]`, then those of `sequences[1]`, and so on,
        without padding; `num_new_tokens` says how many each has (at least one). They take the
        positions that follow `cache.lengths`, which advance. A sequence may appear once.

        Shapes: input_ids int64 [num_tokens], on any device -> float32 [len(sequences), vocab], the
        logits after the last token of each sequence, or with `last_only=False` [num_tokens, vocab].
        """
        ...

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences, without a cache; K and V are not quantized.

        Shapes: int64 [batch, seq] -> float32 [batch, seq, vocab]. Every id is a token: there is no
        padding.
        """
        ...


def check_context(
    sequences: Sequence[int], num_new_tokens: Sequence[int], lengths: Sequence[int], limit: int
) -> None:
    """Raise GenerationError if a sequence would grow beyond `limit` tokens."""
    for sequence, count in zip(sequences, num_new_tokens, strict=True):
        if count < 1:
            raise GenerationError(f"sequence {sequence} has no new tokens; leave it out")
        if lengths[sequence] + count > limit:
            raise GenerationError(
                f"sequence {sequence} would have {lengths[sequence] + count} tokens, the model's "
                f"limit is {limit}; shorten the prompt or ask for fewer new tokens"
            )
