"""A source whose experts are stored together, read as though each were stored by itself.

Some checkpoints hold all experts of a layer in one three-dimensional tensor. Engines read quantized
experts one by one, so that is how they are calibrated and written; nothing is copied for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.source import HEAD_BYTES, ModelSource
from quantkit.experts import FUSED, FusedExperts


@dataclass(frozen=True, slots=True)
class _Part:
    """One expert's matrix: which of the `shares` equal parts by rows of `stored[expert]`."""

    stored: str
    expert: int
    number: int = 0
    shares: int = 1


class FusedSource:
    """Another source with some three-dimensional tensors taken apart; else the same."""

    def __init__(self, source: ModelSource, parts: Mapping[str, _Part]) -> None:
        self._source = source
        self._parts = parts
        fused = {part.stored for part in parts.values()}
        self._names = sorted({*source.names, *parts} - fused)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return self._names

    def tensor(self, name: str) -> Tensor:
        """Return one tensor; experts by themselves."""
        part = self._parts.get(name)
        if part is None:
            return self._source.tensor(name)
        return self._source.tensor(part.stored)[part.expert].chunk(part.shares)[part.number]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        part = self._parts.get(name)
        if part is None:
            return self._source.shape(name)
        _, rows, columns = self._source.shape(part.stored)
        return (rows // part.shares, columns)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored dtype."""
        part = self._parts.get(name)
        return self._source.dtype(name if part is None else part.stored)

    def head(self, name: str) -> bytes:
        """Return the first bytes of a tensor."""
        if name not in self._parts:
            return self._source.head(name)
        values = self.tensor(name).flatten()
        return values[: HEAD_BYTES // values.element_size()].view(torch.uint8).numpy().tobytes()


def with_split_experts(
    source: ModelSource, names: Mapping[str, str], fused: Sequence[FusedExperts]
) -> ModelSource:
    """Return the source with the given experts taken apart where they are stored together.

    `names` maps names in the source to those in the model, in which the experts are fused.
    """
    stored = {inner: outer for outer, inner in names.items()}
    parts: dict[str, _Part] = {}
    for experts in fused:
        gate, up, down = experts.leaves
        for parameter, leaves in zip(FUSED, ((gate, up), (down,)), strict=True):
            tensor = stored.get(f"{experts.name}.{parameter}")
            if tensor is None:
                continue
            folder = tensor.removesuffix(f".{parameter}")
            for expert in range(source.shape(tensor)[0]):
                for number, leaf in enumerate(leaves):
                    name = f"{folder}.{expert}.{leaf}.weight"
                    parts[name] = _Part(tensor, expert, number, len(leaves))
    return FusedSource(source, parts) if parts else source
