"""Norms, quantization, gating and rotary embedding on CUDA, run by the emulator.

Everything that is defined to the bit is compared so: what is fused with what follows, and what
torch or `quantkit.numerics` computes step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit import numerics
from quantkit.gate_ops import ACTIVATIONS
from quantkit.numerics import E4M3
from tests import reference
from tests.cuda import emulator
from tests.cuda.emulator import EmulatorError, Library, Order

SOURCE = r"""
#include "rows.cuh"

using namespace quantkit;
using namespace quantkit::cuda;

namespace {

const auto start = [](auto kernel, unsigned blocks, int threads, const auto&... arguments) {
  emulator::launch(blocks, threads, 0, kernel, arguments...);
};

// As in rows.cu; `shift` moves x off its place, as a slice of a tensor may be.
template <RowSource kSource, bool kNorm, bool kCodes, class Weight, class T>
void run(const T* x, int64_t shift, const T* delta, const Weight* weight, T* sum, T* out,
         uint8_t* codes,
         const float* scale, float* scales, int64_t rows, int64_t columns, float eps,
         int64_t activation) {
  RowCall<T> call{x + shift, delta, sum, weight, out, codes, scales, scale, rows, columns, eps,
                  static_cast<Activation>(activation), false};
  if (!kNorm && scale != nullptr && kSource == RowSource::kValues) {
    call.columns *= rows;
    call.rows = 1;
  }
  call.aligned = is_aligned(call);
  if constexpr (kNorm) {
    start_process_rows<kSource, kNorm, kCodes, Weight>(call, start);
  } else if constexpr (kCodes) {
    if (scale == nullptr) return start_process_rows<kSource, false, true, T>(call, start);
    start_map_rows<kSource, true>(call, start);
  } else {
    start_map_rows<kSource, false>(call, start);
  }
}

__global__ void scales_for(const float* amax, float* scales, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) scales[i] = scale_for(amax[i]);
}

}  // namespace

#define ROWS(name, type, T, source, norm, codes) WEIGHTED(name, type, T, T, source, norm, codes)
#define WEIGHTED(name, type, T, W, source, norm, codes)                                        \
  extern "C" void name##_##type(const T* x, int64_t shift, const T* delta, const W* weight,    \
                                T* sum, T* out, uint8_t* codes_, const float* scale,           \
                                float* scales, int64_t rows, int64_t columns, float eps,       \
                                int64_t activation) {                                          \
    run<RowSource::source, norm, codes>(x, shift, delta, weight, sum, out, codes_, scale,      \
                                        scales, rows, columns, eps, activation);               \
  }
#define ALL(type, T)                                                                           \
  ROWS(rms_norm, type, T, kValues, true, false)                                                \
  ROWS(add_rms_norm, type, T, kSum, true, false)                                               \
  ROWS(rms_norm_quantize, type, T, kValues, true, true)                                        \
  ROWS(add_rms_norm_quantize, type, T, kSum, true, true)                                       \
  ROWS(quantize_rows, type, T, kValues, false, true)                                           \
  ROWS(gate_mul, type, T, kGated, false, false)                                                \
  ROWS(gate_mul_quantize, type, T, kGated, false, true)                                        \
  extern "C" void rotary_##type(const T* x, const T* cosine, const T* sine, T* out,            \
                                int64_t stride, int64_t tokens, int64_t heads, int64_t dim,    \
                                int64_t rotary_dim) {                                          \
    RotaryCall<T> call{x, cosine, sine, out, stride, heads, dim, rotary_dim, false};           \
    call.aligned = is_aligned(call);                                                           \
    start_rotate(call, tokens, start);                                                         \
  }
// Of 16 bits with a norm's weight of float32.
#define WIDE(type, T)                                                                          \
  WEIGHTED(rms_norm, wide_##type, T, float, kValues, true, false)                              \
  WEIGHTED(add_rms_norm, wide_##type, T, float, kSum, true, false)                             \
  WEIGHTED(rms_norm_quantize, wide_##type, T, float, kValues, true, true)                      \
  WEIGHTED(add_rms_norm_quantize, wide_##type, T, float, kSum, true, true)
WIDE(bfloat16, BFloat16)
WIDE(float16, Half)
ALL(bfloat16, BFloat16)
ALL(float16, Half)
ALL(float32, float)

extern "C" void scale_for_(const float* amax, float* scales, int64_t count) {
  emulator::launch((count + 255) / 256, 256, 0, scales_for, amax, scales, count);
}
"""

EPS = 1e-5
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HALF_DTYPES = ("bfloat16", "float16")
# On both sides of: a chunk of 8, a warp a row (256), one, two and four chunks a thread (4096, 8192,
# 16384), and of what threads keep; and widths of real models.
WIDTHS = (1, 7, 8, 64, 256, 264, 333, 576, 1000, 4096, 4104, 8200, 14336, 16392)


@pytest.fixture(scope="module")
def library() -> Library:
    return emulator.compile(SOURCE)


@dataclass
class Rows:
    """The ops as Python sees them; every kernel of rows.cuh by its op's name."""

    library: Library
    shift: int = 0

    def __call__(
        self,
        op: str,
        x: Tensor,
        *,
        delta: Tensor | None = None,
        weight: Tensor | None = None,
        scale: Tensor | None = None,
        activation: str = "silu",
    ) -> dict[str, Tensor]:
        rows, columns = x.shape[0], x.shape[1] // (2 if op.startswith("gate") else 1)
        results: dict[str, Tensor] = {}
        if op.startswith("add"):
            results["sum"] = torch.full_like(x, torch.nan)
        if "quantize" in op:
            results["codes"] = torch.full((rows, columns), 0x55, dtype=torch.uint8)
            results["scales"] = torch.full((rows if scale is None else 1,), torch.nan)
        else:
            results["out"] = torch.full((rows, columns), torch.nan, dtype=x.dtype)
        shifted = torch.cat([x.new_zeros(self.shift), x.flatten()])
        wide = weight is not None and weight.dtype != x.dtype
        self.library.call(
            f"{op}_{'wide_' if wide else ''}{str(x.dtype).removeprefix('torch.')}",
            shifted,
            self.shift,
            delta,
            weight,
            results.get("sum"),
            results.get("out"),
            results.get("codes"),
            scale,
            results.get("scales"),
            rows,
            columns,
            EPS,
            list(ACTIVATIONS).index(activation),
        )
        return results


@pytest.fixture
def rows(library: Library, order: Order) -> Rows:
    """With threads in each of three orders."""
    library.order = order
    return Rows(library)


@pytest.fixture
def plain_rows(library: Library) -> Rows:
    """With threads in order: for sweeps of numbers."""
    library.order = Order.ASCENDING
    return Rows(library)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bits; all NaN are one."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    number = ~expected.isnan() if expected.is_floating_point() else torch.ones_like(expected) > 0
    assert torch.equal(actual[number], expected[number])
    if expected.is_floating_point():
        assert torch.equal(actual.signbit()[number], expected.signbit()[number])
        assert actual[~number].isnan().all()


def quantized(x: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
    """What quantize_rows is defined to be."""
    tile = (1, x.shape[1])
    grid = numerics.amax_to_scale(numerics.tile_amax(x, tile), E4M3) if scale is None else scale
    codes = numerics.quantize(x, grid.view(-1, 1), E4M3, tile).view(torch.uint8)
    return {"codes": codes, "scales": grid.flatten()}


def rotary_by_steps(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """What rotary is defined to be: torch rounds each operation to x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return x * cosine[:, None] + torch.cat((-b, a), dim=-1) * sine[:, None]


def small_integers(*shape: int) -> Tensor:
    """Numbers whose squares sum up exactly in float32, in any order."""
    return torch.randint(-15, 16, shape).float() / 4


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(actual[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(plain_rows: Rows, width: int, dtype: str) -> None:
    x, weight = torch.randn(3, width).to(DTYPES[dtype]), torch.randn(width).to(DTYPES[dtype])
    out = plain_rows("rms_norm", x, weight=weight)["out"]
    expected = reference.rms_norm(x.double().numpy(), weight.double().numpy(), EPS)
    step = torch.finfo(DTYPES[dtype]).eps
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=2.5 * step, atol=1e-7)
    exact = small_integers(3, width).to(DTYPES[dtype])
    out = plain_rows("rms_norm", exact, weight=weight)["out"]
    assert_same(out, F.rms_norm(exact, (width,), None, EPS) * weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(plain_rows: Rows, width: int, dtype: str) -> None:
    x, delta = torch.randn(2, 2, width).to(DTYPES[dtype])
    weight = torch.randn(width).to(DTYPES[dtype])
    fused = plain_rows("add_rms_norm", x, delta=delta, weight=weight)
    assert_same(fused["sum"], x + delta)
    assert_same(fused["out"], plain_rows("rms_norm", x + delta, weight=weight)["out"])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_with_a_float32_weight(plain_rows: Rows, width: int, dtype: str) -> None:
    """Rounded once, after the weight: half a step, where two roundings may be off by more."""
    x, delta = torch.randn(2, 3, width).to(DTYPES[dtype])
    weight = torch.randn(width)
    out = plain_rows("rms_norm", x, weight=weight)["out"]
    expected = reference.rms_norm(x.double().numpy(), weight.double().numpy(), EPS)
    half_step = torch.finfo(DTYPES[dtype]).eps / 2
    # What is above half a step is the float32 in between; atol: subnormal float16.
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=half_step + 1e-6, atol=6e-8)
    exact = small_integers(3, width).to(DTYPES[dtype])
    out = plain_rows("rms_norm", exact, weight=weight)["out"]
    assert_same(out, (F.rms_norm(exact.float(), (width,), None, EPS) * weight).to(out.dtype))
    added = plain_rows("add_rms_norm", x, delta=delta, weight=weight)
    assert_same(added["sum"], x + delta)
    assert_same(added["out"], plain_rows("rms_norm", x + delta, weight=weight)["out"])
    for scale in (None, torch.tensor([0.01])):
        fused = plain_rows("add_rms_norm_quantize", x, delta=delta, weight=weight, scale=scale)
        compare(fused, {"sum": added["sum"], **quantized(added["out"], scale)})
        alone = plain_rows("rms_norm_quantize", added["sum"], weight=weight, scale=scale)
        compare(alone, quantized(added["out"], scale))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_that_quantize(plain_rows: Rows, width: int, dtype: str, static: bool) -> None:
    x, delta = torch.randn(2, 3, width).to(DTYPES[dtype])
    weight = torch.randn(width).to(DTYPES[dtype])
    scale = torch.tensor([0.01]) if static else None
    norm = plain_rows("rms_norm", x, weight=weight)["out"]
    compare(plain_rows("rms_norm_quantize", x, weight=weight, scale=scale), quantized(norm, scale))
    added = plain_rows("add_rms_norm", x, delta=delta, weight=weight)
    fused = plain_rows("add_rms_norm_quantize", x, delta=delta, weight=weight, scale=scale)
    compare(fused, {"sum": added["sum"], **quantized(added["out"], scale)})


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_rows(plain_rows: Rows, width: int, dtype: str, static: bool) -> None:
    x = (torch.randn(3, width) * torch.tensor([[1.0], [1e-4], [100.0]])).to(DTYPES[dtype])
    scale = torch.tensor([0.03]) if static else None
    compare(plain_rows("quantize_rows", x, scale=scale), quantized(x, scale))


def test_rows_of_special_numbers(rows: Rows) -> None:
    x = torch.randn(6, 320)
    x[0] = 0
    x[1] = torch.linspace(-1, 1, 320) * 2.0**-130  # the scale is at its least
    x[2, 5] = torch.inf
    x[3, 300] = torch.nan
    x[4, 0], x[4, 1] = torch.inf, -torch.nan
    x[5] = -0.0
    for dtype in (torch.bfloat16, torch.float32):
        actual, expected = rows("quantize_rows", x.to(dtype)), quantized(x.to(dtype), None)
        assert_same(actual["scales"], expected["scales"])
        nan = (expected["codes"] & 0x7F) == 0x7F
        assert nan.sum() == 1 + 320 + 320
        assert torch.equal(actual["codes"][~nan], expected["codes"][~nan])
        assert torch.equal(actual["codes"][nan] & 0x7F, expected["codes"][nan] & 0x7F)


def test_scales_round_up(library: Library) -> None:
    bits = torch.arange(0, 0x7F81).to(torch.int16)
    all_bfloat16 = bits.view(torch.bfloat16).float()
    amax = torch.cat([all_bfloat16, all_bfloat16 * 448, torch.rand(20000) * 448, torch.ones(1)])
    amax[-1] = torch.nan
    scales = torch.zeros_like(amax)
    library.scale_for_(amax, scales, amax.numel())
    assert_same(scales, numerics.amax_to_scale(amax, E4M3))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(plain_rows: Rows, dtype: str, activation: str) -> None:
    gate = torch.cat([torch.linspace(-30, 30, 997), torch.tensor([0.0, -200.0, 200.0])])
    both = torch.cat([gate, torch.randn(1000)])[None].to(DTYPES[dtype])
    out = plain_rows("gate_mul", both, activation=activation)["out"]
    expected = reference.gated(both.double().numpy(), activation)
    rtol = torch.finfo(DTYPES[dtype]).eps
    # gelu has 1 + erf in it, which float32 rounds to 0 beyond -5; torch's does the same.
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=rtol, atol=2e-6)
    torch.testing.assert_close(
        out, (ACTIVATIONS[activation](both[:, :1000].float()) * both[:, 1000:]).to(out.dtype),
        rtol=rtol, atol=2e-6,
    )  # fmt: skip


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate_mul(plain_rows: Rows, width: int, dtype: str, activation: str) -> None:
    both = torch.randn(2, 2 * width).to(DTYPES[dtype])
    out = plain_rows("gate_mul", both, activation=activation)["out"]
    expected = reference.gated(both.double().numpy(), activation)
    step = torch.finfo(DTYPES[dtype]).eps
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=step, atol=1e-6)
    for scale in (None, torch.tensor([0.02])):
        fused = plain_rows("gate_mul_quantize", both, activation=activation, scale=scale)
        compare(fused, quantized(out, scale))


ARGUMENTS = {
    "rms_norm": ("weight",),
    "add_rms_norm": ("delta", "weight"),
    "rms_norm_quantize": ("weight",),
    "add_rms_norm_quantize": ("delta", "weight"),
    "quantize_rows": (),
    "gate_mul": (),
    "gate_mul_quantize": (),
}


def arguments_of(op: str, count: int, width: int) -> dict[str, Any]:
    given: dict[str, Any] = {
        "x": torch.randn(count, width * (2 if op.startswith("gate") else 1)).bfloat16()
    }
    for name in ARGUMENTS[op]:
        given[name] = torch.randn((width,) if name == "weight" else (count, width)).bfloat16()
    return given


@pytest.mark.parametrize("op", ARGUMENTS)
def test_unaligned_rows_have_the_same_bits(library: Library, op: str, order: Order) -> None:
    library.order = order
    for width in (64, 576, 8200):
        given = arguments_of(op, 2, width)
        x = given.pop("x")
        compare(Rows(library, shift=1)(op, x, **given), Rows(library)(op, x, **given))


@pytest.mark.parametrize("op", ARGUMENTS)
def test_a_row_does_not_depend_on_its_batch(rows: Rows, op: str) -> None:
    for width in (72, 576):
        given = arguments_of(op, 11, width)
        together = rows(op, **given)
        last = {name: tensor[-1:] if tensor.ndim > 1 else tensor for name, tensor in given.items()}
        compare(rows(op, **last), {name: tensor[-1:] for name, tensor in together.items()})


def test_too_short_an_output_is_noticed(library: Library) -> None:
    x, weight = torch.ones(2, 576).bfloat16(), torch.ones(576).bfloat16()
    out = torch.zeros(2 * 576 - 1).bfloat16()
    none = (None, None, None)
    with pytest.raises(EmulatorError, match="heap-buffer-overflow"):
        library.rms_norm_bfloat16(x, 0, None, weight, None, out, *none, 2, 576, EPS, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 1, 2), (2, 3, 6), (3, 9, 64), (2, 40, 128), (1, 2, 24)]
)
def test_rotary(
    library: Library, order: Order, tokens: int, heads: int, dim: int, dtype: str
) -> None:
    library.order = order
    angles = torch.randn(tokens, dim // 2).repeat(1, 2)
    cosine, sine = angles.cos().to(DTYPES[dtype]), angles.sin().to(DTYPES[dtype])
    # Some of the heads of wider rows, as queries within qkv are.
    wide = torch.randn(tokens, heads + 2, dim).to(DTYPES[dtype])
    for x in (wide[:, :heads], wide[:, :heads].contiguous()):
        out = torch.full((tokens, heads, dim), torch.nan, dtype=DTYPES[dtype])
        memory = wide if x.stride(0) == wide.stride(0) else x
        sizes = (x.stride(0), tokens, heads, dim, dim)
        library.call(f"rotary_{dtype}", memory, cosine, sine, out, *sizes)
        assert_same(out, rotary_by_steps(x, cosine, sine))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(6, 2), (80, 32), (80, 20), (100, 48), (128, 64), (256, 64), (24, 0)]
)
def test_partial_rotary(
    library: Library, order: Order, dim: int, rotary_dim: int, dtype: str
) -> None:
    """The first elements of a head turn, the others pass with their bits."""
    library.order = order
    tokens, heads = 3, 5
    cosine, sine = torch.randn(2, tokens, rotary_dim).to(DTYPES[dtype])
    x = torch.randn(tokens, heads, dim).to(DTYPES[dtype])
    out = torch.full_like(x, torch.nan)
    sizes = (x.stride(0), tokens, heads, dim, rotary_dim)
    library.call(f"rotary_{dtype}", x, cosine, sine, out, *sizes)
    turned = rotary_by_steps(x[..., :rotary_dim], cosine, sine)
    assert_same(out, torch.cat((turned, x[..., rotary_dim:]), dim=-1))
