"""Choosing tokens on the GPU is choosing what the reference kernels choose."""

from __future__ import annotations

import pytest
import torch

from quantkit import sampling_ops

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("vocab", [1, 31, 4096, 50257, 128256])
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_choices(rows: int, vocab: int) -> None:
    scores = torch.randn(rows, vocab, device=DEVICE)
    scores[:, vocab // 2 :] = scores[:, : vocab - vocab // 2].clone()  # ties
    keys = torch.randint(-(2**62), 2**62, (rows,), device=DEVICE)
    first = scores.cpu().argmax(dim=-1) if rows else torch.empty(0, dtype=torch.int64)
    assert torch.equal(sampling_ops.argmax_rows(scores).cpu(), first)
    scores[scores < -0.5] = -torch.inf
    noise = sampling_ops.gumbel(keys.cpu(), torch.arange(vocab))
    expected = (noise + scores.cpu()).argmax(dim=-1)
    assert torch.equal(sampling_ops.sample_gumbel(scores, keys).cpu(), expected)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
def test_draws_from_some_tokens(rows: int, noise: bool) -> None:
    scores, ids = torch.randn(rows, 8192) * 3, torch.arange(8192) * 6 + 1
    keys = torch.randint(-(2**62), 2**62, (rows,)) if noise else None
    tokens, likelihoods = sampling_ops.draw_rows(scores, keys, ids, 50257, 0.5)
    theirs = (scores.cuda(), None if keys is None else keys.cuda(), ids.cuda())
    drawn, shares = sampling_ops.draw_rows(*theirs, 50257, 0.5)
    assert torch.equal(drawn.cpu(), tokens)
    assert torch.allclose(shares.cpu(), likelihoods, rtol=1e-4)


@pytest.mark.parametrize("vocab", [1, 31, 4096, 50257, 128256])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.95, 0.9999])
def test_nucleus(vocab: int, top_p: float) -> None:
    """Peaked rows and flat ones, those of which no block keeps enough."""
    scores = (
        torch.randn(5, vocab, device=DEVICE) * torch.tensor([[0], [0.1], [1], [4], [20]]).cuda()
    )
    probabilities = scores.softmax(-1)
    found = sampling_ops.nucleus_bound(probabilities, top_p).cpu()
    expected = sampling_ops.nucleus_bound(probabilities.cpu(), top_p)
    assert torch.equal(probabilities.cpu() >= found, probabilities.cpu() >= expected)
