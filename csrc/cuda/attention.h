// Which attention kernels there are, and what they are told. Neither torch nor device code.
#pragma once

#include <cstdint>
#include <span>

#include "../types.h"

namespace quantkit::cuda {

struct AttentionCall {
  const void* query;     // [tokens, heads, head_dim] of `type`, heads side by side
  void* out;             // the same, contiguous
  const uint8_t* keys;   // [blocks, block_size, kv_heads, head_dim]
  const uint8_t* values;
  const float* k_scale;  // per KV head, or one (stride 0); null for plain values
  const float* v_scale;
  const int32_t* tables;   // [sequences, table_width]
  const int32_t* lengths;  // [sequences]
  const int32_t* starts;   // [sequences + 1]
  float* sums;             // [tokens, heads, chunks, head_dim], unless one block has all chunks
  float* weights;          // [tokens, heads, chunks, 2]: reference, sum
  int64_t query_stride;    // elements from token to token
  int64_t table_width;
  float scale;  // of scores, times log2(e); with a cap, times 2 log2(e) / softcap
  float cap;    // softcap * log2(e), or 0 for none
  FloatType type;
  bool e3m4;  // what codes are of, if not E4M3
  int32_t k_scale_stride;
  int32_t v_scale_stride;
  int32_t sequences;
  int32_t kv_heads;
  int32_t group;  // query heads per KV head
  int32_t block_size;
  int32_t block_shift;  // its logarithm, or -1 if it is no power of two
  int32_t window;  // 0: none
  int32_t chunks;  // of the longest sequence that the tables have room for
  int32_t tile_tokens;
  int32_t tile_heads;
  int32_t head_tiles;  // tiles that the group is cut into
};

// A kernel of attention.cuh: which calls it is for, and how it is launched.
struct AttentionKernel {
  void (*attend)(AttentionCall);
  int head_dim;
  int rows;   // of a tile, at most
  int chunk;  // keys
  int threads;
  int shared_bytes;
};

// For caches of one type, ascending in head_dim and rows; attention_<type>.cu. Those of a head_dim
// give the same bits.
std::span<const AttentionKernel> e4m3_attention_kernels();
std::span<const AttentionKernel> e3m4_attention_kernels();
std::span<const AttentionKernel> bfloat16_attention_kernels();
std::span<const AttentionKernel> float16_attention_kernels();

// Blocks of one warp, one for each token and head; arguments: call, keys of a chunk, head_dim.
using FoldKernel = void (*)(AttentionCall, int, int);
FoldKernel attention_fold_kernel();

// Blocks of kPlainThreads, one for each token and head; arguments: call, head_dim.
using PlainKernel = void (*)(AttentionCall, int);
PlainKernel attention_plain_kernel(WeightFormat cache, int64_t head_dim);
constexpr int kPlainThreads = 128;
constexpr int64_t kMostPlainHeadDim = 512;

}  // namespace quantkit::cuda
