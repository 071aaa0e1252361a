"""Append to the paged KV cache and gather from it, on the emulator.

Codes and values against the oracles, bit for bit; steps done together against the same one after
another. Caches are full of a poison that must stay where nothing is written.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.cuda import emulator
from tests.cuda.caches import (
    BF16,
    CODES,
    E3M4,
    E4M3,
    FP16,
    FP32,
    NAMES,
    assert_stored,
    bits_of,
    poisoned,
    scales_of,
    stored_of,
)
from tests.cuda.emulator import Order

# What is stored from what; what is gathered as what.
STORES = [(E4M3, BF16), (E4M3, FP16), (E4M3, FP32), (BF16, BF16), (FP16, BF16), (FP32, FP16)]
STORES += [(E3M4, BF16), (E3M4, FP32)]
GATHERS = [(E4M3, BF16), (E4M3, FP16), (E4M3, FP32), (BF16, BF16), (FP16, FP32), (FP32, FP16)]
GATHERS += [(E3M4, BF16), (E3M4, FP32)]

SOURCE = r"""
#include "kv_cache.cuh"

using namespace quantkit::cuda;
using quantkit::BFloat16;
using quantkit::E3M4;
using quantkit::E4M3;
using quantkit::Half;

namespace {

struct Start {
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 grid, int threads,
                  const Arguments&... arguments) const {
    emulator::launch(grid, threads, 0, kernel, arguments...);
  }
};

struct Sizes {
  int64_t tokens, heads, kv_heads, head_dim, slots, scales, key_stride, value_stride, aligned,
      rotary_dim, wide_norm;
};

template <class Cache, class T>
void run_append(const T* key, const T* value, uint8_t* keys, uint8_t* values, const float* k_scale,
                const float* v_scale, const int64_t* slots, const Sizes& sizes) {
  AppendCall<T> call{.key = key, .value = value, .slots = slots};
  call.key_stride = sizes.key_stride;
  call.value_stride = sizes.value_stride;
  call.keys = {keys, k_scale, sizes.scales > 1};
  call.values = {values, v_scale, sizes.scales > 1};
  call.slot_count = sizes.slots;
  call.tokens = sizes.tokens;
  call.heads = sizes.kv_heads;
  call.head_dim = sizes.head_dim;
  call.aligned = sizes.aligned;
  start_append<Cache>(call, Start());
}

template <class Cache, class T>
void run_rotated(const T* qkv, const void* q_norm, const void* k_norm,
              const T* cosine, const T* sine,
                 T* query, uint8_t* keys, uint8_t* values, const float* k_scale,
                 const float* v_scale, const int64_t* slots, float eps, const Sizes& sizes) {
  RotatedCall<T> call{.qkv = qkv, .q_norm = q_norm, .k_norm = k_norm, .cosine = cosine,
                      .sine = sine, .query = query};
  call.keys = {keys, k_scale, sizes.scales > 1};
  call.values = {values, v_scale, sizes.scales > 1};
  call.slots = slots;
  call.slot_count = sizes.slots;
  call.tokens = sizes.tokens;
  call.heads = sizes.heads;
  call.kv_heads = sizes.kv_heads;
  call.head_dim = sizes.head_dim;
  call.rotary_dim = sizes.rotary_dim;
  call.eps = eps;
  call.wide_q_norm = call.wide_k_norm = sizes.wide_norm;
  call.aligned = sizes.aligned;
  start_append_rotated<Cache>(call, Start());
}

// The ops of rows.cuh that append_rotated does too.
template <class T, class Weight>
void run_norm(const T* x, const Weight* weight, T* out, float eps, int64_t rows, int64_t columns) {
  RowCall<T> call{.x = x, .weight = weight, .out = out, .rows = rows, .columns = columns};
  call.eps = eps;
  call.aligned = is_aligned(call);
  start_process_rows<RowSource::kValues, true, false, Weight>(call, Start());
}
template <class T>
void run_rotary(const T* x, const T* cosine, const T* sine, T* out, const Sizes& sizes) {
  RotaryCall<T> call{.x = x, .cosine = cosine, .sine = sine, .out = out};
  call.x_stride = sizes.key_stride;
  call.heads = sizes.heads;
  call.head_dim = sizes.head_dim;
  call.rotary_dim = sizes.rotary_dim;
  call.aligned = is_aligned(call);
  start_rotate(call, sizes.tokens, Start());
}

template <class Cache, class T>
void run_gather(const uint8_t* cache, const float* scale, const int32_t* blocks, T* out,
                int64_t length, int64_t heads, int64_t head_dim, int64_t block_size,
                int64_t scales) {
  start_gather<Cache, T>({cache, scale, blocks, out, scales > 1, length, heads, head_dim,
                          block_size}, Start());
}

}  // namespace

#define STORE(name, Cache, T)                                                                     \
  extern "C" void append_##name(const T* key, const T* value, uint8_t* keys, uint8_t* values,     \
                                const float* k_scale, const float* v_scale, const int64_t* slots, \
                                const Sizes* sizes) {                                             \
    run_append<Cache>(key, value, keys, values, k_scale, v_scale, slots, *sizes);                 \
  }                                                                                               \
  extern "C" void rotated_##name(const T* qkv, const void* q_norm, const void* k_norm,            \
                                 const T* cosine,                                                 \
                                 const T* sine, T* query, uint8_t* keys, uint8_t* values,         \
                                 const float* k_scale, const float* v_scale,                      \
                                 const int64_t* slots, float eps, const Sizes* sizes) {           \
    run_rotated<Cache>(qkv, q_norm, k_norm, cosine, sine, query, keys, values, k_scale, v_scale,  \
                       slots, eps, *sizes);                                                       \
  }
#define GATHER(name, Cache, T)                                                                    \
  extern "C" void gather_##name(const uint8_t* cache, const float* scale, const int32_t* blocks,  \
                                T* out, int64_t length, int64_t heads, int64_t head_dim,          \
                                int64_t block_size, int64_t scales) {                             \
    run_gather<Cache>(cache, scale, blocks, out, length, heads, head_dim, block_size, scales);    \
  }
#define ROWS(T)                                                                                   \
  extern "C" void norm_##T(const T* x, const T* weight, T* out, float eps, int64_t rows,          \
                           int64_t columns) {                                                     \
    run_norm(x, weight, out, eps, rows, columns);                                                 \
  }                                                                                               \
  extern "C" void wide_norm_##T(const T* x, const float* weight, T* out, float eps, int64_t rows, \
                                int64_t columns) {                                                \
    run_norm(x, weight, out, eps, rows, columns);                                                 \
  }                                                                                               \
  extern "C" void rotary_##T(const T* x, const T* cosine, const T* sine, T* out,                  \
                             const Sizes* sizes) {                                                \
    run_rotary(x, cosine, sine, out, *sizes);                                                     \
  }
ROWS(BFloat16) ROWS(Half) ROWS(float)
"""


def _name(cache: torch.dtype, x: torch.dtype) -> str:
    return f"{NAMES[cache]}_{NAMES[x]}"


def _expand(macro: str, pairs: list[tuple[torch.dtype, torch.dtype]]) -> str:
    return " ".join(
        f"{macro}({_name(*pair)}, {NAMES[pair[0]]}, {NAMES[pair[1]]})" for pair in pairs
    )


LIBRARY = emulator.compile(SOURCE + _expand("STORE", STORES) + "\n" + _expand("GATHER", GATHERS))

EVERY_STORE = pytest.mark.parametrize(("cache", "dtype"), STORES, ids=lambda d: NAMES[d])


@dataclass(frozen=True)
class Sizes:
    """What the C++ above calls by this name."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    scales: int
    key_stride: int
    value_stride: int
    aligned: bool
    rotary_dim: int = 0
    wide_norm: bool = False

    def tensor(self) -> Tensor:
        return torch.tensor([int(number) for number in astuple(self)])


@EVERY_STORE
@pytest.mark.parametrize("head_dim", [1, 10, 64, 80, 264])
@pytest.mark.parametrize("scales", [1, 3])
def test_append(
    cache: torch.dtype, dtype: torch.dtype, head_dim: int, scales: int, order: Order
) -> None:
    """Rows that are part of wider ones; slots that do not exist are passed over."""
    tokens, heads, slots = 4, 3, [6, -1, 0, 9]
    key, value = (torch.randn(tokens, wide, head_dim).to(dtype) for wide in (heads, heads + 2))
    caches = [poisoned(9, heads, head_dim, cache) for _ in range(2)]
    k_scale, v_scale = scales_of(cache, scales), scales_of(cache, scales)
    sizes = Sizes(
        tokens, 0, heads, head_dim, 9, scales, key.stride(0), value.stride(0), head_dim % 8 == 0
    )
    LIBRARY.order = order
    LIBRARY.call(
        f"append_{_name(cache, dtype)}",
        *(key, value, *caches, k_scale, v_scale, torch.tensor(slots), sizes.tensor()),
    )
    assert_stored(caches[0], slots, key, k_scale)
    assert_stored(caches[1], slots, value[:, :heads], v_scale)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("cache", "dtype"), [pair for pair in STORES if pair[0] in CODES])
def test_append_encodes_every_kind_of_number(
    cache: torch.dtype, dtype: torch.dtype, aligned: bool
) -> None:
    """All exponents, subnormal codes, saturation, ties; NaN stays NaN."""
    key = (torch.randn(40, 3, 24) * torch.logspace(-6, 6, 40).view(-1, 1, 1)).to(dtype)
    key[7, 1, 3:5] = torch.tensor([torch.nan, -torch.inf])
    value = ((torch.arange(40 * 3 * 24).view(40, 3, 24) % 2048) * 2.0**-11 - 0.3).to(dtype)
    caches = [poisoned(40, 3, 24, cache) for _ in range(2)]
    scale = torch.tensor([1.0, 0.75, 2.0**-9])
    sizes = Sizes(40, 0, 3, 24, 40, 3, 72, 72, aligned)
    slots = torch.arange(40).flip(0)
    LIBRARY.call(
        f"append_{_name(cache, dtype)}", key, value, *caches, scale, scale, slots, sizes.tensor()
    )
    values = torch.from_numpy(reference.float8_values(CODES[cache]))
    for x, filled in ((key, caches[0]), (value, caches[1])):
        expected, stored = bits_of(stored_of(x, cache, scale)), bits_of(filled[slots])
        nan = values[expected.long()].isnan()
        assert nan.sum() == x.isnan().sum()
        assert torch.equal(stored[~nan], expected[~nan])
        assert values[stored[nan].long()].isnan().all()


@EVERY_STORE
@pytest.mark.parametrize("head_dim", [10, 64, 80, 100, 128, 256, 264, 512])
@pytest.mark.parametrize(("norm", "turn"), [(True, True), (False, True), (True, False)])
def test_rotary_append_is_its_steps_one_after_another(
    cache: torch.dtype, dtype: torch.dtype, head_dim: int, norm: bool, turn: bool, order: Order
) -> None:
    _check_rotary_append(cache, dtype, head_dim, norm, turn, order, head_dim)


@pytest.mark.parametrize(("cache", "dtype"), [(E4M3, BF16), (E3M4, BF16), (FP16, BF16)])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (80, 20), (100, 48), (264, 64)])
@pytest.mark.parametrize("wide_norm", [False, True])
def test_rotary_append_of_a_part_and_with_float32_norms(
    cache: torch.dtype,
    dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    wide_norm: bool,
    order: Order,
) -> None:
    _check_rotary_append(cache, dtype, head_dim, True, True, order, rotary_dim, wide_norm)


def _check_rotary_append(
    cache: torch.dtype,
    dtype: torch.dtype,
    head_dim: int,
    norm: bool,
    turn: bool,
    order: Order,
    rotary_dim: int,
    wide_norm: bool = False,
) -> None:
    tokens, heads, kv_heads, slots = 3, 4, 2, [6, -1, 0]
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    norm_type = FP32 if wide_norm else dtype
    q_norm, k_norm = torch.rand(2, head_dim).to(norm_type) + 0.5 if norm else (None, None)
    cos, sin = torch.randn(2, tokens, rotary_dim).to(dtype) if turn else (None, None)
    scales = scales_of(cache, kv_heads), scales_of(cache, 1)
    scales = (scales[0], None if scales[1] is None else scales[1].expand(kv_heads).contiguous())
    caches = [poisoned(7, kv_heads, head_dim, cache) for _ in range(2)]
    out = torch.full((tokens, heads, head_dim), torch.nan).to(dtype)
    aligned = head_dim % 16 == 0 and rotary_dim % 8 == 0
    sizes = Sizes(
        tokens, heads, kv_heads, head_dim, 7, kv_heads, 0, 0, aligned, rotary_dim, wide_norm
    )
    LIBRARY.order = order
    LIBRARY.call(
        f"rotated_{_name(cache, dtype)}",
        *(qkv, q_norm, k_norm, cos, sin, out, *caches, *scales, torch.tensor(slots), 1e-6),
        sizes.tensor(),
    )
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = _norm(query, q_norm), _norm(key, k_norm)
    if cos is not None and sin is not None:
        query, key = _rotary(query, cos, sin), _rotary(key, cos, sin)
    assert torch.equal(bits_of(out), bits_of(query))
    assert_stored(caches[0], slots, key, scales[0])
    assert_stored(caches[1], slots, value, scales[1])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
    rows = x.shape[0] * x.shape[1]
    wide = "" if weight.dtype == x.dtype else "wide_"
    LIBRARY.call(
        f"{wide}norm_{NAMES[x.dtype]}", x.contiguous(), weight, out, 1e-6, rows, x.shape[2]
    )
    return out


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By the kernel, which must be what torch gives, rounding every step."""
    x, out = x.contiguous(), torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
    sizes = Sizes(x.shape[0], x.shape[1], 0, x.shape[2], 0, 0, x.stride(0), 0, False, cos.shape[1])
    LIBRARY.call(f"rotary_{NAMES[x.dtype]}", x, cos, sin, out, sizes.tensor())
    first, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    a, b = first.chunk(2, dim=-1)
    turned = first * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)
    assert torch.equal(out, torch.cat((turned, rest), dim=-1))
    return out


@pytest.mark.parametrize(("cache", "dtype"), GATHERS, ids=lambda d: NAMES[d])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 10), (2, 64), (3, 80), (1, 1)])
@pytest.mark.parametrize(("length", "block_size"), [(1, 16), (33, 16), (32, 16), (9, 5), (200, 64)])
def test_gather(
    cache: torch.dtype, dtype: torch.dtype, heads: int, head_dim: int, length: int, block_size: int
) -> None:
    used = -(-length // block_size)
    blocks = torch.randperm(used + 2).int()[:used]
    stored = torch.randn(used + 2, block_size, heads, head_dim).mul(100)
    stored = stored_of(stored, E3M4, torch.full((1,), 30.0)) if cache == E3M4 else stored.to(cache)
    scale = scales_of(cache, heads)
    out = torch.full((length, heads, head_dim), torch.nan).to(dtype)
    LIBRARY.call(
        f"gather_{_name(cache, dtype)}",
        *(stored, scale, blocks, out, length, heads, head_dim, block_size, heads),
    )
    values = stored[blocks.long()].flatten(0, 1)[:length]
    if cache == E3M4:
        values = torch.from_numpy(reference.float8_values("e3m4"))[values.long()]
    values = values.float()
    expected = (values if scale is None else values * scale.view(-1, 1)).to(dtype)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("cache", CODES, ids=CODES.get)
def test_gather_decodes_every_code(cache: torch.dtype) -> None:
    """Also those of NaN and infinity, with and without the processor's conversions."""
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(1, 1, 256)
    block = torch.zeros(1, dtype=torch.int32)
    for sm80 in (False, True):
        library = emulator.compile(
            SOURCE + _expand("GATHER", [(E4M3, FP32), (E3M4, FP32)]), sm80=sm80
        )
        library.call(
            f"gather_{_name(cache, FP32)}", codes, torch.ones(1), block, out, 1, 1, 256, 1, 1
        )
        expected = reference.float8_values(CODES[cache])[codes]
        assert np.array_equal(out.flatten(), expected, equal_nan=True)
