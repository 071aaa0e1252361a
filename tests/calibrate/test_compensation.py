"""Error feedback gives the textbook's codes, and never a larger error than plain rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.calibrate.compensation import (
    BLOCK_COLUMNS,
    Compensated,
    compensate,
    curvature,
)
from quantkit.errors import CalibrationError
from quantkit.numerics import (
    E4M3,
    FORMATS,
    Format,
    Tile,
    amax_to_scale,
    decode,
    dequantize,
    encode,
    quantize,
    round_to_format,
    tile_amax,
)
from tests import reference

ROWS, COLUMNS = 5, 24
FEEDBACK_ONLY: dict[str, Any] = {"damping": 0.0, "shrinkage": 0.0}
TILES = {"channel": (1, COLUMNS), "tensor": (ROWS, COLUMNS), "block": (2, 7)}
EVERY_TILE = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
EVERY_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def run(
    weight: Tensor,
    moments: Tensor,
    scale: Tensor,
    fmt: Format,
    tile: Tile,
    **damping: float,
) -> Compensated:
    return compensate(weight, curvature(moments, **damping), scale, fmt, tile)


def random_weight(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def random_inputs(columns: int = COLUMNS, tokens: int = 200, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    spread = torch.randn(columns, generator=generator).exp()
    return torch.randn(tokens, columns, generator=generator) @ (mix + 0.3 * torch.diag(spread))


def moments_of(inputs: Tensor) -> Tensor:
    return inputs.t() @ inputs / inputs.shape[0]


def scale_of(weight: Tensor, fmt: Format, tile: Tile) -> Tensor:
    return amax_to_scale(tile_amax(weight, tile), fmt)


def f64(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def better_of(values: np.ndarray, weight: Tensor, moments: Tensor, plain: np.ndarray) -> np.ndarray:
    """Return, row by row, whichever has the smaller output error; a tie goes to plain rounding."""
    errors = [reference.output_errors(v, f64(weight), f64(moments)) for v in (values, plain)]
    return np.where((errors[0] < errors[1])[:, None], values, plain)


def order_of(moments: Tensor) -> list[int]:
    return moments.diagonal().argsort(descending=True, stable=True).tolist()


@EVERY_TILE
@EVERY_FORMAT
def test_feedback_gives_the_textbooks_values(fmt: Format, tile: Tile) -> None:
    weight, moments = random_weight(), moments_of(random_inputs())
    scale = scale_of(weight, fmt, tile)
    result = run(weight, moments, scale, fmt, tile, **FEEDBACK_ONLY)
    each = reference.expand_grid(f64(scale), (ROWS, COLUMNS), tile)
    expected = reference.feed_back_errors(
        f64(weight), f64(moments), each, fmt.name, order_of(moments)
    )
    plain = f64(dequantize(quantize(weight, scale, fmt, tile), scale, fmt, tile))
    expected = better_of(expected, weight, moments, plain)
    np.testing.assert_allclose(f64(dequantize(result.codes, scale, fmt, tile)), expected, rtol=1e-6)
    errors = reference.output_errors(expected, f64(weight), f64(moments))
    np.testing.assert_allclose(f64(result.error), errors, rtol=1e-4)


def test_blocks_of_columns_change_nothing() -> None:
    columns = 2 * BLOCK_COLUMNS + 9
    weight, moments = random_weight(3, columns), moments_of(random_inputs(columns, tokens=2000))
    scale = scale_of(weight, E4M3, (1, columns))
    result = run(weight, moments, scale, E4M3, (1, columns), **FEEDBACK_ONLY)
    expected = reference.feed_back_errors(
        f64(weight), f64(moments), f64(scale).repeat(columns, axis=1), "e4m3", order_of(moments)
    )
    values = f64(dequantize(result.codes, scale, E4M3, (1, columns)))
    # A float32 sum can fall on the other side of a rounding boundary, and later columns follow.
    assert (values != expected.astype(np.float32)).mean() < 0.02
    errors = reference.output_errors(expected, f64(weight), f64(moments))
    np.testing.assert_allclose(f64(result.error), errors, rtol=0.02)


@EVERY_FORMAT
def test_the_output_error_is_never_above_plain_roundings(fmt: Format) -> None:
    weight, moments = random_weight(40), moments_of(random_inputs())
    scale = scale_of(weight, fmt, (1, COLUMNS))
    result = run(weight, moments, scale, fmt, (1, COLUMNS))
    assert (result.error <= result.plain_error).all()
    assert result.error.sum() < 0.7 * result.plain_error.sum()


def test_errors_are_those_of_the_codes_under_the_regularized_moments() -> None:
    weight, moments = random_weight(), moments_of(random_inputs())
    scale = scale_of(weight, E4M3, (1, COLUMNS))
    options: dict[str, Any] = {"damping": 0.05, "shrinkage": 0.2}
    result = run(weight, moments, scale, E4M3, (1, COLUMNS), **options)
    diagonal = moments.diagonal()
    used = moments + 0.2 * diagonal.diag() + 0.05 * diagonal.mean() * torch.eye(COLUMNS)
    plain = quantize(weight, scale, E4M3, (1, COLUMNS))
    for codes, error in ((result.codes, result.error), (plain, result.plain_error)):
        values = f64(dequantize(codes, scale, E4M3, (1, COLUMNS)))
        expected = reference.output_errors(values, f64(weight), f64(used))
        np.testing.assert_allclose(f64(error), expected, rtol=1e-4)


def test_rows_do_not_depend_on_what_they_are_stacked_with() -> None:
    weight, moments = random_weight(8), moments_of(random_inputs())
    scale = scale_of(weight, E4M3, (1, COLUMNS))
    whole = run(weight, moments, scale, E4M3, (1, COLUMNS))
    part = run(weight[2:5], moments, scale[2:5], E4M3, (1, COLUMNS))
    assert torch.equal(whole.codes[2:5].view(torch.uint8), part.codes.view(torch.uint8))


def test_sums_and_means_of_moments_give_the_same_codes() -> None:
    weight, inputs = random_weight(), random_inputs(tokens=256)
    scale = scale_of(weight, E4M3, (1, COLUMNS))
    mean = run(weight, moments_of(inputs), scale, E4M3, (1, COLUMNS))
    total = run(weight, inputs.t() @ inputs, scale, E4M3, (1, COLUMNS))
    assert torch.equal(mean.codes.view(torch.uint8), total.codes.view(torch.uint8))


def test_two_runs_give_the_same_codes() -> None:
    weight, moments = random_weight(64), moments_of(random_inputs())
    scale = scale_of(weight, E4M3, (1, COLUMNS))
    first, second = (run(weight, moments, scale, E4M3, (1, COLUMNS)) for _ in range(2))
    assert torch.equal(first.codes.view(torch.uint8), second.codes.view(torch.uint8))


def test_columns_without_energy_are_rounded_plainly() -> None:
    weight, inputs = random_weight(), random_inputs()
    inputs[:, [3, 11]] = 0.0
    scale = scale_of(weight, E4M3, (1, COLUMNS))
    result = run(weight, moments_of(inputs), scale, E4M3, (1, COLUMNS))
    plain = quantize(weight, scale, E4M3, (1, COLUMNS))
    assert torch.equal(result.codes[:, [3, 11]].float(), plain[:, [3, 11]].float())
    assert result.error.sum() < result.plain_error.sum()


@EVERY_FORMAT
def test_without_any_energy_everything_is_rounded_plainly(fmt: Format) -> None:
    weight = random_weight()
    scale = scale_of(weight, fmt, (1, COLUMNS))
    result = run(weight, torch.zeros(COLUMNS, COLUMNS), scale, fmt, (1, COLUMNS))
    plain = quantize(weight, scale, fmt, (1, COLUMNS))
    assert torch.equal(result.codes.view(torch.uint8), plain.view(torch.uint8))
    assert (result.error == 0).all()


def test_singular_moments_without_damping_fall_back_to_plain_rounding() -> None:
    weight = random_weight()
    scale = scale_of(weight, E4M3, (1, COLUMNS))
    one_token = torch.ones(COLUMNS, COLUMNS)
    result = run(weight, one_token, scale, E4M3, (1, COLUMNS), **FEEDBACK_ONLY)
    plain = quantize(weight, scale, E4M3, (1, COLUMNS))
    assert torch.equal(result.codes.view(torch.uint8), plain.view(torch.uint8))


def test_fewer_tokens_than_columns_are_enough_with_damping() -> None:
    weight, moments = random_weight(), moments_of(random_inputs(tokens=4))
    scale = scale_of(weight, E4M3, (1, COLUMNS))
    result = run(weight, moments, scale, E4M3, (1, COLUMNS))
    assert result.error.sum() < result.plain_error.sum()


def test_uncorrelated_inputs_leave_nothing_to_repair() -> None:
    weight = random_weight()
    scale = scale_of(weight, E4M3, (1, COLUMNS))
    moments = torch.diag(torch.rand(COLUMNS) + 0.1)
    result = run(weight, moments, scale, E4M3, (1, COLUMNS))
    plain = quantize(weight, scale, E4M3, (1, COLUMNS))
    assert torch.equal(result.codes.view(torch.uint8), plain.view(torch.uint8))


@EVERY_FORMAT
def test_values_beyond_the_format_saturate(fmt: Format) -> None:
    weight, moments = random_weight(), moments_of(random_inputs())
    scale = scale_of(weight, fmt, (1, COLUMNS)) * 0.25
    result = run(weight, moments, scale, fmt, (1, COLUMNS))
    values = decode(result.codes, fmt)
    assert values.isfinite().all()
    assert values.abs().max() == fmt.max
    assert (result.error <= result.plain_error).all()


@EVERY_FORMAT
def test_rounding_equals_encoding_and_decoding(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(100_000, generator=generator)
        * torch.randn(100_000, generator=generator).mul(5).exp()
    )
    values = torch.tensor(reference.float8_values(fmt.name), dtype=torch.float32)
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    edges = torch.tensor([0.0, 1e-30, 1e-45, torch.inf, -torch.inf, fmt.max * 1.03])
    x = torch.cat([x, values, middles, edges])
    assert torch.equal(round_to_format(x, fmt), decode(encode(x, fmt), fmt))


def test_moments_of_other_channels_are_refused() -> None:
    with pytest.raises(CalibrationError, match="25 input channels; the weight has 24 columns"):
        run(random_weight(), torch.eye(COLUMNS + 1), torch.ones(ROWS, 1), E4M3, (1, COLUMNS))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_exact_columns_make_up_for_the_others(fmt: Format) -> None:
    weight, moments = random_weight(40).bfloat16().float(), moments_of(random_inputs())
    scale, tile = scale_of(weight, fmt, (1, COLUMNS)), (1, COLUMNS)
    chosen = torch.tensor([3, 17])
    result = compensate(weight, curvature(moments, 0.0, 0.0, chosen), scale, fmt, tile)
    assert result.exact.dtype == torch.bfloat16
    codes = decode(result.codes, fmt)
    assert (codes[:, chosen] == 0).all()
    values = f64(codes * scale)
    rest = np.delete(np.arange(COLUMNS), chosen.numpy())
    h, error = f64(moments), (f64(weight) - values)[:, rest]
    # The columns that solve the least squares left by the others, rounded to bfloat16.
    best = f64(weight)[:, chosen] + error @ h[np.ix_(rest, chosen)] @ np.linalg.inv(
        h[np.ix_(chosen, chosen)]
    )
    fed_back = (result.error < result.plain_error).numpy()  # the others keep plain rounding
    assert fed_back.sum() >= 30
    np.testing.assert_allclose(f64(result.exact.float())[fed_back], best[fed_back], rtol=2**-7)
    plain = compensate(weight, curvature(moments, 0.0, 0.0), scale, fmt, tile)
    assert result.error.sum() < plain.error.sum()


@pytest.mark.parametrize("where", ["weight", "moments"])
def test_what_is_not_finite_is_refused(where: str) -> None:
    weight, moments = random_weight(), moments_of(random_inputs())
    (weight if where == "weight" else moments)[1, 1] = torch.nan
    with pytest.raises(CalibrationError, match=f"the .*{where}.* NaN"):
        run(weight, moments, torch.ones(ROWS, 1), E4M3, (1, COLUMNS))
