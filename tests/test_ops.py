"""Linear ops against the float64 oracle.

Whatever kernels are loaded are tested: the C++ ones of this processor, or those that
QUANTKIT_CPU_ISA and QUANTKIT_DISABLE_EXT leave; test_ops_contract.py runs this file under each.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit import ops
from quantkit.extension import EXTENSION_LOADED
from quantkit.gate_ops import ACTIVATIONS, gate_mul
from quantkit.numerics import E3M4, E4M3, FORMATS, Format, decode, dequantize
from tests import reference

# Both sides of every edge: 8, 32 and 64 columns decoded at a time, 2 and 4 rows of weights,
# 1, 2, 4 and 8 rows of x, 16 rows where the wrappers change over; tiles of 16 rows, two at a time.
COLUMNS = [1, 7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 65, 129, 576, 1000]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 32, 33, 131]
BATCHES = [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 15, 16, 17, 32, 33, 48, 49, 70]
# Half the distance between neighbours, relative to the number: the cost of one rounding.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# Whether sums of 16-bit x may pass through float16: the widest kernels, where nothing forbids them.
HALF_SUMS = EXTENSION_LOADED and os.environ.get("QUANTKIT_CPU_ISA", "amx") in ("avx512fp16", "amx")

EVERY_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", UNIT, ids=lambda d: str(d).removeprefix("torch."))


@dataclass(frozen=True)
class Layer:
    """Random codes (every finite code occurs) with scales that bring products to about 1."""

    weight: Tensor
    scale: Tensor
    bias: Tensor
    fmt: Format
    group_size: int

    @classmethod
    def random(cls, rows: int, columns: int, fmt: Format, group_size: int) -> Layer:
        codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
        codes[~decode(codes.view(fmt.dtype), fmt).isfinite()] = 0x35
        scale = (torch.rand(rows, -(-columns // group_size)) + 0.5) / fmt.max
        return cls(codes.view(fmt.dtype), scale, torch.randn(rows), fmt, group_size)

    def head(self, rows: int) -> Layer:
        bias = self.bias[:rows].clone()
        return Layer(self.weight[:rows], self.scale[:rows], bias, self.fmt, self.group_size)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        arguments = (self.weight, self.scale, bias, self.group_size)
        return torch.ops.quantkit.fp8_linear(x, *arguments)

    def gated(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        arguments = (self.weight, self.scale, bias, self.group_size)
        return torch.ops.quantkit.fp8_gated_linear(x, *arguments, activation)

    def most_rows_of_one_kind(self, x: Tensor) -> int:
        """Return up to how many rows the result is that of one row; more are equal to each other.

        A matrix unit takes over at 4 rows.
        """
        return 3 if ops.multiplies_many_rows(x, self.weight, self.group_size) else x.shape[0]

    def oracle(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the exact result, and a bound on what float32 accumulation may add to it.

        A sum of K rounded products in any order is off by at most K u sum|x w| to first order, u
        the unit of float32; 3 more steps are the scale, the bias and slack for higher orders.
        Kernels that sum 16-bit x in float16 first add nineteen roundings to float16.
        """
        y, size = self.exact(x, bias)
        bound = (x.shape[1] + 3) * UNIT[torch.float32] * size
        if HALF_SUMS and x.dtype != torch.float32:
            bound += 19 * UNIT[torch.float16] * size
        return y, bound

    def exact(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the result and sum |x w| + |bias|, both in float64."""
        codes, grid = self.weight.view(torch.uint8).numpy(), self.scale.double().numpy()
        b = None if bias is None else bias.double().numpy()
        exact = (codes, grid, self.fmt.name, self.group_size, b)
        y = reference.fp8_linear(x.double().numpy(), *exact)
        absolute = np.abs(reference.float8_values(self.fmt.name))[codes]
        absolute *= reference.expand_grid(grid, codes.shape, (1, self.group_size))
        size = x.double().abs().numpy() @ absolute.T + (0 if b is None else np.abs(b))
        return torch.from_numpy(y), torch.from_numpy(size)


def assert_close(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Allow `bound`, and one rounding to the dtype of `actual` (float16 may be subnormal)."""
    rounding = UNIT[actual.dtype] * (exact.abs() + bound) + 2.0**-25 * (actual.dtype == torch.half)
    excess = (actual.double() - exact).abs() - bound - rounding
    assert actual.shape == exact.shape
    assert not excess.numel() or excess.max() <= 0, f"exceeds its bound by {excess.max()}"


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_linear_matches_the_oracle_at_every_edge(
    columns: int, dtype: torch.dtype, fmt: Format
) -> None:
    layer = Layer.random(max(ROWS), columns, fmt, columns)
    x = torch.randn(max(BATCHES), columns).to(dtype)
    exact, bound = layer.oracle(x)
    sizes = [(rows, batch) for rows in ROWS for batch in (1, 3, 8, 33)]
    for rows, batch in sizes + [(9, batch) for batch in BATCHES]:
        actual = layer.head(rows).linear(x[:batch])
        assert_close(actual, exact[:batch, :rows], bound[:batch, :rows])


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("bias_dtype", UNIT)
def test_dtypes_of_x_and_bias_mix(dtype: torch.dtype, bias_dtype: torch.dtype, fmt: Format) -> None:
    layer = Layer.random(37, 200, fmt, 200)
    x, bias = torch.randn(5, 200).to(dtype), layer.bias.to(bias_dtype)
    actual = layer.linear(x, bias)
    assert actual.dtype == dtype
    assert_close(actual, *layer.oracle(x, bias))


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("out", UNIT, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_result_has_the_dtype_that_was_asked_for(
    rows: int, out: torch.dtype, dtype: torch.dtype, fmt: Format
) -> None:
    layer = Layer.random(37, 200, fmt, 200)
    x = torch.randn(rows, 200).to(dtype)
    arguments = (layer.weight, layer.scale, layer.bias, layer.group_size)
    actual = torch.ops.quantkit.fp8_linear(x, *arguments, out)
    assert actual.dtype == out
    assert_close(actual, *layer.oracle(x, layer.bias))
    assert torch.equal(ops.fp8_linear(x, *arguments, x.dtype), ops.fp8_linear(x, *arguments))


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("columns", "group_size"),
    [(576, 128), (1000, 128), (128, 128), (129, 128), (100, 7), (64, 1), (1000, 64), (65, 1000)],
)
def test_groups_of_columns_have_their_own_scales(
    columns: int, group_size: int, dtype: torch.dtype, fmt: Format
) -> None:
    layer = Layer.random(22, columns, fmt, group_size)
    x = torch.randn(50, columns).to(dtype)
    exact, bound = layer.oracle(x)
    for batch in (1, 2, 4, 9, 40, 50):
        assert_close(layer.linear(x[:batch]), exact[:batch], bound[:batch])


@EVERY_FORMAT
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_linear_matches_the_oracle(activation: str, fmt: Format) -> None:
    for intermediate, columns, group_size in ((1, 1, 1), (5, 65, 65), (66, 300, 128)):
        layer = Layer.random(2 * intermediate, columns, fmt, group_size)
        for batch, dtype in (
            (1, torch.float32),
            (6, torch.bfloat16),
            (17, torch.float16),
            (51, torch.bfloat16),
        ):
            x = torch.randn(batch, columns).to(dtype)
            bias = None if batch == 6 else layer.bias
            exact, bound = layer.oracle(x, bias)
            (gate, up), (d_gate, d_up) = exact.chunk(2, 1), bound.chunk(2, 1)
            # No activation is steeper than 1.13; evaluating it costs a few units of its argument.
            d_act = 1.13 * d_gate + 8 * UNIT[torch.float32] * gate.abs()
            d_product = d_act * (up.abs() + d_up) + (gate.abs() + d_act) * d_up
            expected = torch.from_numpy(reference.gated(exact.numpy(), activation))
            assert_close(layer.gated(x, bias, activation), expected, d_product)


def test_gates_far_from_zero_stay_finite() -> None:
    layer = Layer(
        torch.tensor([[0x38], [0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn),  # 1.0, 1.0
        torch.ones(2, 1),
        torch.zeros(2),
        E4M3,
        1,
    )
    x = torch.tensor([[-1000.0], [1000.0]])
    for activation in ACTIVATIONS:
        assert layer.gated(x, None, activation).tolist() == [[0.0], [1e6]]


@EVERY_FORMAT
@pytest.mark.parametrize("columns", [1, 70])
def test_every_code_has_its_value_in_every_column(columns: int, fmt: Format) -> None:
    codes = torch.zeros(256, columns, dtype=torch.uint8)
    for code in range(256):
        codes[code, code % columns] = code
    layer = Layer(codes.view(fmt.dtype), torch.ones(256, 1), torch.zeros(256), fmt, columns)
    values = torch.from_numpy(reference.float8_values(fmt.name)).float()
    for batch, dtype in (
        (1, torch.float32),
        (3, torch.bfloat16),
        (8, torch.float32),
        (6, torch.half),
        (40, torch.bfloat16),
    ):
        actual = layer.linear(torch.ones(batch, columns, dtype=dtype))
        for row in actual:  # the codes of NaN give NaN, and only in their own output
            torch.testing.assert_close(row, values.to(dtype), rtol=0, atol=0, equal_nan=True)


@EVERY_FORMAT
def test_nan_and_infinite_codes_reach_the_output_in_groups(fmt: Format) -> None:
    layer = Layer.random(9, 300, fmt, 128)
    layer.weight.view(torch.uint8)[4, 299] = 0x7F  # NaN in every format
    for batch, dtype in ((1, torch.float32), (4, torch.float32), (7, torch.bfloat16)):
        actual = layer.linear(torch.randn(batch, 300).to(dtype))
        assert actual.isnan().all(dim=0).tolist() == [row == 4 for row in range(9)]
    if fmt is not E4M3:
        layer.weight.view(torch.uint8)[4, 299] = 0x70 if fmt is E3M4 else 0x7C  # infinity
        x = torch.ones(2, 300)
        x[1] = -1
        assert layer.linear(x)[:, 4].tolist() == [torch.inf, -torch.inf]


@EVERY_DTYPE
def test_nan_in_x_spoils_its_own_row_only(dtype: torch.dtype) -> None:
    layer = Layer.random(9, 65, E4M3, 65)
    for batch in (4, 20):
        x = torch.randn(batch, 65).to(dtype)
        x[2, 64] = torch.nan
        assert layer.linear(x).isnan().all(dim=1).tolist() == [m == 2 for m in range(batch)]


@EVERY_FORMAT
@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize("kind", ["normal", "tiny", "outlier", "wide"])
def test_sums_of_16_bit_x_are_better_than_16_bit_x(kind: str, batch: int, fmt: Format) -> None:
    layer = Layer.random(64, 4096, fmt, 4096)
    x = torch.randn(batch, 4096)
    if kind == "tiny":
        x *= 1e-30
    elif kind == "outlier":
        x[:, 7] = 3e4
    elif kind == "wide":
        x = (3 * x).exp() * x.sign()
    exact, _ = layer.exact(x.bfloat16())
    error = (layer.linear(x.bfloat16()).double() - exact).norm()
    assert error < (exact.bfloat16() - exact).norm() + 8e-4 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_sums_do_not_overflow(dtype: torch.dtype) -> None:
    codes = torch.full((5, 1000), 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn)
    layer = Layer(codes, torch.full((5, 1), 2.0**-9), torch.zeros(5), E4M3, 1000)
    for value, batch in ((1.0, 3), (1.99, 3), (1e-4, 3), (1.99, 20)):
        x = torch.full((batch, 1000), value).to(dtype)
        exact, _ = layer.exact(x)
        np.testing.assert_allclose(layer.linear(x).double(), exact, rtol=2 * UNIT[dtype] + 5e-3)


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's matmul does not promise it")
@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize(("columns", "group_size"), [(576, 576), (1000, 128), (33, 7)])
def test_a_row_is_the_same_bits_in_every_batch(
    columns: int, group_size: int, dtype: torch.dtype, fmt: Format
) -> None:
    layer = Layer.random(134, columns, fmt, group_size)
    layer.weight.view(torch.uint8)[7, 3] = 0x7F
    x = torch.randn(50, columns).to(dtype)
    bias = layer.bias.to(dtype)
    alone = torch.cat([layer.linear(row, bias) for row in x.split(1)])
    gated_alone = torch.cat([layer.gated(row, bias, "silu") for row in x.split(1)])
    together, gated_together = layer.linear(x, bias), layer.gated(x, bias, "silu")
    for batch in (*range(2, 35), 48, 49):
        of_one_kind = batch <= layer.most_rows_of_one_kind(x)
        for actual, expected in (
            (layer.linear(x[-batch:], bias), alone if of_one_kind else together),
            (layer.gated(x[-batch:], bias, "silu"), gated_alone if of_one_kind else gated_together),
        ):
            assert torch.equal(actual.nan_to_num(), expected[-batch:].nan_to_num())


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's matmul does not promise it")
@pytest.mark.parametrize(("batch", "dtype"), [(3, torch.float32), (40, torch.bfloat16)], ids=str)
def test_threads_do_not_change_a_bit(batch: int, dtype: torch.dtype) -> None:
    layer = Layer.random(1501, 577, E4M3, 577)
    x = torch.randn(batch, 577).to(dtype)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            dense = ops.dequantize_weight(layer.weight, layer.scale, 577, torch.bfloat16)
            results.append((layer.linear(x), layer.head(1500).gated(x, None, "gelu"), dense))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@EVERY_FORMAT
@EVERY_DTYPE
def test_dequantize_weight_equals_numerics_bit_for_bit(dtype: torch.dtype, fmt: Format) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(9, 5)[:, : 256 * 5 - 3].contiguous()
    codes = every.view(fmt.dtype)
    # From scales that underflow float16 to ones that overflow it, with all mantissa bits in use.
    magnitude = torch.logspace(-9, 3, 9)[:, None]
    for group_size in (codes.shape[1], 128, 5):
        scale = magnitude * (1 + torch.rand(9, -(-codes.shape[1] // group_size)))
        actual = ops.dequantize_weight(codes, scale, group_size, dtype)
        expected = dequantize(codes, scale, fmt, (1, group_size), dtype)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@EVERY_DTYPE
def test_wrappers_agree_with_the_oracle_on_both_sides_of_the_changeover(dtype: torch.dtype) -> None:
    layer = Layer.random(66, 300, E4M3, 128)
    for batch in (0, 1, 4, 5, ops.FEW_ROWS, ops.FEW_ROWS + 1, 40):
        x = torch.randn(batch, 300).to(dtype)
        exact, bound = layer.oracle(x, layer.bias)
        _, size = layer.exact(x, layer.bias)
        arguments = (layer.weight, layer.scale, layer.bias, layer.group_size)
        # Above the changeover the weight and the bias are rounded to the dtype of x as well.
        bound = bound + 2 * UNIT[dtype] * size
        assert_close(ops.fp8_linear(x, *arguments), exact, bound)
        gate, up = exact.chunk(2, 1)
        rounding = bound + UNIT[dtype] * exact.abs()
        d_gate, d_up = rounding.chunk(2, 1)
        slack = 1.13 * d_gate * (up.abs() + d_up) + (gate.abs() + d_gate) * d_up + 2.0**-20
        expected = torch.from_numpy(reference.gated(exact.numpy(), "silu"))
        assert_close(ops.fp8_gated_linear(x, *arguments, "silu"), expected, slack)


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (4, 0), (0, 0)])
def test_empty_weights_are_allowed(rows: int, columns: int) -> None:
    layer = Layer.random(rows, columns, E4M3, 128)
    x, bias = torch.randn(2, columns), layer.bias
    assert torch.equal(layer.linear(x, bias), bias.expand(2, rows))
    assert layer.gated(x, None, "relu").shape == (2, rows // 2)
    dense = ops.dequantize_weight(layer.weight, layer.scale, 128, torch.float16)
    assert dense.shape == (rows, columns)


@EVERY_DTYPE
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "features"), [(0, 8), (1, 1), (3, 15), (70, 33), (5, 1000)])
def test_gate_mul_matches_the_oracle(
    rows: int, features: int, activation: str, dtype: torch.dtype
) -> None:
    both = (torch.randn(rows, 2 * features) * 4).to(dtype)
    gated = gate_mul(both, activation)
    exact = torch.from_numpy(reference.gated(both.double().numpy(), activation))
    # Evaluating an activation in float32 costs a few units of its argument.
    first, second = both.double().abs().chunk(2, 1)
    assert_close(gated, exact, 8 * UNIT[torch.float32] * first * second)


def test_gate_mul_of_extremes() -> None:
    both = torch.tensor([[-1000.0, 1000.0, torch.nan, 2.0, 3.0, 1.0]])
    for activation in ACTIVATIONS:
        first, second, third = gate_mul(both, activation)[0].tolist()
        assert (first, second) == (0.0, 3000.0)
        assert math.isnan(third)


@contextmanager
def memory_before_a_forbidden_page(size: int) -> Iterator[Tensor]:
    """Yield `size` bytes whose end touches a page that may not be read."""
    page = mmap.PAGESIZE
    block = mmap.mmap(-1, -(-size // page) * page + page)
    buffer = (ctypes.c_char * len(block)).from_buffer(block)
    last = ctypes.c_void_p(ctypes.addressof(buffer) + len(block) - page)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(last, ctypes.c_size_t(page), 0) == 0
    try:
        yield torch.frombuffer(
            block, dtype=torch.uint8, count=size, offset=len(block) - page - size
        )
    finally:
        libc.mprotect(last, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("columns", [1, 31, 33, 65, 127])
def test_nothing_is_read_beyond_the_end_of_the_weight(columns: int) -> None:
    # A checkpoint is mapped from a file: beyond its end there may be no memory.
    with memory_before_a_forbidden_page(7 * columns) as memory:
        memory.fill_(0x38)  # 1.0
        weight = memory.view(7, columns).view(torch.float8_e4m3fn)
        layer = Layer(weight, torch.ones(7, 1), torch.zeros(7), E4M3, columns)
        for batch, dtype in ((1, torch.float32), (4, torch.float32), (20, torch.bfloat16)):
            assert (layer.linear(torch.ones(batch, columns, dtype=dtype)) == columns).all()
        dense = ops.dequantize_weight(weight, layer.scale, columns, torch.bfloat16)
        assert (dense == 1).all()


@pytest.mark.parametrize(
    ("capability", "rows"), [((8, 0), 64), ((8, 6), 64), ((8, 9), 16), ((9, 0), 16), ((12, 0), 16)]
)
def test_gpus_without_8_bit_products_decode_inside_for_more_rows(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], rows: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    ops.cuda_few_rows.cache_clear()
    assert ops.cuda_few_rows(torch.device("cuda", 0)) == rows
    ops.cuda_few_rows.cache_clear()
