"""The kernels of csrc/cuda/dequantize.cuh on the emulator: the bits of quantkit.numerics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantkit.numerics import FORMATS, Format, decode, dequantize
from tests.cuda import emulator
from tests.cuda.emulator import Library

SOURCE = r"""
#include "dequantize.cuh"

using namespace quantkit;
using namespace quantkit::cuda;

// `shift`: elements by which the result begins later.
template <class Format, class T>
void run(const uint8_t* codes, const float* scale, T* out, int64_t shift, int64_t rows,
         int64_t columns, int64_t groups, int64_t group_size) {
  dispatch_dequantize<Format>(codes, scale, out + shift, rows, columns, groups, group_size,
                              [](auto* kernel, int64_t blocks, int threads, auto... arguments) {
                                emulator::launch(dim3(static_cast<unsigned>(blocks)), threads, 0,
                                                 kernel, arguments...);
                              });
}

#define QK_DEQUANTIZE(name, Format, T)                                                      \
  extern "C" void name(const uint8_t* codes, const float* scale, T* out, int64_t shift,     \
                       int64_t rows, int64_t columns, int64_t groups, int64_t group_size) { \
    run<Format>(codes, scale, out, shift, rows, columns, groups, group_size);               \
  }
#define QK_FORMAT(name, Format)                    \
  QK_DEQUANTIZE(name##_float32, Format, float)     \
  QK_DEQUANTIZE(name##_bfloat16, Format, BFloat16) \
  QK_DEQUANTIZE(name##_float16, Format, Half)
QK_FORMAT(e4m3, E4M3)
QK_FORMAT(e5m2, E5M2)
QK_FORMAT(e3m4, E3M4)
"""


@pytest.fixture(scope="module", params=[False, True], ids=["sm89", "sm80"])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    made = emulator.compile(SOURCE, sm80=request.param)
    yield made
    made.close()


def run(
    library: Library,
    codes: Tensor,
    scale: Tensor,
    fmt: Format,
    group_size: int,
    dtype: torch.dtype,
    shift: int = 0,
) -> Tensor:
    out = torch.full((shift + codes.numel(),), torch.nan, dtype=dtype)
    function = getattr(library, f"{fmt.name}_{str(dtype).removeprefix('torch.')}")
    function(codes, scale, out, shift, *codes.shape, scale.shape[1], group_size)
    assert out[:shift].isnan().all()
    return out[shift:].reshape(codes.shape)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_are_those_of_numerics(library: Library, dtype: torch.dtype, fmt: Format) -> None:
    """Shapes on both sides of a vector, a group, a block's loads; columns without vectors."""
    torch.manual_seed(0)
    shapes = [
        (8, 8),
        (16, 16),
        (24, 8),
        (512, 512),
        (520, 520),
        (576, 128),
        (4096, 128),
        (8192, 8192),
    ]
    shapes += [(8208, 8208), (12, 4), (1, 1), (37, 37), (100, 7), (1283, 128), (64, 1), (64, 24)]
    # From scales that underflow float16 to ones that overflow it, with all mantissa bits in use.
    magnitude = torch.logspace(-9, 3, 3)[:, None]
    for columns, group_size in shapes:
        codes = torch.randint(0, 256, (3, columns), dtype=torch.uint8)
        codes[~decode(codes.view(fmt.dtype), fmt).isfinite()] = 0x35
        scale = magnitude * (1 + torch.rand(3, -(-columns // group_size)))
        expected = dequantize(codes.view(fmt.dtype), scale, fmt, (1, group_size), dtype)
        for shift in (0, 1) if columns < 1000 else (0,):
            actual = run(library, codes, scale, fmt, group_size, dtype, shift)
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("columns", [256, 255])
def test_every_finite_code(library: Library, fmt: Format, columns: int) -> None:
    codes = torch.arange(columns, dtype=torch.uint8)[None]
    values = decode(codes.view(fmt.dtype), fmt)
    actual = run(library, codes, torch.ones(1, 1), fmt, columns, torch.float32)
    assert torch.equal(actual[values.isfinite()], values[values.isfinite()])


def test_nothing_to_decode(library: Library) -> None:
    for rows, columns, groups in ((0, 16, 1), (3, 0, 0)):
        codes = torch.zeros(rows, columns, dtype=torch.uint8)
        scale = torch.ones(rows, groups)
        assert run(library, codes, scale, FORMATS["e4m3"], 16, torch.float16).numel() == 0
