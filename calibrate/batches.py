"""Calibration sequences in batches, and what a batch needs to pass through the layers."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.ranks import BLOCK_SEQUENCES, Ranks


@dataclass(slots=True)
class Call:
    """The arguments of one layer call, with the hidden states taken out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class Batch:
    """One batch on its way through the layers.

    hidden: [sequences, tokens, hidden_size], the input of the next layer. calls: one a layer.
    first: number of its first sequence, counted over all batches. tokens_before: tokens of all
    sequences before that one.
    """

    hidden: Tensor
    cache: Any
    calls: list[Call] = field(default_factory=list)
    first: int = 0
    tokens_before: int = 0

    def shared_states(self) -> list[UserDict[str, tuple[Tensor, ...]]]:
        """Return what layers hand on beside hidden states: keys and values, in some models."""
        found: dict[int, UserDict[str, tuple[Tensor, ...]]] = {}
        for call in self.calls:
            for value in (*call.args, *call.kwargs.values()):
                if isinstance(value, UserDict):
                    found.setdefault(id(value), value)
        return list(found.values())


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Token ids [sequences, tokens] int64, and what `Batch` says of their place among all."""

    ids: Tensor
    first: int
    tokens_before: int

    @property
    def block(self) -> int:
        """The number of the block that it is a part of."""
        return self.first // BLOCK_SEQUENCES


def make_batches(samples: Sequence[Tensor], batch_size: int) -> list[Tensor]:
    """Stack samples of equal length, at most `batch_size` together, longest first.

    The first batch is one sequence, on which each layer's error is measured at little cost; no
    batch goes beyond the end of a block. The order of equally long samples is kept, so the same
    samples give the same batches. Shapes: samples [tokens] int64 -> batches [sequences, tokens].
    """
    batches: list[list[Tensor]] = []
    for number, row in enumerate(sorted(samples, key=len, reverse=True)):  # stable
        begins = number < 2 or number % BLOCK_SEQUENCES == 0 or len(batches[-1]) == batch_size
        if begins or len(row) != len(batches[-1][0]):
            batches.append([])
        batches[-1].append(row)
    return [torch.stack(rows) for rows in batches]


def numbered(batches: Sequence[Tensor]) -> Iterator[TokenBatch]:
    """Yield the batches with their places. Shapes: each [sequences, tokens] int64."""
    first = tokens = 0
    for ids in batches:
        yield TokenBatch(ids, first, tokens)
        first += ids.shape[0]
        tokens += ids.numel()


def own_blocks(batches: Sequence[Tensor], ranks: Ranks) -> list[list[TokenBatch]]:
    """Return the blocks that are this process's, in order, each as its batches."""
    blocks: dict[int, list[TokenBatch]] = {}
    for batch in numbered(batches):
        if ranks.has_block(batch.block):
            blocks.setdefault(batch.block, []).append(batch)
    return list(blocks.values())
