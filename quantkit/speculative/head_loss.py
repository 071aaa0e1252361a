"""The loss of a drafting step, with its gradient computed beside it.

Logits of a vocabulary are the largest tensors of the training, and automatic differentiation would
pass over them some twenty times through memory. Here a few rows at a time stay in the CPU's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 32
"""Rows that are worked on together."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What the draft's law should be. Rows are positions.

    Shapes: p float32 [rows, columns], the target's law, which may have mass elsewhere;
    distance_weight and entropy_weight float32 [rows], of the two losses.
    """

    p: Tensor
    distance_weight: Tensor
    entropy_weight: Tensor


class DraftLoss(torch.autograd.Function):
    """Sum over rows of weight * TV(p, q) + weight * -sum p log q.

    With q = softmax(logits) and s = sign(q - p), d TV / d logits = q / 2 * (s - sum q s); the
    cross-entropy's derivative is q sum p - p.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, goal: Goal) -> Tensor:
        """Return the loss, float32 []. Shapes: logits [rows, columns]."""
        gradient = torch.empty_like(logits)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            loss, gradient[rows] = _rows(logits[rows], goal, rows)
            total += loss
        ctx.save_for_backward(gradient)
        return total.float()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None


def draft_loss(logits: Tensor, goal: Goal) -> Tensor:
    """Return the loss of one drafting step; see DraftLoss."""
    loss: Tensor = DraftLoss.apply(logits, goal)  # type: ignore[no-untyped-call]
    return loss


def _rows(logits: Tensor, goal: Goal, rows: slice) -> tuple[float, Tensor]:
    """Return the loss of some rows, and the gradient."""
    p, logs = goal.p[rows], logits.float().log_softmax(-1)
    q, mass = logs.exp(), p.sum(-1)
    entropy = -torch.einsum("rc,rc->r", p, logs)
    entropy_weight, weight = goal.entropy_weight[rows], goal.distance_weight[rows]
    difference = q - p
    distance = 0.5 * (1 - mass + difference.abs().sum(-1))
    loss = float((weight * distance).sum() + (entropy_weight * entropy).sum())
    sign = difference.sign_()
    mean = torch.einsum("rc,rc->r", q, sign)
    shift = entropy_weight * mass - 0.5 * weight * mean
    gradient = sign.mul_(0.5 * weight[:, None]).add_(shift[:, None]).mul_(q)
    return loss, gradient.sub_(entropy_weight[:, None] * p)
