"""Linear layers on the GPU against float64, at the sizes of real models and at tile edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit import numerics, ops
from quantkit.block_ops import BLOCK, block_scaled_mm, quantize_groups
from quantkit.cache_ops import rotary_append
from quantkit.qkv_ops import fp8_qkv_append
from quantkit.row_ops import QuantizedRows, quantize_rows
from quantkit.scaled_ops import scaled_gated_mm, scaled_mm
from tests.gpu import oracles

DEVICE = torch.device("cuda")
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e3m4": torch.uint8}
HALVES = pytest.mark.parametrize("dtype", UNIT, ids=lambda d: str(d).removeprefix("torch."))


def random_weight(rows: int, columns: int, fmt: str, group: int) -> tuple[Tensor, Tensor]:
    special = {"e4m3": 0x7F, "e5m2": 0x7C, "e3m4": 0x70}[fmt]
    codes = torch.randint(0, special, (rows, columns), dtype=torch.uint8, device=DEVICE)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device=DEVICE) << 7
    scale = torch.rand(rows, -(-columns // group), device=DEVICE) * 0.01 + 0.001
    return codes.view(FORMATS[fmt]), scale


def assert_sums(actual: Tensor, exact: Tensor, magnitude: Tensor, sums: float = 2.0**-18) -> None:
    """Allow one rounding of the result, and `sums` of the summed magnitudes."""
    error = (actual.double() - exact).abs()
    allowed = UNIT[actual.dtype] * exact.abs() + sums * magnitude
    worst = (error / allowed.clamp(min=1e-30)).max().item() if error.numel() else 0.0
    assert actual.isfinite().all()
    assert worst <= 1.0, f"error reaches {worst} of what is allowed"


SHAPES = [(4096, 4096), (6144, 4096), (4096, 14336), (576, 1536), (1000, 576), (24, 80), (7, 33)]


@pytest.mark.parametrize("count", [1, 2, 4, 7, 8, 9, 16, 17, 32, 33, 70])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@HALVES
def test_few_rows(dtype: torch.dtype, rows: int, columns: int, count: int) -> None:
    codes, scale = random_weight(rows, columns, "e4m3", columns)
    x, bias = torch.randn(count, columns, device=DEVICE).to(dtype), torch.randn(rows, device=DEVICE)
    x[:, 0] *= 100  # an outlier
    bias = bias.to(dtype)
    actual = torch.ops.quantkit.fp8_linear(x, codes, scale, bias, columns)
    exact = oracles.linear(x, codes, scale, "e4m3", bias)
    magnitude = x.double().abs() @ oracles.code_values(codes, "e4m3").abs().T * scale.double().T
    assert_sums(actual, exact, magnitude)
    alone = torch.ops.quantkit.fp8_linear(x[-1:].contiguous(), codes, scale, bias, columns)
    again = torch.ops.quantkit.fp8_linear(x, codes, scale, bias, columns)
    assert torch.equal(actual, again)
    if count <= 32:
        assert torch.equal(alone, actual[-1:]), "a row depends on its batch"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("group", [64, 128, 256, 4096])
@pytest.mark.parametrize("count", [1, 5, 20])
@HALVES
def test_formats_and_groups(dtype: torch.dtype, count: int, group: int, fmt: str) -> None:
    codes, scale = random_weight(640, 1024, fmt, min(group, 1024))
    x = torch.randn(count, 1024, device=DEVICE).to(dtype) * 0.1
    actual = torch.ops.quantkit.fp8_linear(x, codes, scale, None, min(group, 1024))
    exact = oracles.linear(x, codes, scale, fmt, None)
    values = oracles.code_values(codes, fmt).abs() * scale.double().amax(1, keepdim=True)
    if float(exact.abs().max()) < 6e4:
        assert_sums(actual, exact, x.double().abs() @ values.T)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("count", [1, 8, 16, 32])
@pytest.mark.parametrize(("inner", "columns"), [(14336, 4096), (1536, 576), (20, 48)])
def test_gated(inner: int, columns: int, count: int, activation: str) -> None:
    codes, scale = random_weight(2 * inner, columns, "e4m3", columns)
    scale = scale / columns**0.5
    x = torch.randn(count, columns, device=DEVICE).bfloat16()
    actual = torch.ops.quantkit.fp8_gated_linear(x, codes, scale, None, columns, activation)
    gate, up = oracles.linear(x, codes, scale, "e4m3", None).chunk(2, dim=1)
    exact = oracles.activate(gate, activation) * up
    values = oracles.code_values(codes, "e4m3").abs() * scale.double()
    first, second = (x.double().abs() @ values.T).chunk(2, dim=1)
    assert_sums(actual, exact, first * second + first * up.abs() + second)


@pytest.mark.parametrize("outliers", [1, 7, 40, 143])
@pytest.mark.parametrize("count", [1, 4, 9, 32])
@pytest.mark.parametrize(("inner", "columns"), [(4096, 4096), (6144, 4096), (288, 576), (20, 50)])
@HALVES
def test_outlier_columns(
    dtype: torch.dtype, inner: int, columns: int, count: int, outliers: int
) -> None:
    """Weights in bfloat16 beside the codes, at narrow, wide and odd layers, also gated."""
    codes, scale = random_weight(2 * inner, columns, "e4m3", columns)
    scale, x = scale / columns**0.5, torch.randn(count, columns, device=DEVICE).to(dtype)
    numbers = torch.randperm(columns, device=DEVICE)[:outliers].sort().values.int()
    beside = torch.randn(len(numbers), 2 * inner, device=DEVICE).bfloat16()
    x[:, numbers.long()] *= 30
    chosen = x[:, numbers.long()].double()
    exact = oracles.linear(x, codes, scale, "e4m3", None) + chosen @ beside.double()
    values = oracles.code_values(codes, "e4m3").abs() * scale.double()
    magnitude = x.double().abs() @ values.T + chosen.abs() @ beside.double().abs()
    arguments = (x, codes, scale, None, columns)
    both = torch.ops.quantkit.fp8_linear(*arguments, None, numbers, beside)
    assert_sums(both, exact, magnitude)
    assert torch.equal(both, torch.ops.quantkit.fp8_linear(*arguments, None, numbers, beside))
    (gate, up), (first, second) = exact.chunk(2, dim=1), magnitude.chunk(2, dim=1)
    gated = torch.ops.quantkit.fp8_gated_linear(*arguments, "silu", numbers, beside)
    if dtype == torch.bfloat16:  # their product is beyond float16
        exact = oracles.activate(gate, "silu") * up
        assert_sums(gated, exact, first * second + first * up.abs() + second)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("group", [128, 333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantize_is_exact(dtype: torch.dtype, group: int, fmt: str) -> None:
    codes, scale = random_weight(257, 1000, fmt, group)
    actual = ops.dequantize_weight(codes, scale, group, dtype)
    named = numerics.FORMATS[fmt]
    expected = numerics.dequantize(codes.cpu(), scale.cpu(), named, (1, group), dtype)
    assert torch.equal(actual.cpu(), expected)


COUNTS = [1, 3, 16, 17, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 2048]
MATRICES = [
    (4096, 4096),
    (6144, 4096),
    (4096, 14336),
    (1024, 4096),
    (576, 1536),
    (48, 32),
    (16, 16),
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("rows", "columns"), MATRICES)
def test_scaled_mm(rows: int, columns: int, count: int) -> None:
    codes, scale = random_weight(rows, columns, "e4m3", columns)
    scale, bias = scale.view(-1), torch.randn(rows, device=DEVICE).bfloat16()
    x = quantize_rows(torch.randn(count, columns, device=DEVICE).bfloat16())
    actual = scaled_mm(x, codes, scale, bias, torch.bfloat16)
    values = oracles.code_values(x.codes, "e4m3") * x.scales.double().view(-1, 1)
    exact = oracles.linear(values, codes, scale.view(-1, 1), "e4m3", bias)
    weights = oracles.code_values(codes, "e4m3").abs() * scale.double().view(-1, 1)
    # Hopper cuts what it adds, 32 columns at a time, to about 14 bits of the largest.
    assert_sums(actual, exact, values.abs() @ weights.T, sums=2.0**-10)
    assert torch.equal(actual, scaled_mm(x, codes, scale, bias, torch.bfloat16))


@pytest.mark.parametrize("activation", ["none", "silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("count", [5, 40, 100, 300])
@HALVES
def test_scaled_mm_epilogues(dtype: torch.dtype, count: int, static: bool, activation: str) -> None:
    codes, scale = random_weight(512, 1024, "e4m3", 1024)
    scale = scale.view(-1) / 1000
    given = torch.tensor([0.01], device=DEVICE) if static else None
    x = quantize_rows(torch.randn(count, 1024, device=DEVICE).to(dtype), given)
    actual = scaled_mm(x, codes, scale, None, dtype, activation)
    values = oracles.code_values(x.codes, "e4m3") * x.scales.double().view(-1, 1)
    exact = oracles.linear(values, codes, scale.view(-1, 1), "e4m3", None)
    weights = oracles.code_values(codes, "e4m3").abs() * scale.double().view(-1, 1)
    magnitude = values.abs() @ weights.T
    if activation != "none":
        exact = oracles.activate(exact, activation)
    assert_sums(actual, exact, magnitude, sums=2.0**-10)


def test_scaled_mm_of_no_rows_is_empty() -> None:
    codes, scale = random_weight(64, 32, "e4m3", 32)
    rows = QuantizedRows(codes[:0], scale.view(-1)[:0])
    assert scaled_mm(rows, codes, scale.view(-1), None, torch.bfloat16).shape == (0, 64)
    x = torch.empty(0, 32, device=DEVICE).bfloat16()
    assert ops.fp8_linear(x, codes, scale, None, 32).shape == (0, 64)


SM90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel of sm_90a",
)


@SM90
@pytest.mark.parametrize("count", [1, 3, 16, 63, 64, 65, 127, 128, 129, 300, 1000])
@pytest.mark.parametrize(
    ("inner", "columns"), [(14336, 4096), (1536, 576), (8, 16), (24, 272), (200, 1040)]
)
def test_scaled_gated_mm(inner: int, columns: int, count: int) -> None:
    """Both tiles, at the edges of every side; also the same bits again."""
    rows, codes, scale, bias = gated_problem(inner, columns, count, torch.bfloat16, False)
    arguments = (rows, codes, scale, bias, torch.bfloat16, "silu")
    actual = scaled_gated_mm(*arguments)
    assert_sums(actual, *exact_gated(rows, codes, scale, bias, "silu"), sums=2.0**-10)
    assert torch.equal(actual, scaled_gated_mm(*arguments))


@SM90
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("count", [40, 200])
@HALVES
def test_scaled_gated_mm_epilogues(
    dtype: torch.dtype, count: int, static: bool, activation: str
) -> None:
    rows, codes, scale, _ = gated_problem(512, 1024, count, dtype, static)
    actual = scaled_gated_mm(rows, codes, scale, None, dtype, activation)
    assert_sums(actual, *exact_gated(rows, codes, scale, None, activation), sums=2.0**-10)


def gated_problem(
    inner: int, columns: int, count: int, dtype: torch.dtype, static: bool
) -> tuple[QuantizedRows, Tensor, Tensor, Tensor]:
    """Return inputs, codes, scales and a bias whose results are of the order of 1."""
    codes, scale = random_weight(2 * inner, columns, "e4m3", columns)
    given = torch.tensor([0.01], device=DEVICE) if static else None
    rows = quantize_rows(torch.randn(count, columns, device=DEVICE).to(dtype), given)
    return rows, codes, scale.view(-1) / columns**0.5, torch.randn(2 * inner, device=DEVICE)


def exact_gated(
    rows: QuantizedRows, codes: Tensor, scale: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Return act(gate) * up, and how much of it an error of the sums can be."""
    values = oracles.code_values(rows.codes, "e4m3") * rows.scales.double().view(-1, 1)
    both = oracles.linear(values, codes, scale.view(-1, 1), "e4m3", bias)
    gate, up = both.chunk(2, dim=1)
    weights = oracles.code_values(codes, "e4m3").abs() * scale.double().view(-1, 1)
    first, second = (values.abs() @ weights.T).chunk(2, dim=1)
    gated = oracles.activate(gate, activation)
    # No activation is steeper than 1.13: of gelu.
    return gated * up, 1.13 * first * up.abs() + gated.abs() * second + first * second * 2.0**-9


@SM90
@pytest.mark.parametrize(
    ("rows", "columns"), [(6144, 4096), (4096, 14336), (576, 128), (272, 1536), (16, 256)]
)
@pytest.mark.parametrize("count", [1, 3, 17, 64, 127, 128, 129, 1000])
@HALVES
def test_block_scaled_mm(dtype: torch.dtype, count: int, rows: int, columns: int) -> None:
    codes, _ = random_weight(rows, columns, "e4m3", columns)
    scale = torch.rand(-(-rows // BLOCK), columns // BLOCK, device=DEVICE) * 0.01 + 0.001
    x = torch.randn(count, columns, device=DEVICE).bfloat16()
    x[:, :BLOCK] *= 100
    given, bias = quantize_groups(x), torch.randn(rows, device=DEVICE)
    actual = block_scaled_mm(given, codes, scale, bias, dtype)
    left = oracles.code_values(given.codes, "e4m3")
    left *= given.scales.double().repeat_interleave(BLOCK, dim=1)
    right = oracles.code_values(codes, "e4m3")
    right *= scale.double().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
    # The tensor core's own accumulator holds 128 columns at most.
    assert_sums(actual, left @ right.T + bias.double(), left.abs() @ right.abs().T, 2.0**-12)
    assert torch.equal(actual, block_scaled_mm(given, codes, scale, bias, dtype))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim", "columns", "group"),
    [
        (32, 8, 128, 128, 4096, 4096),
        (9, 3, 64, 64, 576, 576),
        (8, 2, 64, 32, 1024, 128),
        (4, 4, 80, 0, 2560, 2560),
    ],
)
@HALVES
def test_q_k_and_v_into_the_cache(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary_dim: int,
    columns: int,
    group: int,
    count: int,
    kind: torch.dtype,
) -> None:
    """One kernel has the bits of two one after another, whose own tests know what is right."""
    codes, scale = random_weight((heads + 2 * kv_heads) * dim, columns, "e4m3", group)
    weights = (codes, scale, torch.randn(len(codes), device=DEVICE), group)
    x = torch.randn(count, columns, device=DEVICE).to(dtype)
    angles = tuple(torch.randn(2, count, rotary_dim, device=DEVICE).to(dtype))
    turn = angles if rotary_dim else None
    slots = torch.randperm(64, device=DEVICE)[:count]
    scales = [torch.rand(size, device=DEVICE) * 0.05 + 0.01 for size in (kv_heads, 1)]
    if kind == torch.bfloat16:
        scales = [None, None]
    shape = (4, 16, kv_heads, dim)
    fused, plain = ([torch.zeros(shape, device=DEVICE).to(kind) for _ in "kv"] for _ in range(2))
    query = fp8_qkv_append(x, *weights, turn, *fused, *scales, slots, heads)
    qkv = torch.ops.quantkit.fp8_linear(x, *weights).view(count, -1, dim)
    expected = rotary_append(qkv, None, None, 0.0, turn, *plain, *scales, slots, heads)
    assert torch.equal(query, expected)
    for got, wanted in zip(fused, plain, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
