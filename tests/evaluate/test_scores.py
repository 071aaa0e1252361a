from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.evaluate import scores
from quantkit.evaluate.scores import TokenScores, compare, score
from tests import reference

VOCAB = 37


def logits(seed: int, rows: int = 20, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, VOCAB, generator=generator)


TARGETS = torch.arange(20) * 7 % VOCAB


def log_softmax(x: Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return reference.log_softmax(x.numpy().astype(np.float64))


@pytest.mark.parametrize("block", [1, 3 * VOCAB, 1 << 18])
def test_scores_are_those_of_the_definition(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "BLOCK_ELEMENTS", block)
    original, others = logits(0), [logits(0) + 0.3 * logits(seed) for seed in (1, 2)]
    found = compare(original, others, TARGETS)
    p = log_softmax(original)
    assert found[0].kl is None
    assert found[0].agrees is None
    for model, result in zip([original, *others], found, strict=True):
        expected = -log_softmax(model)[np.arange(20), TARGETS]
        np.testing.assert_allclose(result.nll, expected, rtol=1e-13)
        assert result.nll.dtype == torch.float64
    for model, result in zip(others, found[1:], strict=True):
        assert result.kl is not None
        assert result.agrees is not None
        q = log_softmax(model)
        np.testing.assert_allclose(result.kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-11)
        assert result.agrees.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()


def test_a_model_does_not_diverge_from_itself() -> None:
    (_, found) = compare(logits(0), [logits(0)], TARGETS)
    assert found.kl is not None
    assert found.kl.tolist() == [0.0] * 20


def test_neither_a_constant_nor_size_matters() -> None:
    # float32 would overflow in exp, and lose the difference of 1e-3 beside 1e4.
    original = torch.zeros(1, VOCAB)
    original[0, 0] = 200.0
    other = original + 1e4
    other[0, 1] += 210.0
    (_, found) = compare(original, [other], torch.tensor([1]))
    assert found.nll.item() == pytest.approx(np.log1p(np.exp(-10.0)), rel=1e-9)
    assert found.kl is not None
    assert found.kl.item() == pytest.approx(10 + np.log1p(np.exp(-10.0)), rel=1e-9)


def test_tiny_divergences_are_not_lost() -> None:
    original = logits(0)
    other = original.clone()
    other[:, 0] += 2.0**-10
    (_, found) = compare(original, [other], TARGETS)
    step = other[:, 0].double() - original[:, 0].double()
    p = torch.softmax(original.double(), dim=-1)[:, 0]
    assert found.kl is not None
    torch.testing.assert_close(
        found.kl, torch.log1p(p * torch.expm1(step)) - p * step, rtol=1e-6, atol=1e-15
    )


def test_one_model_alone() -> None:
    found = score(logits(3), TARGETS)
    assert found.kl is None
    torch.testing.assert_close(found.nll, compare(logits(3), [logits(4)], TARGETS)[0].nll)


def test_joining_keeps_the_order() -> None:
    whole = compare(logits(0), [logits(1)], TARGETS)[1]
    parts = [
        compare(logits(0)[rows], [logits(1)[rows]], TARGETS[rows])[1]
        for rows in (slice(0, 7), slice(7, 20))
    ]
    joined = TokenScores.join(parts)
    torch.testing.assert_close(joined.nll, whole.nll)
    torch.testing.assert_close(joined.kl, whole.kl)
    assert joined.agrees is not None
    assert joined.agrees.shape == (20,)
