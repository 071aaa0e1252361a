"""What moves a drafter head's weights in training: Muon for matrices, AdamW for vectors.

Muon (Jordan et al., 2024) makes the update of a matrix orthogonal, so that all its directions are
learned at the same pace. That counts where minutes on a CPU allow a few hundred updates: on SmolLM2
60 s of training gave the acceptance that AdamW for everything took 100 s to reach.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

MATRIX_RATE = 0.02
"""Learning rate of Muon, times sqrt(max(1, rows / columns)) of a matrix, as it was published."""
WEIGHT_DECAY = 0.01


class HeadOptimizer:
    """Both optimizers as one. `vector_rate` is the learning rate of vectors."""

    def __init__(self, parameters: Iterable[nn.Parameter], vector_rate: float) -> None:
        every = list(parameters)
        matrices = [parameter for parameter in every if parameter.dim() == 2]
        vectors = [parameter for parameter in every if parameter.dim() != 2]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY), MATRIX_RATE),
            (torch.optim.AdamW(vectors, betas=(0.9, 0.95), weight_decay=0.0), vector_rate),
        ]

    def step(self, pace: float) -> None:
        """Update all parameters at `pace` times their learning rates, and forget the gradients."""
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = pace * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
