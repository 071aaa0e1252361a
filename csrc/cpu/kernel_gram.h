// Sums of x^T x over tokens: the second moments that calibration takes of the inputs of a layer.
// Part of kernel_template.h; include only that.
//
// The result is symmetric, so only tiles on and above the diagonal are computed. Runs of tokens are
// summed by themselves, then run after run, whatever thread has a tile.
#pragma once

#include "kernel_common.h"

namespace quantkit {
namespace {

constexpr int kGramVectors = 3;  // columns of a tile, in vectors
constexpr int64_t kGramSteps = 128;  // cells of a tile's columns that stay in L1

// How many cells of 4 bytes make the products of how many tokens. In general a cell is a float.
template <class Isa>
struct FloatCells {
  using Lanes = typename Isa::Lanes;
  static constexpr int64_t kTokens = 1;

  static Lanes add_products(Lanes a, Lanes b, Lanes sums) { return Lanes::fma(a, b, sums); }
};

template <class Isa>
constexpr int64_t kGramEdge = kGramVectors * Isa::kLanes;

template <class Isa, class Cells>
int64_t gram_packed_size(int64_t tokens, int64_t columns) {
  return ceil_div(tokens, Cells::kTokens) * ceil_div(columns, Isa::kLanes) * Isa::kLanes;
}

// Cells of `count` columns: kTokens bfloat16 numbers each, the first in the lowest bits, or a float.
template <class Cells>
inline void gram_cells(const BFloat16* first, const BFloat16* second, int64_t count, float* cells) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (Cells::kTokens == 1) {
      cells[i] = to_float(first[i]);
    } else {
      const uint32_t above = second == nullptr ? 0 : second[i].bits;
      cells[i] = bits_float(above << 16 | first[i].bits);
    }
  }
}

// Vectors of columns [begin, end): for each, the cells of all tokens side by side.
template <class Isa, class Cells>
void gram_pack(const GramTask& task, int64_t begin, int64_t end, float* packed) {
  const int64_t steps = ceil_div(task.tokens, Cells::kTokens);
  for (int64_t step = 0; step < steps; ++step) {
    const BFloat16* first =
        static_cast<const BFloat16*>(task.rows) + step * Cells::kTokens * task.columns;
    const bool has_second = (step + 1) * Cells::kTokens <= task.tokens;
    for (int64_t vector = begin; vector < end; ++vector) {
      const int64_t column = vector * Isa::kLanes;
      const int64_t count = at_most(Isa::kLanes, task.columns - column);
      const BFloat16* second = has_second ? first + task.columns + column : nullptr;
      float* cells = packed + (vector * steps + step) * Isa::kLanes;
      gram_cells<Cells>(first + column, second, count, cells);
      for (int64_t lane = count; lane < Isa::kLanes; ++lane) cells[lane] = 0.0f;
    }
  }
}

// Adds `steps` cells' products of half a vector of columns with kGramVectors vectors of them.
template <class Isa, class Cells>
inline void gram_add(const float* rows, const float* const (&columns)[kGramVectors], int64_t steps,
                     float* sums) {
  using Lanes = typename Isa::Lanes;
  constexpr int kRows = Isa::kLanes / 2;  // as many sums as there are registers for
  Lanes sum[kRows][kGramVectors];
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    QK_UNROLL for (int j = 0; j < kGramVectors; ++j) {
      sum[i][j] = Lanes::zero();
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    Lanes column[kGramVectors];
    QK_UNROLL for (int j = 0; j < kGramVectors; ++j) {
      column[j] = Lanes::load(columns[j] + step * Isa::kLanes);
    }
    QK_UNROLL for (int i = 0; i < kRows; ++i) {
      const Lanes row = Lanes::broadcast(rows[step * Isa::kLanes + i]);
      QK_UNROLL for (int j = 0; j < kGramVectors; ++j) {
        sum[i][j] = Cells::add_products(row, column[j], sum[i][j]);
      }
    }
  }
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    QK_UNROLL for (int j = 0; j < kGramVectors; ++j) {
      float* total = sums + i * kGramEdge<Isa> + j * Isa::kLanes;
      Lanes::add(Lanes::load(total), sum[i][j]).store(total);
    }
  }
}

// Puts a tile, whose first row and column are given, in its place and in its mirror image's.
template <class Isa>
void gram_store(const GramTask& task, int64_t row, int64_t column, const float* sums) {
  const int64_t rows = at_most(kGramEdge<Isa>, task.columns - row);
  const int64_t columns = at_most(kGramEdge<Isa>, task.columns - column);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const float sum = sums[i * kGramEdge<Isa> + j];
      task.sums[(row + i) * task.columns + column + j] = sum;
      task.sums[(column + j) * task.columns + row + i] = sum;
    }
  }
}

template <class Isa, class Cells>
void gram_tile(const GramTask& task, int64_t row, int64_t column, const float* packed) {
  constexpr int64_t kEdge = kGramEdge<Isa>;
  constexpr int64_t kHalf = Isa::kLanes / 2;
  alignas(64) float sums[kEdge * kEdge] = {};
  const int64_t steps = ceil_div(task.tokens, Cells::kTokens);
  const int64_t vectors = ceil_div(task.columns, Isa::kLanes);
  for (int64_t start = 0; start < steps; start += kGramSteps) {
    const int64_t count = at_most(kGramSteps, steps - start);
    const float* columns[kGramVectors];
    for (int64_t j = 0; j < kGramVectors; ++j) {
      // Beyond the last vector of columns stands another, of which nothing is stored.
      const int64_t vector = at_most(column / Isa::kLanes + j, vectors - 1);
      columns[j] = packed + (vector * steps + start) * Isa::kLanes;
    }
    for (int64_t i = 0; i < kEdge && row + i < task.columns; i += kHalf) {
      const int64_t vector = (row + i) / Isa::kLanes;
      const float* rows = packed + (vector * steps + start) * Isa::kLanes + i % Isa::kLanes;
      gram_add<Isa, Cells>(rows, columns, count, sums + i * kEdge);
    }
  }
  gram_store<Isa>(task, row, column, sums);
}

template <class Isa>
int64_t gram_tiles(int64_t columns) {
  const int64_t along = ceil_div(columns, kGramEdge<Isa>);
  return along * (along + 1) / 2;
}

// Tiles [begin, end) of those on and above the diagonal, column by column.
template <class Isa, class Cells>
void gram(const GramTask& task, int64_t begin, int64_t end, const float* packed) {
  int64_t column = 0, first = 0;  // first: number of the topmost tile of the column
  for (int64_t tile = begin; tile < end; ++tile) {
    while (tile > first + column) first += ++column;
    gram_tile<Isa, Cells>(task, (tile - first) * kGramEdge<Isa>, column * kGramEdge<Isa>, packed);
  }
}

template <class Isa, class Cells>
constexpr GramKernels kGramKernels{
    .lanes = Isa::kLanes,
    .packed_size = gram_packed_size<Isa, Cells>,
    .pack = gram_pack<Isa, Cells>,
    .tiles = gram_tiles<Isa>,
    .add = gram<Isa, Cells>,
};

}  // namespace
}  // namespace quantkit
