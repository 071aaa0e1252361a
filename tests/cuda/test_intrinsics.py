"""The vocabulary of the CUDA kernels, as the emulator has it, and the emulator's own vigilance.

Decoding and encoding in both variants: by the processor's instructions (emulated from the formats'
definition) and by moving bits, which is the code that runs on processors without them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit import numerics
from tests import reference
from tests.cuda import emulator
from tests.cuda.emulator import EmulatorError, Library, Order

SOURCE = r"""
#include "intrinsics.cuh"

namespace quantkit::cuda {

template <class Format>
__global__ void decode(const uint8_t* codes, uint32_t* pairs, float* factor) {
  const int i = threadIdx.x;
  pairs[i] = Decode<Format>::pair(codes[2 * i] | codes[2 * i + 1] << 8 | 0xABCD0000u);
  *factor = Decode<Format>::kFactor;
}

template <class Format>
__global__ void decode_any(const uint8_t* codes, uint32_t* pairs, float* factor) {
  const Word2 quad = DecodeAny<Format>::quad(
      codes[4 * threadIdx.x] | codes[4 * threadIdx.x + 1] << 8 | codes[4 * threadIdx.x + 2] << 16 |
      static_cast<uint32_t>(codes[4 * threadIdx.x + 3]) << 24);
  pairs[2 * threadIdx.x] = quad.word[0];
  pairs[2 * threadIdx.x + 1] = quad.word[1];
  *factor = DecodeAny<Format>::kFactor;
}

template <class Format>
__global__ void encode(const float* x, uint16_t* pairs, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) pairs[i] = static_cast<uint16_t>(encode_pair<Format>(x[2 * i], x[2 * i + 1]));
}

template <class T>
__global__ void convert(const float* x, T* narrowed, uint32_t* packed, float* halves, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  narrowed[2 * i] = narrow<T>(x[2 * i]);
  narrowed[2 * i + 1] = narrow<T>(x[2 * i + 1]);
  packed[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
  halves[2 * i] = low_half<T>(packed[i]);
  halves[2 * i + 1] = high_half<T>(packed[i]);
}

template <class T>
__global__ void multiply(const T* a, const T* b, float* c) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const auto pair = [](T low, T high) { return low.bits | static_cast<uint32_t>(high.bits) << 16; };
  uint32_t left[4], right[2];
  for (int i = 0; i < 4; ++i) {
    const T* at = a + 16 * (g + 8 * (i % 2)) + 2 * t + 8 * (i / 2);
    left[i] = pair(at[0], at[1]);
  }
  for (int i = 0; i < 2; ++i) {
    const T* at = b + 8 * (2 * t + 8 * i) + g;
    right[i] = pair(at[0], at[8]);
  }
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = c[8 * (g + 8 * (i / 2)) + 2 * t + i % 2];
  multiply_tile<T>(sums, left, right);
  for (int i = 0; i < 4; ++i) c[8 * (g + 8 * (i / 2)) + 2 * t + i % 2] = sums[i];
}

__global__ void shuffle(int* out) {
  const int lane = threadIdx.x % 32;
  int* row = out + 12 * threadIdx.x;
  row[0] = __shfl_sync(kAllLanes, lane, 5);
  row[1] = __shfl_sync(kAllLanes, lane, lane + 3, 8);
  row[2] = __shfl_xor_sync(kAllLanes, lane, 12);
  row[3] = __shfl_down_sync(kAllLanes, lane, 3);
  row[4] = __shfl_up_sync(kAllLanes, lane, 3, 16);
  row[5] = __ballot_sync(kAllLanes, lane % 3 == 0);
  row[6] = __any_sync(kAllLanes, lane == 31);
  row[7] = __all_sync(kAllLanes, lane < 31);
  row[8] = static_cast<int>(warp_sum(lane));
  row[9] = static_cast<int>(warp_max(-lane));
  row[10] = 0;
  // Two halves of a warp that do different things, each with its own lanes.
  row[11] = lane < 16 ? __shfl_sync(0xFFFFu, lane, 7) : __shfl_xor_sync(0xFFFF0000u, lane, 1);
}

__global__ void sum_block(const float* x, float* out, int64_t missing_barrier) {
  __shared__ float parts[4];
  float sum = warp_sum(x[blockIdx.x * blockDim.x + threadIdx.x]);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  if (!missing_barrier) __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = parts[0] + parts[1] + parts[2] + parts[3];
}

__global__ void reverse(float* x, int64_t beyond) {
  QK_DYNAMIC_SHARED(float, row);
  row[threadIdx.x + beyond] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = row[blockDim.x - 1 - threadIdx.x];
}

__global__ void count(int* counter, float* total, int* top) {
  atomicAdd(counter, 1);
  atomicAdd(total, 0.5f);
  atomicMax(top, static_cast<int>(threadIdx.x * (blockIdx.x + 1)));
}

__global__ void wrong(int64_t what, const float* x, float* out) {
  __shared__ float row[32];
  float* const shared = row;
  const int i = threadIdx.x;
  switch (what) {
    case 0: out[i + 1] = 0; break;
    case 1: out[i] = x[i - 1]; break;
    case 2: out[0] = load_once16(x + i).word[0]; break;
    case 3: if (i < 40) __syncthreads(); break;
    case 4: if (i == 3) return; warp_sum(1.0f); break;
    case 5: if (i < 5) __syncwarp(); else __ballot_sync(kAllLanes, 1); break;
    case 6: if (i < 32) __syncthreads(); else __syncthreads_or(1); break;
    case 7: shared[i] = 1; break;
    case 8: row[i] = 1; break;
    case 9: out[i] = __shfl_sync(i % 32 < 8 ? 0xFFu : 0xFFFFFF00u, 1.0f, 8); break;
    case 10: out[0] = reinterpret_cast<const Word4*>(x + 1)->word[0]; break;
    case 11: *static_cast<volatile float*>(nullptr) = 1; break;
  }
}

}  // namespace quantkit::cuda

using namespace quantkit;
using namespace quantkit::cuda;

#define DECODE(name, Format)                                                      \
  extern "C" void name(const uint8_t* codes, uint32_t* pairs, float* factor) {    \
    emulator::launch(1, 128, 0, decode<Format>, codes, pairs, factor);            \
  }
DECODE(decode_e4m3, E4M3)
DECODE(decode_e5m2, E5M2)
DECODE(decode_e3m4, E3M4)

#define DECODE_AND_ENCODE(name, Format)                                              \
  extern "C" void decode_any_##name(const uint8_t* codes, uint32_t* pairs, float* factor) { \
    emulator::launch(1, 64, 0, decode_any<Format>, codes, pairs, factor);            \
  }                                                                                  \
  extern "C" void encode_##name(const float* x, uint16_t* pairs, int64_t count) {    \
    emulator::launch((count + 255) / 256, 256, 0, encode<Format>, x, pairs, count);  \
  }
DECODE_AND_ENCODE(e4m3, E4M3)
DECODE_AND_ENCODE(e3m4, E3M4)

#define BY_TYPE(name, T)                                                                      \
  extern "C" void convert_##name(const float* x, T* narrowed, uint32_t* packed, float* halves, \
                                 int64_t n) {                                                 \
    emulator::launch((n + 255) / 256, 256, 0, convert<T>, x, narrowed, packed, halves, n);    \
  }                                                                                           \
  extern "C" void multiply_##name(const T* a, const T* b, float* c) {                         \
    emulator::launch(1, 32, 0, multiply<T>, a, b, c);                                         \
  }
BY_TYPE(bfloat16, BFloat16)
BY_TYPE(float16, Half)

extern "C" void shuffle_(int* out) { emulator::launch(1, 64, 0, shuffle, out); }
extern "C" void sum_block_(const float* x, float* out, int64_t missing_barrier) {
  emulator::launch(3, 128, 0, sum_block, x, out, missing_barrier);
}
extern "C" void reverse_(float* x, int64_t beyond) {
  emulator::launch(1, 128, 128 * 4, reverse, x, beyond);
}
extern "C" void count_(int* counter, float* total, int* top) {
  emulator::launch(dim3(2, 3, 4), dim3(8, 4, 2), 0, count, counter, total, top);
}
extern "C" void wrong_(int64_t what, const float* x, float* out) {
  emulator::launch(1, 64, 0, wrong, what, x, out);
}
extern "C" void too_large(int64_t threads, int64_t shared) {
  emulator::launch(1, threads, shared, wrong, 100, nullptr, nullptr);
}
"""

FORMATS = ("e4m3", "e5m2", "e3m4")
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def library() -> Library:
    return emulator.compile(SOURCE)


@pytest.fixture(scope="module", params=[False, True], ids=["converts", "bits"])
def variant(request: pytest.FixtureRequest, library: Library) -> Library:
    """With the processor's FP8 conversions and without."""
    return emulator.compile(SOURCE, sm80=True) if request.param else library


def edge_values() -> Tensor:
    """Every float16, and float32 around everything that an 8- or 16-bit float can round at."""
    half = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    tiny = torch.tensor([2.0**-149, 2.0**-126, 2.0**-10, 2.0**-25, 65519.996, 3.4e38, torch.inf])
    values = torch.cat([half, half * 1.0001, half * 0.9999, half * 2**-12, tiny, -tiny])
    bits = values.view(torch.int32)
    return torch.cat([values, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])


@pytest.mark.parametrize("name", FORMATS)
def test_all_codes_decode(variant: Library, name: str) -> None:
    fmt = numerics.FORMATS[name]
    codes = torch.arange(256).to(torch.uint8)
    pairs, factor = torch.zeros(256, dtype=torch.float16), np.zeros(1, np.float32)
    variant.call(f"decode_{name}", codes, pairs, factor)
    expected = numerics.decode(codes.view(fmt.dtype), fmt)
    finite = expected.isfinite()
    torch.testing.assert_close(
        (pairs.float() * factor.item())[finite], expected[finite], rtol=0, atol=0
    )
    assert torch.equal(pairs[finite].signbit(), expected[finite].signbit())


@pytest.mark.parametrize("name", ["e4m3", "e3m4"])
def test_all_codes_decode_with_nan_and_infinity(variant: Library, name: str) -> None:
    codes = torch.arange(256).to(torch.uint8)
    pairs, factor = torch.zeros(256, dtype=torch.float16), np.zeros(1, np.float32)
    variant.call(f"decode_any_{name}", codes, pairs, factor)
    expected = torch.from_numpy(reference.float8_values(name)).float()
    torch.testing.assert_close(
        pairs.float() * factor.item(), expected, rtol=0, atol=0, equal_nan=True
    )


def test_the_variants_differ() -> None:
    factors = []
    for sm80 in (False, True):
        codes, pairs, factor = np.zeros(256, np.uint8), np.zeros(128, np.uint32), np.zeros(1, "f4")
        emulator.compile(SOURCE, sm80=sm80).decode_e4m3(codes, pairs, factor)
        factors.append(factor.item())
    assert factors == [1.0, 256.0]


@pytest.mark.parametrize(("name", "nan_code"), [("e4m3", 0x7F), ("e3m4", 0x78)])
def test_encoding(variant: Library, name: str, nan_code: int) -> None:
    x = edge_values()
    codes = torch.zeros(x.numel(), dtype=torch.uint8)
    variant.call(f"encode_{name}", x, codes, x.numel() // 2)
    expected = numerics.encode(x, numerics.FORMATS[name]).view(torch.uint8)
    nan = x.isnan()
    assert torch.equal(codes[~nan], expected[~nan])
    assert torch.equal(codes[nan] & 0x7F, torch.full_like(codes[nan], nan_code))


@pytest.mark.parametrize("name", FLOATS)
def test_conversions(library: Library, name: str) -> None:
    x = edge_values()
    narrowed = torch.zeros(x.numel(), dtype=FLOATS[name])
    packed, halves = torch.zeros_like(narrowed), torch.zeros_like(x)
    library.call(f"convert_{name}", x, narrowed, packed, halves, x.numel() // 2)
    expected = x.to(FLOATS[name])
    number = ~x.isnan()
    for result in (narrowed, packed):
        assert torch.equal(result[number].view(torch.int16), expected[number].view(torch.int16))
        assert result[~number].isnan().all()
    torch.testing.assert_close(halves, expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FLOATS)
def test_layout_of_the_matrix_instruction(library: Library, name: str, order: Order) -> None:
    library.order = order
    # Integers: all sums are exact, in any order.
    a, b = torch.randint(-8, 9, (16, 16)), torch.randint(-8, 9, (16, 8))
    c = torch.randint(-8, 9, (16, 8)).float()
    expected = c + (a @ b).float()
    library.call(f"multiply_{name}", a.to(FLOATS[name]), b.to(FLOATS[name]), c)
    assert torch.equal(c, expected)


def test_sums_of_the_matrix_instruction(library: Library) -> None:
    a, b, c = torch.randn(16, 16).half(), torch.randn(16, 8).half(), torch.randn(16, 8)
    expected = c.double() + a.double() @ b.double()
    library.multiply_float16(a, b, c)
    torch.testing.assert_close(c.double(), expected, rtol=0, atol=2e-6)


def test_shuffles_and_votes(library: Library, order: Order) -> None:
    library.order = order
    out = np.zeros((64, 12), np.int32)
    library.shuffle_(out)
    lane = np.arange(64) % 32
    every_third = sum(1 << i for i in range(0, 32, 3))
    expected = [
        np.full(64, 5),
        lane // 8 * 8 + (lane + 3) % 8,
        lane ^ 12,
        np.where(lane + 3 < 32, lane + 3, lane),
        np.where(lane % 16 >= 3, lane - 3, lane),
        np.full(64, every_third, np.uint32).astype(np.int32),
        np.full(64, 1),
        np.full(64, 0),
        np.full(64, 31 * 16),
        np.full(64, 0),
        np.full(64, 0),
        np.where(lane < 16, 7, lane ^ 1),
    ]
    np.testing.assert_array_equal(out, np.stack(expected, axis=1))


def test_barriers_and_shared_memory(library: Library, order: Order) -> None:
    library.order = order
    x, out = np.arange(384, dtype=np.float32).reshape(3, 128), np.zeros((3, 128), np.float32)
    library.sum_block_(x, out, 0)
    np.testing.assert_array_equal(out, np.repeat(x.sum(1, keepdims=True), 128, axis=1))
    row = np.arange(128, dtype=np.float32)
    library.reverse_(row, 0)
    np.testing.assert_array_equal(row, np.arange(127, -1, -1))


def test_a_missing_barrier_shows(library: Library) -> None:
    x, out = np.ones((3, 128), np.float32), np.zeros((3, 128), np.float32)
    library.sum_block_(x, out, 1)
    assert np.isnan(out).any()  # shared memory that nobody wrote yet in this block


def test_atomics_and_grids(library: Library, order: Order) -> None:
    library.order = order
    counter, total, top = np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    library.count_(counter, total, top)
    assert (counter.item(), total.item(), top.item()) == (24 * 64, 12 * 64, 14)


MISTAKES = {
    0: "heap-buffer-overflow",  # a store behind the end
    1: "heap-buffer-overflow",  # a load before the beginning
    2: "a load of 16 bytes from .*not a multiple",
    3: "divergence.*\n.*threads 0 to 39 wait in __syncthreads.*\n.*40 to 63 have left",
    4: "divergence.*left",
    5: "lanes of one warp in different operations",
    6: "different barriers",
    7: "global-buffer-overflow",
    8: r"index \d+ out of bounds",
    9: "reads a lane outside of the mask",
    10: "misaligned address",
    11: "SEGV|null pointer",
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_caught(library: Library, what: int, order: Order) -> None:
    library.order = order
    with pytest.raises(EmulatorError, match=MISTAKES[what]):
        library.wrong_(what, np.zeros(68, np.float32), np.zeros(64, np.float32))


def test_overrun_of_dynamic_shared_memory(library: Library) -> None:
    with pytest.raises(EmulatorError, match="heap-buffer-overflow"):
        library.reverse_(np.zeros(128, np.float32), 1)


@pytest.mark.parametrize(("threads", "shared"), [(1056, 0), (0, 0), (32, 228 * 1024)])
def test_launches_beyond_the_limits(library: Library, threads: int, shared: int) -> None:
    with pytest.raises(EmulatorError, match=r"a block of|bytes of shared memory"):
        library.too_large(threads, shared)


def test_without_checks_results_are_the_same(order: Order) -> None:
    fast = emulator.compile(SOURCE, sanitize=False)
    fast.order = order
    x = np.arange(384, dtype=np.float32).reshape(3, 128)
    out = np.zeros((3, 128), np.float32)
    fast.sum_block_(x, out, 0)
    np.testing.assert_array_equal(out, np.repeat(x.sum(1, keepdims=True), 128, axis=1))


def test_arrays_must_be_contiguous(library: Library) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        library.reverse_(np.zeros((128, 2), np.float32)[:, 0], 0)
    with pytest.raises(ValueError, match="contiguous"):
        library.reverse_(torch.zeros(128, 2)[:, 0], 0)
