"""Linear layers with float weights against float64, at the edges of the C++ kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit import ops
from quantkit.dense_ops import gated_linear, linear
from quantkit.errors import UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.gate_ops import ACTIVATIONS
from tests import reference

REJECTED = (UnsupportedError, RuntimeError)
# Half the distance between neighbours, relative to the number: the cost of one rounding.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EVERY_WEIGHT = pytest.mark.parametrize("dtype", UNIT, ids=lambda d: str(d).removeprefix("torch."))
COLUMNS = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 129, 576]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the exact result and a bound on the error of float32 sums in any order."""
    y, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    return y, (x.shape[1] + 3) * UNIT[torch.float32] * size


def assert_close(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    excess = (actual.double() - expected).abs() - bound
    excess -= UNIT[actual.dtype] * (expected.abs() + bound) + 2.0**-24
    assert actual.shape == expected.shape
    assert not excess.numel() or excess.max() <= 0, f"exceeds its bound by {excess.max()}"


@EVERY_WEIGHT
@pytest.mark.parametrize("columns", COLUMNS)
def test_linear_matches_the_oracle_at_every_edge(columns: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(131, columns).to(dtype), torch.randn(17, columns)
    expected, bound = exact(x, weight, None)
    for rows, batch in ((1, 1), (2, 2), (3, 3), (5, 4), (9, 8), (131, 9), (131, 16), (7, 0)):
        y = linear(x[:batch], weight[:rows])
        assert_close(y, expected[:batch, :rows], bound[:batch, :rows])


@EVERY_WEIGHT
@pytest.mark.parametrize("x_dtype", UNIT)
@pytest.mark.parametrize("out", UNIT)
def test_dtypes_mix(dtype: torch.dtype, x_dtype: torch.dtype, out: torch.dtype) -> None:
    weight, x = torch.randn(37, 200).to(dtype), torch.randn(5, 200).to(x_dtype)
    bias = torch.randn(37).to(dtype)
    y = linear(x, weight, bias, out)
    assert y.dtype == out
    assert_close(y, *exact(x, weight, bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_gated_linear_matches_the_oracle(activation: str, batch: int) -> None:
    weight, x, bias = torch.randn(66, 72) / 8, torch.randn(batch, 72), torch.randn(66)
    both = exact(x, weight, bias)[0].numpy()
    expected = reference.gated(both, activation)
    actual = gated_linear(x, weight, bias, activation)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_many_rows_go_to_torch_where_no_kernel_takes_them() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weight, x = torch.randn(9, 40).to(dtype), torch.randn(40, 40).to(dtype)
        y = linear(x, weight, None, torch.float32)
        if ops.multiplies_many_rows(x, weight, 40):
            assert_close(y, *exact(x, weight, None))
        else:
            assert torch.equal(y, torch.nn.functional.linear(x, weight).float())


@pytest.mark.parametrize("columns", COLUMNS)
def test_many_rows_of_bfloat16_match_the_oracle(columns: int) -> None:
    weight, x = torch.randn(131, columns).bfloat16(), torch.randn(70, columns).bfloat16()
    expected, bound = exact(x, weight, None)
    for rows, batch in ((1, 5), (15, 16), (33, 17), (131, 33), (131, 70), (32, 48)):
        y = torch.ops.quantkit.linear(x[:batch], weight[:rows], None, torch.float32)
        assert_close(y, expected[:batch, :rows], bound[:batch, :rows])


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's matmul does not promise it")
@EVERY_WEIGHT
def test_a_row_is_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    weight, x = torch.randn(134, 200).to(dtype), torch.randn(16, 200).bfloat16()
    alone = torch.cat([linear(row, weight) for row in x.split(1)])
    gated_alone = torch.cat([gated_linear(row, weight, None, "silu") for row in x.split(1)])
    together, gated_together = linear(x, weight), gated_linear(x, weight, None, "silu")
    of_one_kind = 3 if ops.multiplies_many_rows(x, weight, 200) else 16
    for batch in range(2, 17):
        expected, gated_expected = (
            (alone, gated_alone) if batch <= of_one_kind else (together, gated_together)
        )
        assert torch.equal(linear(x[-batch:], weight), expected[-batch:])
        assert torch.equal(gated_linear(x[-batch:], weight, None, "silu"), gated_expected[-batch:])


def test_nan_and_infinite_weights_reach_their_output() -> None:
    weight = torch.ones(3, 70).bfloat16()
    weight[0, 69], weight[1, 3] = torch.nan, torch.inf
    y = linear(torch.ones(2, 70), weight)
    assert y[:, 0].isnan().all()
    assert y[:, 1:].tolist() == [[torch.inf, 70.0]] * 2


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (4, 0)])
def test_empty_weights_are_allowed(rows: int, columns: int) -> None:
    bias = torch.randn(rows)
    y = linear(torch.randn(2, columns), torch.randn(rows, columns), bias)
    assert torch.equal(y, bias.expand(2, rows))


def test_bad_arguments_are_named() -> None:
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with pytest.raises(REJECTED, match=r"linear: weight must be float32, .* got float64"):
        linear(x, weight.double())
    with pytest.raises(REJECTED, match=r"linear: x must be .* = \[any, 8\], got \[2, 9\]"):
        linear(torch.randn(2, 9), weight)
    with pytest.raises(REJECTED, match=r"linear: dtype must be float32, .* got int32"):
        linear(x, weight, None, torch.int32)
    with pytest.raises(REJECTED, match="gated_linear: weight must be gate rows then as many up"):
        gated_linear(x, weight, None, "silu")
    with pytest.raises(REJECTED, match=r"gated_linear: activation must be .*, got 'swish'"):
        gated_linear(x, torch.randn(4, 8), None, "swish")


def test_fake_kernels_agree_with_real_ones() -> None:
    x, weight = torch.randn(3, 40).bfloat16(), torch.randn(6, 40)
    quantkit, checks = torch.ops.quantkit, ("test_faketensor", "test_schema")
    for op, inputs in (
        (quantkit.linear, (x, weight, torch.ones(6), torch.float32)),
        (quantkit.gated_linear, (x, weight, None, "silu")),
    ):
        torch.library.opcheck(op.default, inputs, test_utils=checks)
