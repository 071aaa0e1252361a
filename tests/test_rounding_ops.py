"""Rounding to a format and back, the errors of scales, and feedback: against float64 references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.errors import UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.numerics import FORMATS, Format, amax_to_scale, fake_quantize
from quantkit.rounding_ops import feed_back, round_rows, scale_errors
from tests import reference

REJECTED = (UnsupportedError, RuntimeError)
E4M3 = FORMATS["e4m3"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return numbers over many octaves, with both zeros, a row of zeros and ties between codes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-14, 3, x.shape, generator=generator))
    x[0, :3] = torch.tensor([0.0, -0.0, -1e-7])
    x[1] = 0.0
    x[2, :4] = torch.tensor([448.0, 17.0, 19.0, -1.0625])  # 17 and 19 lie between two codes
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@formats
@dtypes
@pytest.mark.parametrize("columns", [1, 7, 16, 130, 576, 1537])
def test_rows_come_back_as_from_storage_to_the_bit(
    fmt: Format, dtype: torch.dtype, columns: int
) -> None:
    x = numbers(5, max(columns, 4), dtype)[:, :columns].contiguous()
    amax = x.abs().float().amax(dim=1, keepdim=True)
    scale = amax_to_scale(amax, fmt)
    stored = fake_quantize(x, scale, fmt, (1, columns))
    assert torch.equal(bits(round_rows(x, None, fmt)), bits(stored))
    assert torch.equal(bits(round_rows(x, scale.view(-1), fmt)), bits(stored))


@formats
def test_rows_agree_with_the_definition_of_the_format(fmt: Format) -> None:
    x = numbers(6, 200, torch.float32)
    grid = reference.stored_scale(reference.tile_amax(x.double().numpy(), (1, 200)), fmt.name)
    codes = reference.quantize(x.double().numpy(), grid, fmt.name, (1, 200))
    expected = reference.dequantize(codes, grid, fmt.name, (1, 200)).astype(np.float32)
    assert np.array_equal(round_rows(x, None, fmt).numpy(), expected)


@dtypes
def test_beyond_one_scale_for_all_numbers_saturate(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -500.0, float("inf")], [0.0, 3.0, -449.0]]).to(dtype)
    kept = round_rows(x, torch.ones(1), E4M3)
    assert kept.tolist() == [[1.0, -448.0, 448.0], [0.0, 3.0, -448.0]]


@formats
@dtypes
def test_nan_spoils_its_row_and_no_other(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.ones(3, 40, dtype=dtype)
    x[1, 33] = torch.nan
    assert round_rows(x, None, fmt).isnan().all(dim=1).tolist() == [False, True, False]
    given = round_rows(x, torch.ones(1), fmt).isnan()
    assert given.nonzero().tolist() == [[1, 33]]


@formats
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (40, 576), (3, 1537)])
@pytest.mark.parametrize("is_shared", [False, True], ids=["by row", "for all"])
def test_errors_of_scales(fmt: Format, shape: tuple[int, int], is_shared: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    importance = torch.rand(shape[1], generator=generator) * 100
    rows = 1 if is_shared else shape[0]
    scales = (0.5 + torch.rand(4, rows, generator=generator)) * 3 / fmt.max
    found = scale_errors(weight, scales, importance, fmt)
    for scale, errors in zip(scales, found, strict=True):
        grid = np.broadcast_to(scale.double().numpy()[:, None], (shape[0], 1))
        expected = reference.weighted_tile_errors(
            weight.double().numpy(),
            grid,
            fmt.name,
            (1, shape[1]),
            importance.double().numpy(),
        )
        # A value is rounded to float32 before a number close to it, up to 2^10 times as large as
        # the difference, is taken away.
        np.testing.assert_allclose(errors.numpy(), expected[:, 0], rtol=2.0**-12)


@formats
@pytest.mark.parametrize("one_scale", [False, True], ids=["by column", "for all"])
def test_feedback_follows_its_recurrence(fmt: Format, one_scale: bool) -> None:
    columns, rows, first_exact = 19, 131, 17
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(columns, rows, generator=generator)
    target[3, ::2] = 0.0
    aims = target + 0.1 * torch.randn(columns, rows, generator=generator)
    factor = torch.randn(columns, columns, generator=generator).tril()
    scales = (1 + torch.rand(1 if one_scale else columns, rows, generator=generator)) / fmt.max
    steps, error, residual = feed_back(aims, target, factor, scales, first_exact, fmt)
    wide = error.double()
    used = scales.double().expand(columns, rows)
    for k in range(columns):
        aim = aims[k].double() + factor[k, :k].double() @ wide[:k]
        value = steps[k].double() * used[k]
        # Sums of up to 18 products in float32.
        close = {"rtol": 1e-5, "atol": 1e-4}
        torch.testing.assert_close(residual[k].double(), aim - value, **close)
        torch.testing.assert_close(error[k].double(), target[k].double() - value, **close)
        # What was rounded is known as well as the residual is, so only clear cases are compared.
        rounded = residual[k] + steps[k] * scales[0 if one_scale else k]
        expected = _nearest(rounded, scales[0 if one_scale else k], fmt, k >= first_exact)
        differs = (steps[k] != expected) & (target[k] != 0)
        assert differs.float().mean() < 0.02
        assert (steps[k][target[k] == 0] == 0).all()


def _nearest(aim: torch.Tensor, scale: torch.Tensor, fmt: Format, is_exact: bool) -> torch.Tensor:
    if is_exact:
        return aim.bfloat16().float()
    codes = reference.float8_encode((aim / scale).double().numpy(), fmt.name)
    return torch.from_numpy(reference.float8_values(fmt.name)[codes]).float()


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's own sums depend on it")
def test_the_number_of_threads_changes_nothing() -> None:
    weight, importance = torch.randn(700, 576), torch.rand(576)
    scales = torch.rand(20, 700) / 100 + 0.001
    factor = torch.randn(64, 64).tril()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            block = feed_back(weight.t()[:64].contiguous(), weight.t()[:64].contiguous(), factor,
                              scales[:1].contiguous(), 64, E4M3)  # fmt: skip
            found.append(
                [
                    round_rows(weight, None, E4M3),
                    scale_errors(weight, scales, importance, E4M3),
                    *block,
                ]
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


def test_nothing_to_round_is_no_error() -> None:
    assert round_rows(torch.empty(0, 8), None, E4M3).shape == (0, 8)
    assert scale_errors(torch.empty(0, 8), torch.empty(3, 0), torch.ones(8), E4M3).shape == (3, 0)


def test_bad_arguments_are_named() -> None:
    x, ones = torch.ones(2, 3), torch.ones(3)
    quantkit = torch.ops.quantkit
    with pytest.raises(REJECTED, match=r"round_rows: x must be .*float16, got float64"):
        quantkit.round_rows(x.double(), None, "e4m3")
    with pytest.raises(REJECTED, match=r"round_rows: format must be .*, got 'e2m1'"):
        quantkit.round_rows(x, None, "e2m1")
    with pytest.raises(REJECTED, match=r"round_rows: scale must be .* = \[2\], got \[3\]"):
        quantkit.round_rows(x, ones, "e4m3")
    with pytest.raises(REJECTED, match="round_rows: x must be contiguous"):
        quantkit.round_rows(x.t(), None, "e4m3")
    with pytest.raises(REJECTED, match="scale_errors: weight must be float32, got bfloat16"):
        quantkit.scale_errors(x.bfloat16(), x, ones, "e4m3")
    with pytest.raises(REJECTED, match=r"scale_errors: importance must be .* = \[3\], got \[4\]"):
        quantkit.scale_errors(x, torch.ones(5, 2), torch.ones(4), "e4m3")
    with pytest.raises(REJECTED, match=r"feed_back: factor must be .* = \[2, 2\], got \[3, 3\]"):
        quantkit.feed_back(x, x, torch.ones(3, 3), x, 2, "e4m3")


def test_fake_kernels_agree_with_real_ones() -> None:
    x, checks = torch.randn(4, 6), ("test_schema", "test_faketensor", "test_autograd_registration")
    quantkit = torch.ops.quantkit
    for op, inputs in (
        (quantkit.round_rows, (x, None, "e4m3")),
        (quantkit.scale_errors, (x, torch.ones(3, 4), torch.ones(6), "e4m3")),
        (quantkit.feed_back, (x, x, torch.eye(4), torch.ones(1, 6), 4, "e4m3")),
    ):
        torch.library.opcheck(op.default, inputs, test_utils=checks)
