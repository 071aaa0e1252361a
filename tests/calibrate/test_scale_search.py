"""The scale with the least weighted error is found, and what it cuts off is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.calibrate.scale_search import RATIOS, count_clipped, search_scale
from quantkit.errors import CalibrationError
from quantkit.numerics import (
    E3M4,
    E4M3,
    FORMATS,
    Format,
    amax_to_scale,
    decode,
    dequantize,
    quantize,
    tile_amax,
)
from tests import reference

ROWS, COLUMNS = 6, 20
TILES = {
    "channel": (1, COLUMNS),
    "tensor": (ROWS, COLUMNS),
    "block": (4, 8),  # cut at both edges
    "group": (1, 8),
    "larger than the matrix": (128, 128),
}
EVERY_TILE = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
EVERY_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def random_weight(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def random_moments(columns: int = COLUMNS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(columns, generator=generator).exp()
    inputs = torch.randn(64, columns, generator=generator) * spread
    inputs += torch.randn(64, 1, generator=generator)  # correlated channels
    return inputs.t() @ inputs / 64


def oracle(
    weight: Tensor, moments: Tensor, fmt: Format, tile: tuple[int, int], candidates: list[Tensor]
) -> np.ndarray:
    w, m = weight.double().numpy(), moments.double().numpy()
    errors = [
        reference.weighted_tile_errors(w, s.double().numpy(), fmt.name, tile, m) for s in candidates
    ]
    return np.stack(errors)


def all_candidates(weight: Tensor, fmt: Format, tile: tuple[int, int]) -> list[Tensor]:
    amax = tile_amax(weight, tile)
    return [amax_to_scale(amax * ratio, fmt) for ratio in (1.0, *RATIOS)]


@EVERY_TILE
@EVERY_FORMAT
def test_the_least_weighted_error_of_all_candidates_is_found(
    fmt: Format, tile: tuple[int, int]
) -> None:
    weight, diagonal = random_weight(), random_moments().diagonal()
    found = search_scale(weight, diagonal, fmt, tile)
    errors = oracle(weight, diagonal, fmt, tile, all_candidates(weight, fmt, tile))
    np.testing.assert_allclose(found.error, errors.min(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.plain_error, errors[0], rtol=1e-5)
    assert (found.error <= found.plain_error).all()


@EVERY_TILE
@EVERY_FORMAT
def test_scales_are_as_stored_ones_must_be(fmt: Format, tile: tuple[int, int]) -> None:
    scale = search_scale(random_weight(), None, fmt, tile).scale
    assert scale.dtype == torch.float32
    assert (scale > 0).all()
    assert torch.equal(scale, scale.bfloat16().float())
    assert scale.shape == tile_amax(random_weight(), tile).shape


@pytest.mark.parametrize("moments", ["full", "diagonal"])
def test_full_moments_count_by_their_diagonal(moments: str) -> None:
    weight, full = random_weight(), random_moments()
    given = full if moments == "full" else full.diagonal()
    found = search_scale(weight, given, E4M3, (1, COLUMNS))
    assert torch.equal(found.scale, search_scale(weight, full, E4M3, (1, COLUMNS)).scale)


def test_without_moments_all_columns_count_alike() -> None:
    weight = random_weight()
    found = search_scale(weight, None, E4M3, (1, COLUMNS))
    ones = search_scale(weight, torch.ones(COLUMNS), E4M3, (1, COLUMNS))
    assert torch.equal(found.scale, ones.scale)


def test_an_outlier_that_no_input_reaches_is_cut_off_and_counted() -> None:
    # With the scale of the outlier the others lie half-way between two steps of 2^-6, where the
    # step is fixed; with half of it they are on the grid.
    small = amax_to_scale(torch.ones(1), E3M4).item() * 10.5 / 64
    weight = torch.full((2, COLUMNS), small)
    weight[0, 3], weight[1, 5] = 1.0, -1.0
    moments = torch.ones(COLUMNS)
    moments[3] = moments[5] = 0.0
    found = search_scale(weight, moments, E3M4, (1, COLUMNS), ratios=[2.0**-k for k in range(8)])
    assert found.num_clipped.tolist() == [[1], [1]]
    codes = quantize(weight, found.scale, E3M4, (1, COLUMNS))
    values = decode(codes, E3M4)
    assert values[0, 3] == E3M4.max
    assert values[1, 5] == -E3M4.max
    restored = dequantize(codes, found.scale, E3M4, (1, COLUMNS))
    others = torch.ones(COLUMNS, dtype=torch.bool)
    others[[3, 5]] = False
    assert (restored[:, others] == small).all()
    assert (found.error == 0).all()
    assert (found.plain_error > 0).all()


@pytest.mark.parametrize("fmt", [E4M3, E3M4], ids=["e4m3", "e3m4"])
def test_ratios_above_one_clip_nothing(fmt: Format) -> None:
    found = search_scale(random_weight(), None, fmt, (1, COLUMNS), ratios=(1.0, 1.2, 1.7, 2.0))
    assert (found.num_clipped == 0).all()


@EVERY_TILE
def test_clip_counts_are_of_elements_beyond_the_largest_code(tile: tuple[int, int]) -> None:
    weight = random_weight()
    scale = amax_to_scale(tile_amax(weight, tile) * 0.4, E4M3)
    full = reference.expand_grid(scale.double().numpy(), tuple(weight.shape), tile)
    beyond = np.abs(weight.double().numpy()) > 448.0 * full
    counts = count_clipped(weight, scale, E4M3, tile)
    assert counts.sum() == beyond.sum()
    assert (counts > 0).all()


def test_fused_shards_share_the_scale_that_is_best_for_all() -> None:
    shards = [random_weight(4, seed=2), random_weight(8, seed=3) * 3]
    stacked = torch.cat(shards)
    moments = random_moments()
    found = search_scale(stacked, moments, E4M3, tuple(stacked.shape))
    total = [
        sum(
            oracle(s, moments.diagonal(), E4M3, tuple(s.shape), [candidate])[0].item()
            for s in shards
        )
        for candidate in all_candidates(stacked, E4M3, tuple(stacked.shape))
    ]
    assert found.scale.shape == (1, 1)
    assert found.error.item() == pytest.approx(min(total), rel=1e-5)


def test_zeros_have_scale_one_and_no_error() -> None:
    found = search_scale(torch.zeros(2, 8), torch.ones(8), E4M3, (1, 8))
    assert (found.scale == 1).all()
    assert (found.error == 0).all()
    assert (found.num_clipped == 0).all()


def test_without_any_input_energy_the_scale_is_that_of_amax() -> None:
    weight = random_weight()
    found = search_scale(weight, torch.zeros(COLUMNS), E4M3, (1, COLUMNS))
    assert torch.equal(found.scale, amax_to_scale(tile_amax(weight, (1, COLUMNS)), E4M3))


def test_a_weight_that_is_not_finite_keeps_the_scale_of_its_amax() -> None:
    weight = random_weight()
    weight[1, 2] = torch.inf
    found = search_scale(weight, None, E4M3, (1, COLUMNS))
    assert found.scale[1].isinf()
    assert found.scale[[0, 2, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weights_dtype_does_not_matter(dtype: torch.dtype) -> None:
    weight = random_weight().to(dtype)
    found = search_scale(weight, None, E4M3, (1, COLUMNS))
    assert torch.equal(found.scale, search_scale(weight.float(), None, E4M3, (1, COLUMNS)).scale)


def test_large_weights_are_searched_in_pieces_with_the_same_result() -> None:
    weight = random_weight(700, 500, seed=4)
    whole = search_scale(weight, None, E4M3, (128, 128), ratios=(0.8, 1.3))
    alone = search_scale(weight[128:256], None, E4M3, (128, 128), ratios=(0.8, 1.3))
    assert torch.equal(whole.scale[1:2], alone.scale)


@pytest.mark.parametrize("shape", [(COLUMNS - 1,), (COLUMNS, COLUMNS - 1), (1, COLUMNS)])
def test_moments_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CalibrationError, match=r"second moments have shape .*20 columns"):
        search_scale(random_weight(), torch.ones(shape), E4M3, (1, COLUMNS))


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("inf"), float("nan")])
def test_ratios_must_be_positive_and_finite(ratio: float) -> None:
    with pytest.raises(CalibrationError, match="ratios"):
        search_scale(random_weight(), None, E4M3, (1, COLUMNS), ratios=[ratio])
