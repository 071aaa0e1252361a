// How a call of attention is cut up: which kernel's rows, how many blocks, who folds. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"

namespace quantkit::cuda {

// Blocks that a multiprocessor is to have in turn: more even out sequences of unlike lengths, fewer
// begin and end less often. Measured on an H200.
constexpr int64_t kBlocksPerMultiprocessor = 8;
// Bytes of partial results; beyond, a block takes all chunks of its tile.
constexpr int64_t kMostPartialBytes = int64_t{1} << 29;

// The logarithm of a power of two; -1 for other numbers.
inline int32_t shift_of(int64_t number) {
  if ((number & (number - 1)) != 0) return -1;
  int32_t shift = 0;
  while ((number >> shift) > 1) ++shift;
  return shift;
}

struct AttentionSize {
  int64_t tokens, sequences, kv_heads, group, head_dim;
  int64_t capacity;  // keys that a sequence may have
  int64_t window;    // 0: none
  int64_t multiprocessors;
};

struct AttentionPlan {
  int64_t tile_tokens, tile_heads, head_tiles;
  int64_t chunks;        // of the longest sequence
  int64_t blocks;        // gridDim.x
  int64_t chunk_blocks;  // gridDim.y: blocks that share a tile's chunks; 1: it needs no workspace

  void apply(AttentionCall& call) const {
    call.chunks = static_cast<int32_t>(chunks);
    call.tile_tokens = static_cast<int32_t>(tile_tokens);
    call.tile_heads = static_cast<int32_t>(tile_heads);
    call.head_tiles = static_cast<int32_t>(head_tiles);
  }
};

// Rows that the tile of a typical sequence has. Unlike all else here, lengths are known to the
// device alone.
inline int64_t typical_rows(const AttentionSize& size) {
  const int64_t sequences = std::max<int64_t>(1, size.sequences);
  return size.group * ((size.tokens + sequences - 1) / sequences);
}

// For a kernel whose tiles have up to `rows` rows and chunks of `chunk` keys.
inline AttentionPlan plan_attention(const AttentionSize& size, int64_t rows, int64_t chunk) {
  AttentionPlan plan{};
  plan.tile_tokens = std::max<int64_t>(1, rows / size.group);
  plan.head_tiles = (size.group + rows - 1) / rows;
  plan.tile_heads = (size.group + plan.head_tiles - 1) / plan.head_tiles;
  plan.chunks = std::max<int64_t>(1, (size.capacity + chunk - 1) / chunk);
  // A sequence wastes less than one tile.
  const int64_t tiles = std::min(size.tokens, size.tokens / plan.tile_tokens + size.sequences);
  plan.blocks = tiles * size.kv_heads * plan.head_tiles;
  const int64_t wanted =
      (kBlocksPerMultiprocessor * size.multiprocessors + plan.blocks - 1) / plan.blocks;
  plan.chunk_blocks = std::min(plan.chunks, wanted);
  if (size.window > 0) {
    const int64_t seen = (size.window + plan.tile_tokens - 2) / chunk + 2;  // chunks, at most
    plan.chunk_blocks = std::min(plan.chunk_blocks, seen);
  }
  const int64_t partial_bytes =
      size.tokens * size.kv_heads * size.group * plan.chunks * (size.head_dim + 2) * 4;
  if (partial_bytes > kMostPartialBytes) plan.chunk_blocks = 1;
  return plan;
}

}  // namespace quantkit::cuda
