"""Linear ops with outlier columns against the float64 oracle.

As in test_ops.py, whatever kernels are loaded; test_ops_contract.py runs this file under each.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quantkit import ops
from quantkit.errors import UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.gate_ops import ACTIVATIONS
from quantkit.numerics import E4M3, E5M2, Format
from quantkit.outliers import Outliers
from tests import reference
from tests.test_ops import (
    EVERY_DTYPE,
    EVERY_FORMAT,
    UNIT,
    Layer,
    assert_close,
    memory_before_a_forbidden_page,
)

REJECTED = (UnsupportedError, RuntimeError)
# Both sides of 8 and 16 features in a vector, 32 and 56 in a unit; of 4 and 8 rows of x in a pass,
# 4 where a matrix unit takes over, 16 and 32 rows in its tiles.
ROWS = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 57, 131]
BATCHES = [0, 1, 3, 4, 5, 7, 8, 9, 16, 17, 33, 70]
COUNTS = [0, 1, 2, 15, 64]
SLOPE = 1.13  # no activation is steeper


@dataclass(frozen=True)
class OutlierLayer:
    """A random layer and outlier columns, which its codes hold too: both count."""

    layer: Layer
    outliers: Outliers

    @classmethod
    def random(
        cls, rows: int, columns: int, count: int, fmt: Format = E4M3, group_size: int = 10**6
    ) -> OutlierLayer:
        layer = Layer.random(rows, columns, fmt, max(1, min(group_size, columns)))
        numbers = torch.randperm(columns)[:count].sort().values.int()
        return cls(layer, Outliers(numbers, torch.randn(count, rows).bfloat16()))

    def head(self, rows: int) -> OutlierLayer:
        weight = self.outliers.weight[:, :rows].contiguous()
        return OutlierLayer(self.layer.head(rows), Outliers(self.outliers.columns, weight))

    def arguments(self, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, int]:
        return self.layer.weight, self.layer.scale, bias, self.layer.group_size

    def linear(
        self, x: Tensor, bias: Tensor | None = None, out: torch.dtype | None = None
    ) -> Tensor:
        return torch.ops.quantkit.fp8_linear(x, *self.arguments(bias), out, *self.outliers)

    def gated(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        op = torch.ops.quantkit.fp8_gated_linear
        return op(x, *self.arguments(bias), activation, *self.outliers)

    def oracle(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the exact result and a bound on its error, as `Layer.oracle` does.

        The columns are added in float32: n more products, and n + K + 3 roundings of all of them.
        """
        y, bound = self.layer.oracle(x, bias)
        _, size = self.layer.exact(x, bias)
        columns, weight = self.outliers
        parts = (x.double().numpy(), columns.long().numpy(), weight.double().numpy())
        added = torch.from_numpy(reference.outliers(*parts))
        magnitude = torch.from_numpy(reference.outliers(abs(parts[0]), parts[1], abs(parts[2])))
        steps = x.shape[1] + len(columns) + 3
        return y + added, bound + steps * UNIT[torch.float32] * (size + magnitude)


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("count", COUNTS)
def test_outliers_match_the_oracle_at_every_edge(
    count: int, dtype: torch.dtype, fmt: Format
) -> None:
    layer = OutlierLayer.random(max(ROWS), 129, count, fmt)
    x = torch.randn(max(BATCHES), 129).to(dtype)
    exact, bound = layer.oracle(x)
    for rows in ROWS:
        head = layer.head(rows)
        for batch in BATCHES if rows == 33 else (1, 4, 9, 17):
            actual = head.linear(x[:batch])
            assert_close(actual, exact[:batch, :rows], bound[:batch, :rows])


@EVERY_FORMAT
@EVERY_DTYPE
def test_every_column_may_be_an_outlier_and_groups_have_scales(
    dtype: torch.dtype, fmt: Format
) -> None:
    for columns, group_size in ((1, 1), (200, 64), (200, 7), (1000, 128)):
        layer = OutlierLayer.random(37, columns, columns, fmt, group_size)
        for batch in (1, 6, 40):
            x = torch.randn(batch, columns).to(dtype)
            for bias_dtype in UNIT:
                bias = layer.layer.bias.to(bias_dtype)
                assert_close(layer.linear(x, bias), *layer.oracle(x, bias))


@EVERY_DTYPE
@pytest.mark.parametrize("out", UNIT, ids=str)
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_there_is_one_rounding_at_the_end(batch: int, out: torch.dtype, dtype: torch.dtype) -> None:
    layer = OutlierLayer.random(70, 300, 9)
    x = torch.randn(batch, 300).to(dtype)
    kept = layer.linear(x, layer.layer.bias, torch.float32)
    actual = layer.linear(x, layer.layer.bias, out)
    assert actual.dtype == out
    assert torch.equal(actual, kept.to(out))


@EVERY_FORMAT
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_outliers_match_the_oracle(activation: str, fmt: Format) -> None:
    for intermediate, columns, count in ((1, 1, 1), (5, 65, 0), (33, 65, 3), (66, 300, 20)):
        layer = OutlierLayer.random(2 * intermediate, columns, count, fmt, 128)
        for batch, dtype in (
            (1, torch.float32),
            (4, torch.bfloat16),
            (6, torch.bfloat16),
            (17, torch.float16),
            (51, torch.bfloat16),
        ):
            x = torch.randn(batch, columns).to(dtype)
            bias = None if batch == 6 else layer.layer.bias
            exact, bound = layer.oracle(x, bias)
            (gate, up), (d_gate, d_up) = exact.chunk(2, 1), bound.chunk(2, 1)
            # Evaluating an activation costs a few units of its argument.
            d_act = SLOPE * d_gate + 8 * UNIT[torch.float32] * gate.abs()
            d_product = d_act * (up.abs() + d_up) + (gate.abs() + d_act) * d_up
            expected = torch.from_numpy(reference.gated(exact.numpy(), activation))
            assert_close(layer.gated(x, bias, activation), expected, d_product)


@EVERY_DTYPE
@pytest.mark.parametrize("batch", [1, 3, 5, 40])
def test_no_columns_are_the_same_bits_as_none(batch: int, dtype: torch.dtype) -> None:
    layer = OutlierLayer.random(66, 300, 0)
    x, bias = torch.randn(batch, 300).to(dtype), layer.layer.bias
    assert torch.equal(layer.linear(x, bias), layer.layer.linear(x, bias))
    assert torch.equal(layer.gated(x, bias, "silu"), layer.layer.gated(x, bias, "silu"))


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (2, 0), (0, 0)])
def test_empty_weights_are_allowed(rows: int, columns: int) -> None:
    layer = OutlierLayer.random(rows, columns, columns)
    x, bias = torch.randn(2, columns), layer.layer.bias
    assert torch.equal(layer.linear(x, bias), bias.expand(2, rows))
    assert layer.gated(x, None, "relu").shape == (2, rows // 2)


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's matmul does not promise it")
@EVERY_DTYPE
@pytest.mark.parametrize("group_size", [300, 64])
def test_a_row_is_the_same_bits_in_every_batch(group_size: int, dtype: torch.dtype) -> None:
    layer = OutlierLayer.random(134, 300, 11, E5M2, group_size)
    x, bias = torch.randn(50, 300).to(dtype), layer.layer.bias
    alone = torch.cat([layer.linear(row, bias) for row in x.split(1)])
    gated_alone = torch.cat([layer.gated(row, bias, "silu") for row in x.split(1)])
    together, gated_together = layer.linear(x, bias), layer.gated(x, bias, "silu")
    for batch in (*range(2, 35), 48, 49):
        of_one_kind = batch <= layer.layer.most_rows_of_one_kind(x)
        expected = alone if of_one_kind else together
        gated_expected = gated_alone if of_one_kind else gated_together
        assert torch.equal(layer.linear(x[-batch:], bias), expected[-batch:])
        assert torch.equal(layer.gated(x[-batch:], bias, "silu"), gated_expected[-batch:])


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's matmul does not promise it")
@pytest.mark.parametrize(("batch", "dtype"), [(3, torch.float32), (40, torch.bfloat16)], ids=str)
def test_threads_do_not_change_a_bit(batch: int, dtype: torch.dtype) -> None:
    layer = OutlierLayer.random(1500, 577, 12)
    x = torch.randn(batch, 577).to(dtype)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((layer.linear(x), layer.gated(x, None, "gelu")))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@EVERY_DTYPE
def test_wrappers_agree_with_the_oracle_on_both_sides_of_the_changeover(dtype: torch.dtype) -> None:
    layer = OutlierLayer.random(66, 300, 7, E4M3, 128)
    bias = layer.layer.bias
    for batch in (0, 1, 4, 5, ops.FEW_ROWS, ops.FEW_ROWS + 1, 40):
        x = torch.randn(batch, 300).to(dtype)
        exact, bound = layer.oracle(x, bias)
        # Above the changeover weights and bias are rounded to the dtype of x, each at most once
        # more than the result; a column's codes and its outlier are rounded together once more.
        _, size = layer.layer.exact(x, bias)
        columns, weight = layer.outliers
        size = size + x[:, columns.long()].double().abs() @ weight.double().abs()
        bound = bound + 3 * UNIT[dtype] * size
        arguments = layer.arguments(bias)
        actual = ops.fp8_linear(x, *arguments, outliers=layer.outliers)
        assert_close(actual, exact, bound)
        gate, up = exact.chunk(2, 1)
        d_gate, d_up = (bound + UNIT[dtype] * exact.abs()).chunk(2, 1)
        slack = SLOPE * d_gate * (up.abs() + d_up) + (gate.abs() + d_gate) * d_up + 2.0**-20
        expected = torch.from_numpy(reference.gated(exact.numpy(), "silu"))
        actual = ops.fp8_gated_linear(x, *arguments, "silu", layer.outliers)
        assert_close(actual, expected, slack)


@pytest.mark.parametrize("rows", [1, 7, 17, 33])
def test_nothing_is_read_beyond_the_end_of_the_outliers(rows: int) -> None:
    with memory_before_a_forbidden_page(3 * rows * 2) as memory:
        weight = memory.view(torch.bfloat16).view(3, rows).fill_(2.0)
        columns = torch.tensor([0, 2, 64], dtype=torch.int32)
        codes = torch.zeros(rows, 65).to(torch.float8_e4m3fn)
        layer = Layer(codes, torch.ones(rows, 1), torch.zeros(rows), E4M3, 65)
        for batch, dtype in ((1, torch.float32), (4, torch.float32), (20, torch.bfloat16)):
            y = OutlierLayer(layer, Outliers(columns, weight)).linear(
                torch.ones(batch, 65, dtype=dtype)
            )
            assert (y == 6).all()


BAD = {
    "columns dtype": ({"columns": torch.tensor([1, 2])}, "columns must be int32, got int64"),
    "columns rank": (
        {"columns": torch.zeros(1, 2, dtype=torch.int32)},
        r"columns must be of shape \[n\] = \[any\], got \[1, 2\]",
    ),
    "columns strides": ({"columns": torch.arange(4).int()[::2]}, "columns must be contiguous"),
    "too large": (
        {"columns": torch.tensor([1, 40]).int()},
        r"columns must be in \[0, 40\), got 40",
    ),
    "negative": ({"columns": torch.tensor([-1, 4]).int()}, r"columns must be in \[0, 40\), got -1"),
    "weight dtype": ({"weight": torch.zeros(2, 6)}, "weight must be bfloat16, got float32"),
    "weight shape": (
        {"weight": torch.zeros(6, 2).bfloat16()},
        r"weight must be of shape \[n, N\] = \[2, 6\], got \[6, 2\]",
    ),
    "weight strides": (
        {"weight": torch.zeros(6, 2).bfloat16().T},
        r"weight must be contiguous, got strides \[1, 2\]",
    ),
    "no weight": ({"weight": None}, "weight must be given with outlier_columns, got None"),
    "no columns": ({"columns": None}, "columns must be given with outlier_weight, got None"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named(case: str) -> None:
    change, message = BAD[case]
    good = {"columns": torch.tensor([3, 39]).int(), "weight": torch.zeros(2, 6).bfloat16()}
    pair = (good | change).values()
    arguments = (torch.randn(2, 40), torch.zeros(6, 40).to(torch.float8_e4m3fn), torch.ones(6, 1))
    for op, middle in (
        (torch.ops.quantkit.fp8_linear, None),
        (torch.ops.quantkit.fp8_gated_linear, "silu"),
    ):
        with pytest.raises(REJECTED, match=f"{op.__name__}: outlier_{message}"):
            op(*arguments, None, 40, middle, *pair)


def test_fake_kernels_agree_with_real_ones() -> None:
    layer = OutlierLayer.random(6, 40, 3)
    arguments = (torch.randn(3, 40).bfloat16(), *layer.arguments(None))
    checks = ("test_faketensor", "test_autograd_registration")
    quantkit = torch.ops.quantkit
    for op, middle in ((quantkit.fp8_linear, torch.float32), (quantkit.fp8_gated_linear, "silu")):
        torch.library.opcheck(op.default, (*arguments, middle, *layer.outliers), test_utils=checks)
