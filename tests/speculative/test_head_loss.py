from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.speculative.head_loss import ROWS, Goal, draft_loss


def goal(rows: int, columns: int) -> Goal:
    """Laws with mass elsewhere, rows without weight."""
    p = torch.randn(rows, columns).softmax(-1) * torch.rand(rows, 1)
    return Goal(p, torch.rand(rows).round(), torch.rand(rows))


def by_definition(logits: Tensor, goal: Goal) -> Tensor:
    log_q = logits.float().log_softmax(-1)
    distance = 0.5 * (1 - goal.p.sum(-1) + (goal.p - log_q.exp()).abs().sum(-1))
    entropy = -(goal.p * log_q).sum(-1)
    return (goal.distance_weight * distance + goal.entropy_weight * entropy).sum()


@pytest.mark.parametrize("rows", [1, ROWS, 2 * ROWS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient_are_those_of_the_definition(rows: int, dtype: torch.dtype) -> None:
    aim = goal(rows, 20)
    ours = torch.randn(rows, 20).to(dtype).requires_grad_()
    theirs = ours.detach().float().requires_grad_()
    loss, expected = draft_loss(ours, aim), by_definition(theirs, aim)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (3 * loss).backward()
    (3 * expected).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert torch.allclose(ours.grad.float(), theirs.grad, atol=tolerance)


def test_a_token_of_no_probability_leaves_the_loss_finite() -> None:
    logits = torch.tensor([[0.0, -400.0]], requires_grad=True)
    one = torch.ones(1)
    loss = draft_loss(logits, Goal(torch.tensor([[0.5, 0.5]]), one, one))
    loss.backward()
    assert bool(loss.isfinite())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
