"""The kernel of q, k and v with rotation and append, on the emulator.

Its linear part against float64, by way of the plain kernel, whose bits it must have; what follows
against torch and the cache's oracle, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import pytest
import torch
from torch import Tensor

from quantkit.numerics import E4M3, FORMATS, Format
from tests.cuda import caches, emulator
from tests.cuda.caches import BF16, FP16, FP32, NAMES, assert_stored, bits_of
from tests.cuda.emulator import Library, Order
from tests.cuda.test_weight_linear import TYPES, Layer, assert_close

SOURCE = r"""
#include "qkv_linear_dispatch.h"

using namespace quantkit;
using namespace quantkit::cuda;

namespace {

struct Sizes {
  int64_t tokens, columns, heads, kv_heads, head_dim, rotary_dim, groups, group_size, slots, scales,
      stored, bias_type, wide;
};

constexpr auto start = [](auto* kernel, dim3 grid, int threads, const auto& call) {
  emulator::launch(grid, threads, 0, kernel, call);
};

template <class Format, class T>
LinearCall linear_call(const T* x, const uint8_t* codes, const float* scale, const void* bias,
                       T* out, const Sizes& sizes) {
  return {.x = x, .codes = codes, .scale = scale, .bias = bias, .out = out, .tokens = sizes.tokens,
          .columns = sizes.columns,
          .features = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, .groups = sizes.groups,
          .group_size = sizes.group_size, .bias_type = static_cast<FloatType>(sizes.bias_type)};
}

// Everything that the product chooses from; `wide`: what it does for more than kNarrow features.
struct Chosen {
  template <class Format, class T>
  static void fused(const QkvCall& call, bool wide) {
    if (!fits_qkv_linear(call)) return;
    if (wide) return launch_qkv<Format, T, 8, false>(call, start);
    dispatch_qkv_linear<Format, T>(call, start);
  }
  template <class Format, class T>
  static void plain(const LinearCall& call, bool wide) {
    if (wide) return launch_by_tokens<Format, T, 8, false, false>(call, start);
    dispatch_weight_linear<Format, T>(call, false, start);
  }
};

// One kernel of each.
struct Few {
  template <class Format, class T>
  static void fused(const QkvCall& call, bool) {
    launch_qkv<Format, T, 8, false>(call, start);
  }
  template <class Format, class T>
  static void plain(const LinearCall& call, bool) {
    launch_shape<Format, T, FewTokens<8, false, false>, false, false>(call, start);
  }
};

}  // namespace

#define QKV(name, Kernels, Format, T)                                                             \
  extern "C" void qkv_##name(const T* x, const uint8_t* codes, const float* scale,                \
                             const void* bias, const T* cosine, const T* sine, T* query,          \
                             uint8_t* keys, uint8_t* values, const float* k_scale,                \
                             const float* v_scale, const int64_t* slots, const Sizes* sizes) {    \
    QkvCall call{.linear = linear_call<Format>(x, codes, scale, bias, query, *sizes),             \
                 .cosine = cosine, .sine = sine, .slots = slots, .slot_count = sizes->slots};     \
    call.keys = {keys, k_scale, sizes->scales > 1};                                               \
    call.values = {values, v_scale, sizes->scales > 1};                                           \
    call.heads = sizes->heads;                                                                    \
    call.kv_heads = sizes->kv_heads;                                                              \
    call.head_dim = sizes->head_dim;                                                              \
    call.rotary_dim = sizes->rotary_dim;                                                          \
    call.stored = static_cast<WeightFormat>(sizes->stored);                                       \
    Kernels::fused<Format, T>(call, sizes->wide);                                                 \
  }                                                                                               \
  extern "C" void plain_##name(const T* x, const uint8_t* codes, const float* scale,              \
                               const void* bias, T* out, const Sizes* sizes) {                    \
    Kernels::plain<Format, T>(linear_call<Format>(x, codes, scale, bias, out, *sizes),            \
                              sizes->wide);                                                       \
  }
"""
ALL_KERNELS = SOURCE + "QKV(e4m3_BFloat16, Chosen, E4M3, BFloat16)"
ALL_TYPES = (
    SOURCE
    + r"""
QKV(e4m3_BFloat16, Few, E4M3, BFloat16)
QKV(e4m3_Half, Few, E4M3, Half)
QKV(e5m2_BFloat16, Few, E5M2, BFloat16)
QKV(e5m2_Half, Few, E5M2, Half)
QKV(e3m4_BFloat16, Few, E3M4, BFloat16)
QKV(e3m4_Half, Few, E3M4, Half)
"""
)
# In the order of enum WeightFormat.
STORED = [caches.E4M3, torch.float8_e5m2, caches.E3M4, FP32, BF16, FP16]
CACHES = [caches.E4M3, caches.E3M4, BF16, FP16, FP32]


@dataclass(frozen=True)
class Sizes:
    """What the C++ above calls by this name."""

    tokens: int = 3
    columns: int = 144
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    groups: int = 1
    group_size: int = 144
    slots: int = 9
    scales: int = 1
    stored: int = 0
    bias_type: int = 0
    wide: bool = False

    def tensor(self) -> Tensor:
        return torch.tensor([int(number) for number in astuple(self)])

    @property
    def all_heads(self) -> int:
        return self.heads + 2 * self.kv_heads


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    """Return the kernels of one format and type, with sanitizers."""
    compiled = emulator.compile(ALL_KERNELS)
    yield compiled
    compiled.close()


@pytest.fixture(scope="module", params=[False, True], ids=["sm89", "sm80"])
def every_type(request: pytest.FixtureRequest) -> Iterator[Library]:
    compiled = emulator.compile(ALL_TYPES, sanitize=False, sm80=request.param)
    yield compiled
    compiled.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(
    library: Library,
    sizes: Sizes,
    layer: Layer,
    dtype: torch.dtype = BF16,
    bias: Tensor | None = None,
    stored: torch.dtype = caches.E4M3,
) -> None:
    """Compare one call with the plain kernel and what torch does afterwards."""
    sizes = replace(
        sizes,
        groups=layer.scale.shape[1],
        group_size=layer.group_size,
        stored=STORED.index(stored),
        bias_type=TYPES[FP32 if bias is None else bias.dtype],
    )
    name = f"{layer.fmt.name}_{NAMES[dtype]}"
    weights = (layer.codes, layer.scale, bias)
    x = torch.randn(sizes.tokens, sizes.columns).to(dtype)
    qkv = torch.full((sizes.tokens, sizes.all_heads, sizes.head_dim), torch.nan).to(dtype)
    library.call(f"plain_{name}", x, *weights, qkv, sizes.tensor())
    assert_close(qkv.flatten(1), *layer.oracle(x, bias))

    angles = torch.randn(2, sizes.tokens, sizes.rotary_dim).to(dtype)
    cos, sin = angles if sizes.rotary_dim else (None, None)
    query = torch.full((sizes.tokens, sizes.heads, sizes.head_dim), torch.nan).to(dtype)
    kept = [caches.poisoned(sizes.slots, sizes.kv_heads, sizes.head_dim, stored) for _ in range(2)]
    scales = [caches.scales_of(stored, sizes.scales) for _ in range(2)]
    slots = [6, -1, 0, sizes.slots, 3, 5, 1, 8][: sizes.tokens]
    library.call(
        f"qkv_{name}",
        *(x, *weights, cos, sin, query, *kept, *scales, torch.tensor(slots), sizes.tensor()),
    )
    expected, key, value = qkv.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
    if cos is not None and sin is not None:
        expected, key = rotated(expected, cos, sin), rotated(key, cos, sin)
    assert torch.equal(bits_of(query), bits_of(expected))
    for cache, rows, scale in zip(kept, (key, value), scales, strict=True):
        wide = None if scale is None else scale.expand(sizes.kv_heads)
        assert_stored(cache, slots, rows, wide)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first elements of every head, every step rounded to their dtype."""
    first, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    a, b = first.chunk(2, dim=-1)
    turned = first * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)
    return torch.cat((turned, rest), dim=-1)


def random_layer(sizes: Sizes, fmt: Format = E4M3, group_size: int | None = None) -> Layer:
    return Layer.random(sizes.all_heads * sizes.head_dim, sizes.columns, fmt, group_size)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (64, 32), (64, 16), (64, 0), (128, 128), (80, 80), (80, 32), (16, 16), (256, 64)],
)
@pytest.mark.parametrize("wide", [False, True])
def test_every_way_that_heads_turn(
    library: Library, head_dim: int, rotary_dim: int, wide: bool, order: Order
) -> None:
    """All of a head, its first elements, or none; tiles of pairs, and tiles of neighbours."""
    library.order = order
    sizes = Sizes(heads=3, kv_heads=1, head_dim=head_dim, rotary_dim=rotary_dim, wide=wide)
    check(library, sizes, random_layer(sizes))


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("wide", [False, True])
def test_every_number_of_tokens(library: Library, tokens: int, wide: bool) -> None:
    sizes = Sizes(tokens=tokens, wide=wide)
    check(library, sizes, random_layer(sizes))


@pytest.mark.parametrize("columns", [16, 64, 80, 128, 1040])
@pytest.mark.parametrize("wide", [False, True])
def test_every_edge_of_columns(library: Library, columns: int, wide: bool) -> None:
    sizes = Sizes(columns=columns, heads=1, kv_heads=1, wide=wide)
    check(library, sizes, random_layer(sizes))


@pytest.mark.parametrize("bias", [FP32, BF16, FP16])
@pytest.mark.parametrize("scales", [1, 2])
@pytest.mark.parametrize("stored", CACHES, ids=NAMES.get)
def test_every_cache(library: Library, stored: torch.dtype, scales: int, bias: torch.dtype) -> None:
    sizes = Sizes(scales=scales)
    layer = random_layer(sizes)
    check(library, sizes, layer, bias=layer.bias.to(bias), stored=stored)


@pytest.mark.parametrize(("columns", "group_size"), [(144, 128), (1040, 64), (2048, 512)])
def test_groups_of_columns(library: Library, columns: int, group_size: int) -> None:
    sizes = Sizes(columns=columns)
    check(library, sizes, random_layer(sizes, group_size=group_size))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=NAMES.get)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_and_type(every_type: Library, fmt: str, dtype: torch.dtype) -> None:
    sizes = Sizes(columns=1104, scales=2)
    layer = random_layer(sizes, FORMATS[fmt])
    for stored in CACHES:
        check(every_type, sizes, layer, dtype, layer.bias, stored)


@pytest.mark.parametrize(
    "odd", [{"tokens": 9}, {"head_dim": 24, "rotary_dim": 16}, {"rotary_dim": 24}, {"columns": 40}]
)
def test_what_it_cannot_do_is_left_to_others(library: Library, odd: dict[str, int]) -> None:
    """Nothing is launched: whoever calls asks first."""
    sizes = replace(Sizes(group_size=40 if "columns" in odd else 144), **odd)
    layer = random_layer(sizes)
    query = torch.zeros(sizes.tokens, sizes.heads, sizes.head_dim).to(BF16)
    kept = torch.zeros(2, sizes.slots, sizes.kv_heads, sizes.head_dim, dtype=torch.uint8)
    x, angles = torch.randn(sizes.tokens, sizes.columns).to(BF16), torch.ones(9, 64).to(BF16)
    one, slots = torch.ones(1), torch.zeros(9, dtype=torch.int64)
    sizes = replace(sizes, stored=STORED.index(caches.E4M3))
    weights = (layer.codes, layer.scale, None)
    library.call(
        "qkv_e4m3_BFloat16",
        *(x, *weights, angles, angles, query, kept[0], kept[1], one, one, slots, sizes.tensor()),
    )
    assert not query.any()
    assert not kept.any()
