// What all attention kernels share: how they find their place among ragged sequences, what a token
// sees, what numbers are multiplied by in the end.
#pragma once

#include "attention.h"
#include "intrinsics.cuh"

namespace quantkit::cuda {

constexpr float kNoScore = -3e38f;  // less than any score, yet finite: differences are no NaN

struct alignas(16) Float4 {
  float value[4];
};

// Of numbers that are not negative, which is a third cheaper.
QK_DEVICE int divide(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// Where a key is in the cache.
QK_DEVICE int64_t slot_of(const AttentionCall& call, const int32_t* table, int key) {
  const int block = call.block_shift >= 0 ? key >> call.block_shift : divide(key, call.block_size);
  return static_cast<int64_t>(table[block] - block) * call.block_size + key;
}

// Positions [begin, end) that a query at `position` sees.
struct Sight {
  int begin, end;
};
QK_DEVICE Sight sight_of(const AttentionCall& call, int position) {
  const int unseen = call.window > 0 ? position + 1 - call.window : 0;
  return {unseen > 0 ? unseen : 0, position + 1};
}

// Adjacent tokens of one sequence.
struct TokenTile {
  int sequence;
  int row;  // of query, of the first token
  int tokens;
  int position;  // of the first token in its sequence
};

// The tiles of all sequences are numbered one after another. False: there are fewer. Every lane of
// the warp must call this.
QK_DEVICE bool find_tile(const AttentionCall& call, int number, TokenTile& tile) {
  const int lane = threadIdx.x % kWarp;
  for (int first = 0; first < call.sequences; first += kWarp) {
    const int sequence = first + lane;
    const bool exists = sequence < call.sequences;
    const int start = exists ? call.starts[sequence] : 0;
    const int tokens = exists ? call.starts[sequence + 1] - start : 0;
    const int length = exists ? call.lengths[sequence] : 0;
    const int tiles = divide(tokens + call.tile_tokens - 1, call.tile_tokens);
    int before = tiles;  // of this sequence and those before it
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, before, step);
      if (lane >= step) before += other;
    }
    const int owner = __popc(__ballot_sync(kAllLanes, before <= number));
    if (owner < kWarp) {
      const int offset =
          (number - __shfl_sync(kAllLanes, before - tiles, owner)) * call.tile_tokens;
      const int left = __shfl_sync(kAllLanes, tokens, owner) - offset;
      tile.sequence = first + owner;
      tile.row = __shfl_sync(kAllLanes, start, owner) + offset;
      tile.tokens = left < call.tile_tokens ? left : call.tile_tokens;
      tile.position = __shfl_sync(kAllLanes, length - tokens, owner) + offset;
      return true;
    }
    number -= __shfl_sync(kAllLanes, before, kWarp - 1);
  }
  return false;
}

// Where one row of query stands. False: in no sequence. Every lane of the warp must call this.
struct Place {
  int sequence, position;
};
QK_DEVICE bool find_place(const AttentionCall& call, int row, Place& place) {
  const int lane = threadIdx.x % kWarp;
  for (int first = 0; first < call.sequences; first += kWarp) {
    const int sequence = min(first + lane, call.sequences - 1);
    const int end = call.starts[sequence + 1];
    const int position = call.lengths[sequence] - (end - row);
    const int owner = __popc(__ballot_sync(kAllLanes, end <= row));
    if (owner < kWarp) {
      place = {first + owner, __shfl_sync(kAllLanes, position, owner)};
      return true;
    }
  }
  return false;
}

// What decoded codes are to be multiplied by.
QK_DEVICE float code_factor(const AttentionCall& call) {
  return call.e3m4 ? DecodeAny<E3M4>::kFactor : DecodeAny<E4M3>::kFactor;
}
QK_DEVICE float key_factor(const AttentionCall& call, int kv_head) {
  if (call.k_scale == nullptr) return 1.0f;
  return call.k_scale[static_cast<int64_t>(kv_head) * call.k_scale_stride] * code_factor(call);
}
QK_DEVICE float value_factor(const AttentionCall& call, int kv_head) {
  if (call.v_scale == nullptr) return 1.0f;
  return call.v_scale[static_cast<int64_t>(kv_head) * call.v_scale_stride] * code_factor(call);
}

// A soft cap on a score, of which exp2 is to be taken: cap * tanh(score / cap), where `score` comes
// as 2 log2(e) / cap times itself. Within 2^-22 of the cap.
QK_DEVICE float capped(const AttentionCall& call, float score) {
  return call.cap - 2.0f * call.cap * reciprocal_flush(exp2_flush(score) + 1.0f);
}

// Four adjacent elements; both types have 16 bits.
QK_DEVICE void store_out(const AttentionCall& call, int64_t index, const Float4& sum,
                         float factor) {
  const float* v = sum.value;
  Word2* target = reinterpret_cast<Word2*>(static_cast<uint16_t*>(call.out) + index);
  *target = call.type == FloatType::kBFloat16
                ? Word2{{pack2<BFloat16>(v[0] * factor, v[1] * factor),
                         pack2<BFloat16>(v[2] * factor, v[3] * factor)}}
                : Word2{{pack2<Half>(v[0] * factor, v[1] * factor),
                         pack2<Half>(v[2] * factor, v[3] * factor)}};
}

}  // namespace quantkit::cuda
