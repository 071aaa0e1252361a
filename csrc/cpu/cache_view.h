// The paged KV cache of one layer as ops receive it: checked once, then raw pointers.
#pragma once

#include <optional>

#include "attention.h"
#include "checks.h"

namespace quantkit {

struct CacheView {
  WeightFormat type;
  uint8_t* keys;  // [blocks, block_size, heads, head_dim]
  uint8_t* values;
  const float* k_scale;  // null for float caches
  const float* v_scale;
  int64_t k_scale_stride, v_scale_stride;  // 0 for one scale, 1 for one per head
  int64_t blocks, block_size, heads, head_dim;

  int64_t slots() const { return blocks * block_size; }
  // All that follows from the cache; the caller adds the rows.
  AppendTask append_keys() const;
  AppendTask append_values() const;
  AttentionTask attention(const Tensor& block_tables, int64_t query_heads) const;
};

// `k_scale` and `v_scale` may be null pointers.
CacheView cache_view(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                     const Tensor* k_scale, const Tensor* v_scale);

// int64 [tokens], each a slot of the cache.
const int64_t* checked_slots(const char* op, const Tensor& slots, int64_t tokens,
                             const CacheView& cache);

// Every index that the kernels will follow stays within its tensor; `rows` are those of query.
AttentionBatch checked_batch(const char* op, const Tensor& block_tables, const Tensor& lengths,
                             const Tensor& query_starts, int64_t rows, const CacheView& cache);

// As kernels take it: 0 for none.
float checked_softcap(const char* op, std::optional<double> softcap);

}  // namespace quantkit
