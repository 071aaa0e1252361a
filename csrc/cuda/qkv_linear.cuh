// The linear layer of q, k and v for few tokens, with what follows it: queries and keys turn by the
// rotary embedding, keys and values go into the paged cache. What weight_linear and append_rotated
// do one after another, with the same bits, in one kernel.
//
// An element and its partner in the rotation are half of what turns apart, 64 rows of the weight
// where a tile has 16. But a tile's rows need not be neighbours in memory: reading goes along rows.
// So a tile takes 8 rows and their 8 partners, as the lower and the upper half of the instruction's
// 16, and a pair's two sums meet in shared memory:
//
//   head     row 0 .......... half .......... rotary_dim ........ head_dim
//   tile t   [8 t, 8 t + 8) and half + [8 t, 8 t + 8);  beyond rotary_dim [16 t, 16 t + 16)
//
// A head's norm needs all of its rows: layers with one take two kernels.
#pragma once

#include "cache_side.cuh"
#include "rotary.cuh"
#include "weight_linear.cuh"

namespace quantkit::cuda {

struct QkvCall {
  LinearCall linear;    // of all heads' rows: queries, keys, values; out: queries; no outliers
  const void* cosine;   // [tokens, rotary_dim] of x's type, or null for no rotation
  const void* sine;     // the same
  CacheSide keys, values;
  const int64_t* slots;  // [tokens]
  int64_t slot_count;    // of the cache
  int heads;
  int kv_heads;
  int head_dim;    // a multiple of 16
  int rotary_dim;  // a multiple of 16, at most head_dim; 0 without rotation
  WeightFormat stored;  // the type of the cache
};

// 16 rows of one head.
struct HeadTile {
  int head;   // queries, then keys, then values
  int first;  // its rows [first, first + 8) of the head, and as many from first + apart on
  int apart;
  bool turns;  // if the head does

  // Row g and its partner, of all rows.
  QK_DEVICE RowPair rows(int head_dim, int g) const {
    const int64_t low = static_cast<int64_t>(head) * head_dim + first + g;
    return {low, low + apart};
  }
};

// The tile that begins at row `feature` if all are one after another.
QK_DEVICE HeadTile head_tile(int64_t feature, int head_dim, int rotary_dim) {
  const int row = static_cast<int>(feature), head = row / head_dim, within = row % head_dim;
  if (within < rotary_dim) return {head, within / 2, rotary_dim / 2, true};
  return {head, within, kTileTokens, false};
}

// Stores one element of a head, if there is such a slot.
template <class T>
QK_DEVICE void store_element(const CacheSide& side, WeightFormat type, int64_t index, int64_t head,
                             float value) {
  const auto encoded = [&](auto format) {
    const float scaled = value / side.scale[head * side.scale_stride];
    return static_cast<uint8_t>(encode_pair<decltype(format)>(scaled, scaled));
  };
  switch (type) {
    case WeightFormat::kE3M4: side.cache[index] = encoded(E3M4{}); break;
    case WeightFormat::kBFloat16:
      reinterpret_cast<BFloat16*>(side.cache)[index] = narrow<BFloat16>(value);
      break;
    case WeightFormat::kFloat16:
      reinterpret_cast<Half*>(side.cache)[index] = narrow<Half>(value);
      break;
    case WeightFormat::kFloat32: reinterpret_cast<float*>(side.cache)[index] = value; break;
    default: side.cache[index] = encoded(E4M3{});
  }
}

// Heads, whose tiles are pairs; see weight_linear.cuh's FeatureOutput.
template <class Format, class T, class Shape, bool kGrouped>
struct HeadOutput {
  static constexpr int kParts = 1;
  static constexpr bool kOutliers = false;
  const QkvCall& call;

  QK_DEVICE RowPair rows(int64_t tile_feature, int g) const {
    return head_tile(tile_feature, call.head_dim, call.rotary_dim).rows(call.head_dim, g);
  }

  // What the linear layer gives, rounded.
  QK_DEVICE float value(const WarpSums<Shape, 1>& sums, int token, int row, int64_t feature) const {
    float total[1];
    const float nothing[1] = {};
    add_warps<Shape, 1>(sums, token, row, total);
    total[0] *= Decode<Format>::kFactor;
    return widen(narrow<T>(finish_feature<false>(call.linear, total, nothing, kGrouped, feature)));
  }

  QK_DEVICE void store(const WarpSums<Shape, 1>& sums, const float (&)[1][Shape::kTokens][kTileRows],
                       int64_t first_token, int64_t tile_feature) const {
    const HeadTile tile = head_tile(tile_feature, call.head_dim, call.rotary_dim);
#pragma unroll 1
    for (int i = threadIdx.x; i < Shape::kTokens * 8; i += Shape::kThreads) {
      const int64_t token = first_token + i / 8;
      if (token >= call.linear.tokens) continue;
      const int g = i % 8;
      const RowPair rows = tile.rows(call.head_dim, g);
      float low = value(sums, i / 8, g, rows.low), high = value(sums, i / 8, g + 8, rows.high);
      if (tile.turns && tile.head < call.heads + call.kv_heads) turn(token, tile, g, low, high);
      place(token, tile.head, tile.first + g, low);
      place(token, tile.head, tile.first + g + tile.apart, high);
    }
  }

  QK_DEVICE void turn(int64_t token, const HeadTile& tile, int g, float& low, float& high) const {
    const T* cosine = static_cast<const T*>(call.cosine) + token * call.rotary_dim + tile.first + g;
    const T* sine = static_cast<const T*>(call.sine) + token * call.rotary_dim + tile.first + g;
    const float turned = rotated<T>(low, widen(cosine[0]), high, -widen(sine[0]));
    high = rotated<T>(high, widen(cosine[tile.apart]), low, widen(sine[tile.apart]));
    low = turned;
  }

  // Puts element d of a head where it belongs.
  QK_DEVICE void place(int64_t token, int head, int d, float value) const {
    const T rounded = narrow<T>(value);
    if (head < call.heads) {
      static_cast<T*>(call.linear.out)[(token * call.heads + head) * call.head_dim + d] = rounded;
      return;
    }
    const int64_t slot = call.slots[token];
    if (slot < 0 || slot >= call.slot_count) return;
    const bool is_value = head >= call.heads + call.kv_heads;
    const int kv_head = head - call.heads - (is_value ? call.kv_heads : 0);
    const int64_t index = (slot * call.kv_heads + kv_head) * call.head_dim + d;
    store_element<T>(choose(is_value, call.keys, call.values), call.stored, index, kv_head,
                     widen(rounded));
  }
};

// For up to Shape::kTokens tokens. Grid: (1, tiles of all heads).
template <class Format, class T, class Shape, bool kGrouped>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerMultiprocessor)
    qkv_linear(const QkvCall call) {
  multiply_rows<Format, T, Shape, kGrouped>(call.linear,
                                            HeadOutput<Format, T, Shape, kGrouped>{call});
}

}  // namespace quantkit::cuda
