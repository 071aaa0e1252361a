// Linear layers with 8-bit weights for few tokens, where the time is that of reading the weights:
//   y[m, n] = scale[n] * sum_k x[m, k] * decode(w[n, k]) + bias[n],  or  act(gate) * up  of two
//   rows.
//
// Codes become pairs of x's type in registers and meet the tokens in the matrix instruction, 16
// rows of weights times 8 tokens. It would idle otherwise, sums are float32, and a token's sums are
// the same bits whatever other tokens a call holds.
//
// Which 16 columns one instruction sums over is free as long as weights and tokens agree. So a lane
// loads 16 adjacent codes of a row at once and feeds four instructions with four codes each; tokens
// are read as they lie in memory.
//
//   block   16 * kRowTiles output features (two weight rows each if gated), 8 * kTokenTiles tokens
//   warp    every kSplits-th unit of 128 columns, a cache line of each row; all rows of the block
//   lane    4 * g + t: rows g and g + 8 of a tile, columns 16 t to 16 t + 15 of each chunk of 64
//
// The next kStages chunks of codes are in flight, each in registers of its own. What the warps
// summed meets in shared memory, in the order of the warps. kRowTiles, kTokenTiles and kStages do
// not change the order of any sum, so they may depend on the call; kSplits does, so it may not.
#pragma once

#include "activation.cuh"
#include "intrinsics.cuh"
#include "weight_linear.h"
#include "weight_linear_outliers.cuh"

namespace quantkit::cuda {

constexpr int kTileRows = 16;
constexpr int kTileTokens = 8;
constexpr int kLaneCodes = 16;
constexpr int kSteps = kLaneCodes / 4;  // matrix instructions that a lane's codes feed
constexpr int kChunk = 4 * kLaneCodes;
constexpr int kUnit = 2 * kChunk;

template <int row_tiles, int token_tiles, int splits, int stages, int token_stages,
          int blocks_per_multiprocessor>
struct LinearShape {
  static constexpr int kRowTiles = row_tiles;
  static constexpr int kTokenTiles = token_tiles;
  static constexpr int kSplits = splits;
  static constexpr int kStages = stages;
  static constexpr int kTokenStages = token_stages;
  static constexpr int kBlocksPerMultiprocessor = blocks_per_multiprocessor;
  static constexpr int kThreads = splits * kWarp;
  static constexpr int kFeatures = row_tiles * kTileRows;
  static constexpr int kTokens = token_tiles * kTileTokens;
  static_assert(stages % 2 == 0, "a unit is two chunks");
};

// What every warp of a block summed of 16 features: of one weight row or of gate and up, by tokens.
template <class Shape, int kParts>
using WarpSums = float[Shape::kSplits][kParts][Shape::kTokenTiles][kTileRows][kTileTokens];

// The sums of one output, in the order of the warps.
template <class Shape, int kParts>
QK_DEVICE void add_warps(const WarpSums<Shape, kParts>& shared, int token, int row,
                         float (&totals)[kParts]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    totals[part] = 0.0f;
#pragma unroll
    for (int split = 0; split < Shape::kSplits; ++split) {
      totals[part] += shared[split][part][token / kTileTokens][row][token % kTileTokens];
    }
  }
}

// Four codes to two pairs of T, exactly, but Decode<Format>::kFactor times too small.
template <class Format, class T>
QK_DEVICE Word2 decode_quad(uint32_t codes) {
  Word2 pairs = Decode<Format>::quad(codes);
  if constexpr (kIsBFloat16<T>) {
#pragma unroll
    for (uint32_t& pair : pairs.word) {
      pair = pack2<BFloat16>(low_half<Half>(pair), high_half<Half>(pair));
    }
  }
  return pairs;
}

QK_DEVICE float load_float(const void* values, FloatType type, int64_t index) {
  switch (type) {
    case FloatType::kBFloat16: return widen(static_cast<const BFloat16*>(values)[index]);
    case FloatType::kFloat16: return widen(static_cast<const Half*>(values)[index]);
    default: return static_cast<const float*>(values)[index];
  }
}

// Everything after the sums of codes and x: `sums` of the one weight row, or of gate and up; `apart`
// is what outliers add, if there are any.
template <bool kGated, int kParts>
QK_DEVICE float finish_feature(const LinearCall& call, const float (&sums)[kParts],
                               const float (&apart)[kParts], bool scaled, int64_t feature) {
  float values[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int64_t row = feature + part * call.features;
    values[part] = scaled ? sums[part] : sums[part] * call.scale[row];
    if (call.bias != nullptr) values[part] += load_float(call.bias, call.bias_type, row);
    if (call.outliers.count > 0) values[part] += apart[part];
  }
  if constexpr (kGated) return activate(call.activation, values[0]) * values[1];
  return values[0];
}

// One lane's codes of a chunk, of all tiles; with their scales where groups have some.
template <int kTiles, bool kGrouped>
struct ChunkCodes {
  Word4 low[kTiles];   // row g
  Word4 high[kTiles];  // row g + 8
  float low_scale[kGrouped ? kTiles : 1];
  float high_scale[kGrouped ? kTiles : 1];
};

// One lane's columns of a chunk of x, of all its tokens.
template <int kTokenTiles>
struct ChunkTokens {
  Word4 words[kTokenTiles][2];
};

// sums += codes * x over one chunk.
template <class Format, class T, int kTiles, int kTokenTiles, bool kGrouped>
QK_DEVICE void multiply_chunk(float (&sums)[kTiles][kTokenTiles][4],
                              const ChunkCodes<kTiles, kGrouped>& codes,
                              const ChunkTokens<kTokenTiles>& x) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float group_sums[kTokenTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const Word2 low = decode_quad<Format, T>(codes.low[tile].word[step]);
      const Word2 high = decode_quad<Format, T>(codes.high[tile].word[step]);
      const uint32_t a[4] = {low.word[0], high.word[0], low.word[1], high.word[1]};
#pragma unroll
      for (int token = 0; token < kTokenTiles; ++token) {
        const Word4& words = x.words[token][step / 2];
        const uint32_t b[2] = {words.word[step % 2 * 2], words.word[step % 2 * 2 + 1]};
        multiply_tile<T>(kGrouped ? group_sums[token] : sums[tile][token], a, b);
      }
    }
    if constexpr (kGrouped) {
#pragma unroll
      for (int token = 0; token < kTokenTiles; ++token) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float scale = i < 2 ? codes.low_scale[tile] : codes.high_scale[tile];
          sums[tile][token][i] = fmaf(group_sums[token][i], scale, sums[tile][token][i]);
        }
      }
    }
  }
}

// The rows g and g + 8 of a tile in a matrix of weights.
struct RowPair {
  int64_t low, high;
};

// Features one after another, as their rows are: which rows a tile has, and where what they give
// goes. `sums` are those of 16 features; `apart` is what outliers add to them.
template <class Format, class T, class Shape, bool kGated, bool kGrouped>
struct FeatureOutput {
  static constexpr int kParts = kGated ? 2 : 1;  // weight rows behind an output feature
  static constexpr bool kOutliers = true;
  const LinearCall& call;

  // Of the first part. Rows beyond the last repeat it: their sums go nowhere.
  QK_DEVICE RowPair rows(int64_t tile_feature, int g) const {
    const int64_t last = call.features - 1;
    const int64_t feature = tile_feature + g;
    return {feature < last ? feature : last, feature + 8 < last ? feature + 8 : last};
  }

  QK_DEVICE void store(const WarpSums<Shape, kParts>& sums,
                       const float (&apart)[kParts][Shape::kTokens][kTileRows],
                       int64_t first_token, int64_t tile_feature) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < Shape::kTokens * kTileRows; i += Shape::kThreads) {
      const int row = i % kTileRows;
      const int in_block = i / kTileRows;
      const int64_t out_token = first_token + in_block;
      const int64_t feature = tile_feature + row;
      if (out_token >= call.tokens || feature >= call.features) continue;
      float totals[kParts];
      float beside[kParts];
      add_warps<Shape, kParts>(sums, in_block, row, totals);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        totals[part] *= Decode<Format>::kFactor;
        beside[part] = apart[part][in_block][row];
      }
      static_cast<T*>(call.out)[out_token * call.features + feature] =
          narrow<T>(finish_feature<kGated>(call, totals, beside, kGrouped, feature));
    }
  }
};

// columns % 16 == 0; x and codes aligned to 16 bytes. kGrouped: group_size a power of two >= 64.
// Grid: (blocks of tokens, blocks of features).
template <class Format, class T, class Shape, bool kGrouped, class Output>
QK_DEVICE void multiply_rows(const LinearCall& call, const Output& output) {
  constexpr int kParts = Output::kParts;
  constexpr int kTiles = Shape::kRowTiles * kParts;
  constexpr int kTokenTiles = Shape::kTokenTiles;
  constexpr int kSplits = Shape::kSplits;
  constexpr int kStages = Shape::kStages;
  constexpr int kTokenStages = Shape::kTokenStages;

  start_next_kernel();
  const int lane = threadIdx.x % kWarp;
  // The same for all lanes, in a way that the compiler sees.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int g = lane / 4;
  const int lane_column = lane % 4 * kLaneCodes;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * Shape::kTokens;
  const int64_t first_feature = static_cast<int64_t>(blockIdx.y) * Shape::kFeatures;
  const int columns = static_cast<int>(call.columns);
  const int chunks = columns / kChunk;  // whole ones; the rest of the columns comes last
  const int over = chunks % (2 * kSplits) - 2 * warp;
  const int count = chunks / (2 * kSplits) * 2 + (over < 0 ? 0 : over > 2 ? 2 : over);

  // Where the lane reads next. Tokens beyond the last repeat it: their sums go nowhere.
  const uint8_t* low[kTiles];
  const uint8_t* high[kTiles];
  const float* low_scale[kTiles];
  const float* high_scale[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const RowPair rows = output.rows(first_feature + tile / kParts * kTileRows, g);
    const int64_t part = tile % kParts * call.features;
    const int64_t low_row = part + rows.low;
    const int64_t high_row = part + rows.high;
    const int64_t column = warp * kUnit + lane_column;
    low[tile] = call.codes + low_row * call.columns + column;
    high[tile] = call.codes + high_row * call.columns + column;
    low_scale[tile] = call.scale + low_row * call.groups;
    high_scale[tile] = call.scale + high_row * call.groups;
  }
  const T* block_tokens = static_cast<const T*>(call.x) + first_token * call.columns;
  unsigned token[kTokenTiles];  // elements from there
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    const int row = tile * kTileTokens + g;
    const int64_t last = call.tokens - 1 - first_token;
    token[tile] = static_cast<unsigned>(row < last ? row : static_cast<int>(last)) *
                      static_cast<unsigned>(columns) +
                  lane_column;
  }
  int code_column = warp * kUnit;   // of the unit that `low` and `high` point to
  int token_column = warp * kUnit;  // of the unit of x to read next

  const auto load_codes = [&](ChunkCodes<kTiles, kGrouped>& codes, int offset, bool inside) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      codes.low[tile] = inside ? load_once16(low[tile] + offset) : Word4{};
      codes.high[tile] = inside ? load_once16(high[tile] + offset) : Word4{};
      if constexpr (kGrouped) {
        const int group = (code_column + offset) >> (31 - __clz(static_cast<int>(call.group_size)));
        codes.low_scale[tile] = low_scale[tile][group];
        codes.high_scale[tile] = high_scale[tile][group];
      }
    }
  };
  const auto next_codes = [&] {
    code_column += kSplits * kUnit;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      low[tile] += kSplits * kUnit;
      high[tile] += kSplits * kUnit;
    }
  };
  const auto load_tokens = [&](ChunkTokens<kTokenTiles>& x, int offset, bool inside) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const auto* words =
          reinterpret_cast<const Word4*>(block_tokens + (token[tile] + token_column + offset));
      x.words[tile][0] = inside ? words[0] : Word4{};
      x.words[tile][1] = inside ? words[1] : Word4{};
    }
  };
  const auto next_tokens = [&] { token_column += kSplits * kUnit; };

  // Chunk i of the warp is half i % 2 of its unit i / 2.
  float sums[kTiles][kTokenTiles][4] = {};
  ChunkCodes<kTiles, kGrouped> codes[kStages];
  ChunkTokens<kTokenTiles> x[kTokenStages];
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < count) load_codes(codes[stage], stage % 2 * kChunk, true);
    if (stage % 2 == 1) next_codes();
  }
  if constexpr (Output::kOutliers) prefetch_outliers<Shape, kParts>(call, first_feature);
  wait_for_previous_kernel();
  if (kTokenStages == 2 && count > 0) load_tokens(x[0], 0, true);
  for (int i = 0; i < count; i += kStages) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (i + stage >= count) break;
      constexpr int kAhead = kTokenStages - 1;
      if (i + stage + kAhead < count) {
        load_tokens(x[(stage + kAhead) % kTokenStages], (stage + kAhead) % 2 * kChunk, true);
      }
      if ((stage + kAhead) % 2 == 1) next_tokens();
      multiply_chunk<Format, T>(sums, codes[stage], x[stage % kTokenStages]);
      if (i + stage + kStages < count) load_codes(codes[stage], stage % 2 * kChunk, true);
      if (stage % 2 == 1) next_codes();
    }
  }

  // What is left of the columns belongs to the warp whose turn it is.
  const int rest = columns % kChunk;
  if (rest != 0 && chunks / 2 % kSplits == warp) {
    load_codes(codes[0], chunks * kChunk - code_column, lane_column < rest);
    load_tokens(x[0], chunks * kChunk - token_column, lane_column < rest);
    multiply_chunk<Format, T>(sums, codes[0], x[0]);
  }

  __shared__ WarpSums<Shape, kParts> shared;
  __shared__ float apart[kParts][Shape::kTokens][kTileRows];  // what outliers add
#pragma unroll
  for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
    const int64_t tile_feature = first_feature + row_tile * kTileRows;
    if (row_tile > 0) __syncthreads();
    if (Output::kOutliers && call.outliers.count > 0) {
      share_outliers<T, Shape, kParts>(call, first_token, tile_feature, shared[warp]);
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < Shape::kTokens * kTileRows; i += Shape::kThreads) {
        float totals[kParts];
        add_warps<Shape, kParts>(shared, i / kTileRows, i % kTileRows, totals);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          apart[part][i / kTileRows][i % kTileRows] = totals[part];
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const float (&c)[4] = sums[row_tile * kParts + part][tile];
        float (&to)[kTileRows][kTileTokens] = shared[warp][part][tile];
#pragma unroll
        for (int i = 0; i < 4; ++i) to[g + i / 2 * 8][lane % 4 * 2 + i % 2] = c[i];
      }
    }
    __syncthreads();
    output.store(shared, apart, first_token, tile_feature);
  }
}

template <class Format, class T, class Shape, bool kGated, bool kGrouped>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerMultiprocessor)
    weight_linear(const LinearCall call) {
  multiply_rows<Format, T, Shape, kGrouped>(
      call, FeatureOutput<Format, T, Shape, kGated, kGrouped>{call});
}

// Any shape, groups and alignment, slowly: a warp sums one feature of one token.
// Grid: (tokens, any number of blocks for the features).
template <class Format, class T, bool kGated>
__global__ void __launch_bounds__(128) weight_linear_any(const LinearCall call) {
  constexpr int kParts = kGated ? 2 : 1;
  start_next_kernel();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarp;
  const int64_t token = blockIdx.x;
  const T* x = static_cast<const T*>(call.x) + token * call.columns;
  const int warps = blockDim.x / kWarp;
  int64_t feature = static_cast<int64_t>(blockIdx.y) * warps + threadIdx.x / kWarp;
  for (; feature < call.features; feature += static_cast<int64_t>(gridDim.y) * warps) {
    float sums[kParts];
    float apart[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64_t row = feature + part * call.features;
      const float* scale = call.scale + row * call.groups;
      int64_t group_end = call.group_size;
      float sum = 0.0f;
      for (int64_t column = lane; column < call.columns; column += kWarp) {
        for (; column >= group_end; group_end += call.group_size) ++scale;
        const uint32_t pair = Decode<Format>::pair(call.codes[row * call.columns + column]);
        const float weight = low_half<Half>(pair) * Decode<Format>::kFactor * *scale;
        sum = fmaf(weight, widen(x[column]), sum);
      }
      sums[part] = warp_sum(sum);
      float beside = 0.0f;
      for (int64_t j = lane; j < call.outliers.count; j += kWarp) {
        const float weight = outlier_weight(call, j, row, kParts * call.features);
        beside = fmaf(weight, widen(x[call.outliers.columns[j]]), beside);
      }
      apart[part] = call.outliers.count > 0 ? warp_sum(beside) : 0.0f;
    }
    const float value = finish_feature<kGated>(call, sums, apart, true, feature);
    if (lane == 0) static_cast<T*>(call.out)[token * call.features + feature] = narrow<T>(value);
  }
}

}  // namespace quantkit::cuda
