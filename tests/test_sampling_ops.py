from __future__ import annotations

import math

import pytest
import torch

from quantkit import sampling_ops
from quantkit.extension import EXTENSION_LOADED
from quantkit.runtime.choice import argmax, gumbel_argmax
from quantkit.runtime.noise import noise_key
from quantkit.sampling_ops import gumbel

NEAR = 7.0
"""Scores this far below the largest are judged by their noise's bits first: kernel_choice.h."""
KEYS = [noise_key(1, sequence, 0) for sequence in range(300)]


def weights(rows: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator) * scale
    return scores - scores.amax(-1, keepdim=True)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 20.0, 1e30])
@pytest.mark.parametrize("vocab", [1, 7, 3000])
def test_the_choice_is_the_argmax_with_all_noise(vocab: int, scale: float) -> None:
    scores = weights(len(KEYS), vocab, scale)
    expected = (gumbel(torch.tensor(KEYS), torch.arange(vocab)) + scores).argmax(-1)
    assert torch.equal(gumbel_argmax(scores, KEYS), expected)


@pytest.mark.parametrize(("below", "far"), [(NEAR, 1_000), (12.0, 150_000)])
def test_tokens_far_below_the_likeliest_win_as_often_as_they_should(below: float, far: int) -> None:
    # One token near, and very many just beyond that have half of the mass together.
    scores = torch.full((len(KEYS), far + 1), -below - 0.001)
    scores[:, 7] = 0.0
    share = far * math.exp(-below - 0.001) / (1 + far * math.exp(-below - 0.001))
    chosen = gumbel_argmax(scores, KEYS)
    expected = (gumbel(torch.tensor(KEYS[:20]), torch.arange(far + 1)) + scores[:20]).argmax(-1)
    assert torch.equal(chosen[:20], expected)
    wins = float((chosen != 7).float().mean())
    assert abs(wins - share) < 4 * math.sqrt(share * (1 - share) / len(KEYS))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_excluded_tokens_are_never_chosen(scale: float) -> None:
    scores = weights(len(KEYS), 400, scale)
    scores[:, 1::2] = -math.inf
    scores -= scores.amax(-1, keepdim=True)
    chosen = gumbel_argmax(scores, KEYS)
    assert bool((chosen % 2 == 0).all())
    expected = (gumbel(torch.tensor(KEYS), torch.arange(400)) + scores).argmax(-1)
    assert torch.equal(chosen, expected)


def test_far_tokens_win_by_the_noise_of_single_bits() -> None:
    # Every kind of row: the winner near or far, ties between both, one token, none allowed.
    rows = torch.full((6, 40_000), -NEAR - 1)
    rows[0, 123] = 0.0
    rows[1] = -100.0
    rows[2, :20_000] = -math.inf
    rows[3] = -math.inf
    rows[3, 39_999] = -3.0
    rows[4] = -math.inf
    rows[5] = torch.linspace(-30, 0, 40_000)
    for first in range(0, 60, 6):
        keys = torch.tensor(KEYS[first : first + 6])
        expected = (gumbel(keys, torch.arange(40_000)) + rows).argmax(-1)
        assert torch.equal(gumbel_argmax(rows, KEYS[first : first + 6]), expected)


def test_a_row_without_finite_numbers_shows_it() -> None:
    rows = torch.randn(3, 100)
    rows[0, 70], rows[1, 3], rows[1, 90] = math.nan, math.nan, math.nan
    assert gumbel_argmax(rows, KEYS[:3])[:2].tolist() == [70, 3]


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000])
def test_argmax_is_torchs(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randint(-4, 4, (200, vocab), generator=generator).float()
    first = (rows == rows.amax(-1, keepdim=True)).float().argmax(-1)
    assert torch.equal(argmax(rows), first)


def test_argmax_is_the_first_of_equals_and_shows_nan() -> None:
    rows = torch.tensor([[0.0, 3.0, 3.0], [1.0, math.nan, 9.0], [-math.inf, -math.inf, -5.0]])
    assert argmax(rows).tolist() == [1, 1, 2]


@pytest.mark.skipif(not EXTENSION_LOADED, reason="the reference kernels take what torch takes")
def test_what_the_ops_do_not_take_is_said() -> None:
    scores, keys = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="scores must be float32, got float64"):
        sampling_ops.sample_gumbel(scores.double(), keys)
    with pytest.raises(RuntimeError, match=r"keys must be of shape \[rows\] = \[2\], got \[3\]"):
        sampling_ops.sample_gumbel(scores, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="keys must be int64"):
        sampling_ops.sample_gumbel(scores, keys.int())
    with pytest.raises(RuntimeError, match="at least one token"):
        sampling_ops.argmax_rows(torch.zeros(2, 0))
    with pytest.raises(RuntimeError, match=r"scores must be of shape \[rows, vocab\]"):
        sampling_ops.argmax_rows(torch.zeros(8))
    assert sampling_ops.sample_gumbel(torch.zeros(0, 8), keys[:0]).shape == (0,)
