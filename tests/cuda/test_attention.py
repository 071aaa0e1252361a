"""Attention over the paged cache, on the emulator: against the oracle and bit for bit with itself.

A tile has up to 8, 16 or 24 rows; a chunk is 256 keys, in steps of 16 or 32 that 4 warps share.
Blocks are in random order, and all memory that holds nothing is NaN, tables' entries -1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.cuda import emulator
from tests.cuda.emulator import Library, Order

CHUNK = 256
E4M3 = torch.float8_e4m3fn
E3M4 = torch.uint8  # its codes
CODES = {E4M3: "e4m3", E3M4: "e3m4"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SOFTMAX_SCALE = 0.125
LOG2_E = math.log2(math.e)
# Half the distance between neighbours, relative to the number: the cost of one rounding.
UNIT = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}

SOURCE = r"""
#include "attention.cuh"
#include "attention_fold.cuh"
#include "attention_plain.cuh"
#include "attention_plan.h"

namespace quantkit::cuda {

struct Numbers {
  int64_t tokens, sequences, kv_heads, group, head_dim, block_size, width, window, type, cache,
      scales, query_stride, processors, rows;
};

struct Inputs {
  AttentionCall call;
  AttentionSize size;
};

// As attention.cu does it, with fresh and poisoned memory for partial results.
template <class Shape>
void run(Inputs in) {
  const AttentionPlan plan = plan_attention(in.size, Shape::kRows, Shape::kChunk);
  plan.apply(in.call);
  const int64_t rows = in.size.tokens * in.size.kv_heads * in.size.group;
  const int64_t partials = plan.chunk_blocks > 1 ? rows * plan.chunks : 0;
  in.call.sums = new float[partials * Shape::kHeadDim];
  in.call.weights = new float[2 * partials];
  std::memset(in.call.sums, 0xFF, partials * Shape::kHeadDim * sizeof(float));
  std::memset(in.call.weights, 0xFF, 2 * partials * sizeof(float));
  emulator::launch(dim3(plan.blocks, plan.chunk_blocks), Shape::kThreads, Shape::kSharedBytes,
                   attend<Shape>, in.call);
  if (plan.chunk_blocks > 1) {
    emulator::launch(dim3(rows), kWarp, 0, fold_chunks<16>, in.call, Shape::kChunk,
                     Shape::kHeadDim);
  }
  delete[] in.call.sums;
  delete[] in.call.weights;
}

template <class Cache>
void run_plain(Inputs in) {
  const dim3 grid(in.size.tokens * in.size.kv_heads * in.size.group);
  const int head_dim = in.size.head_dim;
  auto* kernel = head_dim <= 128 ? &attend_plain<Cache, 4> : &attend_plain<Cache, 16>;
  emulator::launch(grid, kPlainThreads, 0, kernel, in.call, head_dim);
}

struct Kernel {
  WeightFormat cache;
  int64_t head_dim, rows;
  void (*run)(Inputs);
};

template <class Cache, int head_dim, int row_tiles, int key_tiles = 1, bool shared_query = false>
Kernel tiled(WeightFormat cache) {
  using Shape = AttentionShape<Cache, head_dim, row_tiles, key_tiles, 4, 256, 1, shared_query>;
  return {cache, head_dim, Shape::kRows, &run<Shape>};
}

const Kernel kernels[] = {KERNELS};

}  // namespace quantkit::cuda

using namespace quantkit::cuda;

extern "C" void attention(const void* query, void* out, const uint8_t* keys, const uint8_t* values,
                          const float* k_scale, const float* v_scale, const int32_t* tables,
                          const int32_t* lengths, const int32_t* starts, float scale, float cap,
                          const Numbers* n) {
  Inputs in{};
  in.size = {n->tokens, n->sequences, n->kv_heads, n->group, n->head_dim,
             n->width * n->block_size, n->window, n->processors};
  in.call = {.query = query, .out = out, .keys = keys, .values = values, .k_scale = k_scale,
             .v_scale = v_scale, .tables = tables, .lengths = lengths, .starts = starts};
  in.call.query_stride = n->query_stride;
  in.call.table_width = n->width;
  in.call.scale = scale;
  in.call.cap = cap;
  in.call.e3m4 = n->cache == static_cast<int64_t>(quantkit::WeightFormat::kE3M4);
  in.call.type = static_cast<quantkit::FloatType>(n->type);
  in.call.k_scale_stride = in.call.v_scale_stride = n->scales > 1;
  in.call.sequences = n->sequences;
  in.call.kv_heads = n->kv_heads;
  in.call.group = n->group;
  in.call.block_size = n->block_size;
  in.call.block_shift = shift_of(n->block_size);
  in.call.window = n->window;
  for (const Kernel& kernel : kernels) {
    const bool fits = kernel.rows == n->rows && (n->rows == 0 || kernel.head_dim == n->head_dim);
    if (fits && static_cast<int64_t>(kernel.cache) == n->cache) return kernel.run(in);
  }
  emulator::stop("no such kernel");
}
"""
ALL_KERNELS = """
    {WeightFormat::kE4M3, 0, 0, &run_plain<E4M3>},
    {WeightFormat::kE3M4, 0, 0, &run_plain<E3M4>},
    tiled<E3M4, 64, 1>(WeightFormat::kE3M4),
    tiled<E3M4, 80, 3, 2, true>(WeightFormat::kE3M4),
    {WeightFormat::kFloat32, 0, 0, &run_plain<float>},
    {WeightFormat::kBFloat16, 0, 0, &run_plain<BFloat16>},
    {WeightFormat::kFloat16, 0, 0, &run_plain<Half>},
    tiled<E4M3, 64, 1>(WeightFormat::kE4M3),
    tiled<E4M3, 64, 2>(WeightFormat::kE4M3),
    tiled<E4M3, 80, 3, 2, true>(WeightFormat::kE4M3),
    tiled<E4M3, 128, 1>(WeightFormat::kE4M3),
    tiled<E4M3, 256, 1>(WeightFormat::kE4M3),
    tiled<BFloat16, 64, 2>(WeightFormat::kBFloat16),
    tiled<Half, 96, 1>(WeightFormat::kFloat16),
"""
LIBRARY = emulator.compile(SOURCE.replace("KERNELS", ALL_KERNELS))
# WeightFormat's numbers, FloatType's numbers.
CACHES = {E4M3: 0, E3M4: 2, FP32: 3, BF16: 4, FP16: 5}
QUERIES = {FP32: 0, BF16: 1, FP16: 2}


@dataclass(frozen=True)
class Batch:
    """Sequences in one cache, with as many queries each as `new` says."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    tables: Tensor
    lengths: list[int]
    new: list[int]
    query: Tensor
    window: int = 0
    softcap: float = 0.0  # 0: none
    rows: int = 8  # of a tile; 0: the plain kernel
    processors: int = 132
    library: Library = LIBRARY

    @classmethod
    def random(
        cls,
        lengths: list[int],
        new: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int = 64,
        *,
        dtype: torch.dtype = BF16,
        cache: torch.dtype = E4M3,
        block: int = 16,
        scales: int = 1,
        **rest: Any,
    ) -> Batch:
        width = -(-max(lengths) // block)
        tables = torch.randperm(len(lengths) * width).int().view(len(lengths), width)
        shape = (len(lengths) * width, block, kv_heads, head_dim)
        k, v = torch.randn(shape), torch.randn(shape)
        k_scale = v_scale = None
        if cache in CODES:
            least = {E4M3: 0.01, E3M4: 0.2}[cache]
            k_scale, v_scale = (torch.rand(2, scales) * 2 + 1) * least
            k, v = k / (2 * least), v / (2 * least)
        for number, length in enumerate(lengths):
            used = -(-length // block)
            for x in (k, v):
                x[tables[number, used:].long()] = torch.nan
                if length % block:
                    x[int(tables[number, used - 1]), length % block :] = torch.nan
            tables[number, used:] = -1
        query = torch.randn(sum(new), heads, head_dim).to(dtype)
        k, v = (_stored(x, cache) for x in (k, v))
        return cls(k, v, k_scale, v_scale, tables, lengths, new, query, **rest)

    def run(self, order: Order = Order.ASCENDING) -> Tensor:
        out = torch.full_like(self.query, torch.nan, memory_format=torch.contiguous_format)
        starts = torch.tensor([0, *np.cumsum(self.new)], dtype=torch.int32)
        self.library.order = order
        self.library.attention(
            self._query_memory(),
            out,
            self.k,
            self.v,
            self.k_scale,
            self.v_scale,
            self.tables.contiguous(),
            torch.tensor(self.lengths, dtype=torch.int32),
            starts,
            (2 * SOFTMAX_SCALE / self.softcap if self.softcap else SOFTMAX_SCALE) * LOG2_E,
            self.softcap * LOG2_E,
            self._numbers(),
        )
        return out

    def _query_memory(self) -> Tensor:
        """The tensor that `query` is the first heads of."""
        base = self.query._base
        return self.query if base is None or self.query.is_contiguous() else base

    def _numbers(self) -> Tensor:
        tokens, heads, head_dim = self.query.shape
        _, block_size, kv_heads, _ = self.k.shape
        sizes = [tokens, len(self.new), kv_heads, heads // kv_heads, head_dim, block_size]
        types = [QUERIES[self.query.dtype], CACHES[self.k.dtype]]
        scales = 0 if self.k_scale is None else self.k_scale.numel()
        rest = [scales, self.query.stride(0), self.processors, self.rows]
        return torch.tensor([*sizes, self.tables.shape[1], self.window, *types, *rest])

    def only(self, sequence: int, first: int, count: int) -> Batch:
        """Some adjacent queries of one sequence, the cache ending where the last of them stands."""
        length = self.lengths[sequence] - self.new[sequence] + first + count
        row = sum(self.new[:sequence]) + first
        return replace(
            self,
            tables=self.tables[sequence : sequence + 1],
            lengths=[length],
            new=[count],
            query=self.query[row : row + count],
        )

    def oracle(self, magnitudes: bool = False) -> Tensor:
        """What attention is; with `magnitudes`, of the magnitudes of all values."""
        k, v = self._values(self.k, self.k_scale), self._values(self.v, self.v_scale)
        parts = [
            _attention(
                rows.double().numpy(),
                reference.paged(k, table.tolist(), length),
                reference.paged(np.abs(v) if magnitudes else v, table.tolist(), length),
                self.window or None,
                self.softcap,
            )
            for rows, table, length in zip(
                self.query.split(self.new), self.tables, self.lengths, strict=True
            )
            if len(rows) > 0
        ]
        return torch.from_numpy(np.concatenate(parts))

    def _values(self, cache: Tensor, scale: Tensor | None) -> reference.Float64:
        if scale is None:
            return cache.double().numpy()
        codes = cache.view(torch.uint8).numpy()
        return reference.float8_values(CODES[cache.dtype])[codes] * scale.double().numpy().reshape(
            -1, 1
        )

    def check(self, order: Order = Order.ASCENDING, score_error: float = 2e-5) -> None:
        """Compare with the oracle.

        A weight is rounded to what is multiplied (the cache's type, float16 for codes), which
        changes a result by as much of the weighted magnitudes; the plain kernel does not round.
        `score_error` is that of a score, in float32, and so of its weight, twice for numerator and
        denominator; then the result is rounded to its type.
        """
        self.compare(self.oracle(), self.oracle(magnitudes=True), order, score_error)

    def compare(
        self,
        exact: Tensor,
        magnitudes: Tensor,
        order: Order = Order.ASCENDING,
        score_error: float = 2e-5,
    ) -> None:
        actual = self.run(order).double()
        weight_type = FP32 if self.rows == 0 else BF16 if self.k.dtype == BF16 else FP16
        relative = UNIT[weight_type] + 2 * score_error
        allowed = relative * magnitudes + UNIT[self.query.dtype] * exact.abs()
        assert actual.shape == exact.shape
        excess = (actual - exact).abs() / allowed
        assert excess.max() <= 1, f"{excess.max():.3f} times what is allowed"


def _stored(x: Tensor, cache: torch.dtype) -> Tensor:
    if cache != E3M4:
        return x.to(cache)
    return torch.from_numpy(reference.float8_encode(x.double().numpy(), "e3m4"))


def _attention(
    query: reference.Float64,
    key: reference.Float64,
    value: reference.Float64,
    window: int | None,
    softcap: float,
) -> reference.Float64:
    """The oracle's, or with a soft cap by its definition."""
    if softcap == 0:
        return reference.attention(query, key, value, SOFTMAX_SCALE, window)
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, group, axis=1) for x in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) * SOFTMAX_SCALE
    scores = softcap * np.tanh(scores / softcap)
    position = np.arange(len(key) - len(query), len(key))[:, None]
    other = np.arange(len(key))[None]
    hidden = (other > position) | (window is not None and other <= position - (window or 0))
    weights = np.exp(np.where(hidden, -np.inf, scores))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), value)


LENGTHS = [1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]
# Query heads, KV heads, head_dim, rows of a tile.
SHAPES = [
    (2, 2, 64, 8),  # one row
    (6, 2, 64, 8),  # two tokens and six rows
    (9, 3, 64, 16),  # five tokens and fifteen rows
    (8, 2, 128, 8),
    (8, 1, 64, 8),
    (16, 1, 64, 16),
    (20, 1, 64, 16),  # two tiles of ten heads
    (17, 1, 64, 16),  # of nine and eight
    (20, 1, 80, 24),
    (4, 2, 256, 8),
    (3, 3, 64, 0),
    (7, 1, 10, 0),
    (2, 1, 200, 0),
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rows"), SHAPES)
def test_lengths_and_groups(
    heads: int, kv_heads: int, head_dim: int, rows: int, length: int
) -> None:
    Batch.random([length], [min(length, 3)], heads, kv_heads, head_dim, rows=rows).check()


@pytest.mark.parametrize("window", [1, 7, 16, CHUNK - 1, CHUNK, CHUNK + 44])
@pytest.mark.parametrize("new", [1, 5, 17])
@pytest.mark.parametrize("rows", [8, 16, 0])
def test_windows(rows: int, new: int, window: int) -> None:
    """Blocks that the window has passed by belong to others: their table entries mean nothing."""
    batch = Batch.random([2 * CHUNK + 7, 30], [new, new], 6, 2, rows=rows, window=window)
    exact, magnitudes = batch.oracle(), batch.oracle(magnitudes=True)
    for number, length in enumerate(batch.lengths):
        passed = max(0, length - new + 1 - window) // 16
        batch.tables[number, :passed] = -1
    batch.compare(exact, magnitudes)


@pytest.mark.parametrize("rows", [8, 16, 0])
@pytest.mark.parametrize("processors", [1, 132])
def test_sequences_with_different_numbers_of_queries(
    rows: int, processors: int, order: Order
) -> None:
    lengths, new = [CHUNK + 5, 1, 9, 3 * CHUNK, 64, 17], [3, 1, 5, 0, 1, 17]
    Batch.random(lengths, new, 6, 2, rows=rows, processors=processors).check(order)


def test_more_sequences_than_lanes() -> None:
    new = [number % 3 for number in range(70)]
    Batch.random([number + 2 for number in range(70)], new, 4, 1).check()


@pytest.mark.parametrize("rising", [False, True])
def test_more_chunks_than_lanes(rising: bool) -> None:
    batch = Batch.random([34 * CHUNK + 1], [1], 2, 1, block=64)
    if rising:
        _set_scores(batch, torch.linspace(0, 40, batch.k[..., 0].numel()))
    batch.check()


@pytest.mark.parametrize("block", [1, 5, 16, 64, CHUNK])
def test_block_sizes(block: int) -> None:
    Batch.random([300, 7], [2, 1], 4, 2, block=block).check()
    Batch.random([300, 7], [2, 1], 4, 2, block=block, rows=0).check()


@pytest.mark.parametrize(
    ("dtype", "cache", "head_dim", "rows"),
    [
        (BF16, BF16, 64, 16),
        (BF16, FP16, 96, 8),
        (FP16, FP16, 96, 8),
        (FP16, E4M3, 64, 8),
        (FP16, E4M3, 80, 24),
        (BF16, E3M4, 64, 8),
        (FP16, E3M4, 80, 24),
        (BF16, E3M4, 200, 0),
        (FP32, E3M4, 10, 0),
        (FP16, BF16, 24, 0),
        (FP32, FP32, 24, 0),
        (FP32, E4M3, 64, 0),
    ],
)
def test_types(dtype: torch.dtype, cache: torch.dtype, head_dim: int, rows: int) -> None:
    Batch.random(
        [37, 290, 600], [2, 3, 1], 6, 2, head_dim, dtype=dtype, cache=cache, rows=rows
    ).check()


@pytest.mark.parametrize("cache", [E4M3, E3M4], ids=CODES.get)
@pytest.mark.parametrize("rows", [8, 0])
@pytest.mark.parametrize(("softcap", "window"), [(0.5, 0), (20.0, 0), (50.0, 40)])
def test_soft_caps(softcap: float, window: int, rows: int, cache: torch.dtype) -> None:
    """Scores of 10 and more, on both sides of the caps; 2^-22 of a cap is lost besides."""
    batch = Batch.random([CHUNK + 37, 5], [3, 1], 6, 2, cache=cache, rows=rows, window=window)
    batch = replace(batch, query=batch.query * 8, softcap=softcap)
    batch.check(score_error=1e-4 + softcap * LOG2_E * 2.0**-22)
    free = replace(batch, softcap=0.0).run()
    assert (free.float() - batch.run().float()).abs().max() > 0.05


@pytest.mark.parametrize("sm80", [False, True])
@pytest.mark.parametrize("cache", [E4M3, E3M4], ids=CODES.get)
@pytest.mark.parametrize("rows", [8, 0])
def test_codes_that_are_no_numbers(rows: int, cache: torch.dtype, sm80: bool) -> None:
    """A key's NaN is everywhere in what sees it, a value's in its element; no other row has it."""
    kernels = """
    {WeightFormat::kE4M3, 0, 0, &run_plain<E4M3>}, {WeightFormat::kE3M4, 0, 0, &run_plain<E3M4>},
    tiled<E4M3, 64, 1>(WeightFormat::kE4M3), tiled<E3M4, 64, 1>(WeightFormat::kE3M4)"""
    library = emulator.compile(SOURCE.replace("KERNELS", kernels), sm80=sm80)
    for code in (0x7F, 0xFF):
        batch = Batch.random([50, 50], [1, 1], 2, 1, cache=cache, rows=rows, library=library)
        clean = batch.run()
        block = int(batch.tables[0, 1])
        batch.v.view(torch.uint8)[block, 3, 0, 17] = code
        found = batch.run()
        assert found[0, :, 17].isnan().all()
        assert int(found.isnan().sum()) == 2
        assert torch.equal(found[~found.isnan()], clean[~found.isnan()])
        batch.k.view(torch.uint8)[block, 5, 0, 40] = code
        found = batch.run()
        assert found[0].isnan().all()
        assert torch.equal(found[1], clean[1])


@pytest.mark.parametrize("rows", [8, 0])
def test_a_scale_for_each_head(rows: int) -> None:
    Batch.random([300], [3], 6, 3, scales=3, rows=rows).check()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_moving_bits_in_place_of_conversions(head_dim: int) -> None:
    kernels = f"tiled<E4M3, {head_dim}, 1>(WeightFormat::kE4M3)"
    library = emulator.compile(SOURCE.replace("KERNELS", kernels), sm80=True)
    Batch.random([300, 20], [2, 1], 4, 1, head_dim, library=library).check()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("factor", [1e-4, 1e3])
def test_queries_of_any_magnitude(factor: float, dtype: torch.dtype) -> None:
    """Scores of 1e4 are kept to 2^-24 of that, which is an error of as much in the exponent."""
    batch = Batch.random([300], [4], 3, 1, dtype=dtype)
    batch.query[1] *= 0
    batch = replace(batch, query=batch.query * factor)
    batch.check(score_error=2e-5 * max(1.0, 50 * factor / 1e3))


@pytest.mark.parametrize("power", [60, -60, -116])
def test_bfloat16_queries_beyond_the_range_of_float16(power: int) -> None:
    """With keys as small as the queries are large, scores are ordinary."""
    batch = Batch.random([300], [4], 3, 1)
    assert batch.k_scale is not None
    replace(batch, query=batch.query * 2.0**power, k_scale=batch.k_scale * 2.0**-power).check()


@pytest.mark.parametrize("most", [1.0, 100.0, 3000.0])
def test_rising_scores_move_the_reference(most: float) -> None:
    """From key to key, from chunk to chunk, by more than the slack and by less."""
    batch = Batch.random([2 * CHUNK], [1], 2, 1)
    _set_scores(batch, torch.linspace(-most, most, 2 * CHUNK))
    batch.check(score_error=2e-5 * max(1.0, most / 10))


def _set_scores(batch: Batch, scores: Tensor) -> None:
    """Give the keys of a batch's only sequence about these scores, in the order of positions."""
    assert batch.k_scale is not None
    batch.query[:] = 1.0
    head_dim = batch.query.shape[2]
    values = scores / (SOFTMAX_SCALE * head_dim)
    batch.k_scale[:] = values.abs().max() / 448
    codes = (values / batch.k_scale).view(-1, batch.k.shape[1], 1, 1).expand(-1, -1, 1, head_dim)
    batch.k[batch.tables[0].long()] = codes.to(E4M3)


def test_queries_among_other_heads() -> None:
    batch = Batch.random([300], [4], 3, 1)
    wide = torch.randn(4, 5, 64).to(BF16)
    replace(batch, query=wide[:, :3]).check()
    replace(batch, query=wide[:, :3], rows=0).check()


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("rows", [8, 16, 0])
def test_a_query_is_the_same_bits_in_every_batch(rows: int, window: int) -> None:
    batch = Batch.random(
        [2 * CHUNK + 200, 20, 300], [9, 20, 3], 6, 2, scales=2, rows=rows, window=window
    )
    together = batch.run().split(batch.new)
    for sequence, part in enumerate(together):
        for first, count in ((0, 1), (2, 1), (len(part) - 1, 1), (1, 2), (0, len(part))):
            alone = batch.only(sequence, first, count).run()
            assert torch.equal(alone, part[first : first + count])


def test_neither_tiles_nor_blocks_nor_room_change_a_bit(order: Order) -> None:
    """Rows of a tile; whether a block has one chunk, some or all of a tile; empty table entries."""
    batch = Batch.random([4 * CHUNK + 9, CHUNK, 1], [3, 1, 1], 4, 2)
    expected = batch.run()
    room = torch.full((3, 200), -1, dtype=torch.int32)
    wide = replace(batch, tables=torch.cat((batch.tables, room), dim=1))
    for changed in (batch, wide):
        for rows in (8, 16):
            for processors in (1, 2, 132):
                again = replace(changed, rows=rows, processors=processors)
                assert torch.equal(again.run(order), expected)
