from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantkit import sampling_ops
from quantkit.extension import EXTENSION_LOADED
from quantkit.runtime.choice import argmax, gumbel_argmax
from quantkit.runtime.noise import noise_key
from quantkit.sampling_ops import gumbel
from tests import reference

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


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("columns", [1, 15, 33, 3000])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_a_draw_is_the_choice_and_its_share(
    temperature: float, columns: int, rows: int, noise: bool, some: bool
) -> None:
    generator = torch.Generator().manual_seed(columns + rows)
    scores = torch.randn(rows, columns, generator=generator) * 3 + 5
    vocab = 3 * columns + 2
    ids = torch.randperm(vocab, generator=generator)[:columns].sort().values
    keys = torch.tensor(KEYS[:rows])
    tokens, likelihoods = sampling_ops.draw_rows(
        scores, keys if noise else None, ids if some else None, vocab, temperature
    )
    wide = sampling_ops.widen(scores, ids, vocab) if some else scores
    weights = (wide - wide.amax(-1, keepdim=True)) / temperature
    expected = gumbel_argmax(weights, KEYS[:rows]) if noise else argmax(wide)
    assert torch.equal(tokens, expected)
    laws = np.exp(reference.log_softmax(wide.double().numpy() / temperature))
    shares = np.take_along_axis(laws, tokens.numpy()[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(likelihoods.numpy(), shares, rtol=1e-5)


def test_many_draws_of_some_tokens_are_those_from_all() -> None:
    # The winner near and far, ties, and noise of the ids, not of the columns.
    scores = weights(len(KEYS), 2_000, 2.0)
    scores[:, ::7] = -NEAR - 1
    ids = torch.arange(2_000) * 20 + 3
    tokens, _ = sampling_ops.draw_rows(scores, torch.tensor(KEYS), ids, 40_003)
    assert torch.equal(tokens, gumbel_argmax(sampling_ops.widen(scores, ids, 40_003), KEYS))


@pytest.mark.parametrize("noise", [None, torch.tensor(KEYS[:1])])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_draw_from_what_is_not_finite_shows_it(value: float, noise: torch.Tensor | None) -> None:
    scores = torch.randn(1, 50)
    scores[0, 20] = value
    _, likelihoods = sampling_ops.draw_rows(scores, noise, None, 50)
    assert bool(likelihoods.isnan().all())


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 63, 64, 65, 1000])
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
    with pytest.raises(RuntimeError, match=r"token_ids must be of shape \[columns\] = \[8\], got"):
        sampling_ops.draw_rows(scores, keys, keys, 8)
    with pytest.raises(RuntimeError, match="temperature must be above 0, got 0"):
        sampling_ops.draw_rows(scores, keys, None, 8, 0.0)
    assert sampling_ops.sample_gumbel(torch.zeros(0, 8), keys[:0]).shape == (0,)


def test_fake_kernels_of_draws_know_the_shapes() -> None:
    scores, keys = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    for inputs in ((scores, keys, None, 8, 0.5), (scores, None, torch.arange(8), 9, 1.0)):
        torch.library.opcheck(
            torch.ops.quantkit.draw_rows.default, inputs, test_utils=("test_faketensor",)
        )
