"""Statistics of what passes by, in one canonical shape.

An observer receives [num_observations, num_scales, num_elements] and reduces the first and the
last dimension, so it needs to know nothing of tensors, tokens or heads. It has no opinion about
formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class AmaxObserver:
    """Running max |x| per scale, and the number of observations behind it."""

    amax: Tensor | None = None  # float32 [num_scales]
    num_observations: int = 0

    def update(self, x: Tensor) -> None:
        """Take in a batch. Shapes: x [num_observations, num_scales, num_elements]."""
        self.merge(amax_of(x), x.shape[0])

    def merge(self, amax: Tensor, num_observations: int) -> None:
        """Take in a batch of which the amax is known. Shapes: amax [num_scales]."""
        if num_observations:
            self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
            self.num_observations += num_observations

    def take(self) -> AmaxObserver:
        """Return, and forget, what was seen."""
        found = AmaxObserver(self.amax, self.num_observations)
        self.amax, self.num_observations = None, 0
        return found

    def merge_observer(self, other: AmaxObserver) -> None:
        """Take in what another one has seen."""
        if other.amax is not None:
            self.merge(other.amax, other.num_observations)


def amax_of(x: Tensor) -> Tensor:
    """Return max |x| per scale. Shapes: [observations, scales, elements] -> float32 [scales].

    0 where there is nothing to observe; NaN propagates.
    """
    if x.numel() == 0:
        return torch.zeros(x.shape[1], device=x.device)
    if x.shape[1] == 1:
        low, high = torch.aminmax(x)  # one pass, and no copy of |x|
        return torch.maximum(-low, high).float().reshape(1)
    return x.abs().amax(dim=(0, 2)).float()


def canonical_input(x: Tensor) -> Tensor:
    """Return a linear layer's input [..., features] as [tokens, 1, features]: one scale in all."""
    return x.reshape(-1, 1, x.shape[-1])


def canonical_kv(states: Tensor, per_head: bool) -> Tensor:
    """Return keys or values as observations.

    Shapes: states [batch, heads, tokens, head_dim] -> [batch * tokens, heads, head_dim] with one
    scale a head, or [batch * tokens, 1, heads * head_dim] with one for all.
    """
    batch, heads, tokens, head_dim = states.shape
    by_token = states.transpose(1, 2).reshape(batch * tokens, heads, head_dim)
    return by_token if per_head else by_token.reshape(batch * tokens, 1, heads * head_dim)
