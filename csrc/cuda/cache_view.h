// The paged KV cache of one layer as ops receive it: checked once, then raw pointers.
#pragma once

#include "cache_side.cuh"
#include "checks.h"

namespace quantkit::cuda {

struct CacheView {
  WeightFormat type;
  uint8_t* keys;  // [blocks, block_size, heads, head_dim]
  uint8_t* values;
  const float* k_scale;  // null for float caches
  const float* v_scale;
  int32_t k_scale_stride, v_scale_stride;  // 0 for one scale, 1 for one per head
  int64_t blocks, block_size, heads, head_dim;

  int64_t slots() const { return blocks * block_size; }
  CacheSide key_side() const { return {keys, k_scale, k_scale_stride}; }
  CacheSide value_side() const { return {values, v_scale, v_scale_stride}; }
};

// The type of a cache: codes of E4M3, or as uint8 of E3M4, if and only if there is a scale.
inline WeightFormat cache_format(const char* op, const char* name, const Tensor& cache,
                                 bool scaled) {
  check_shape(op, name, cache, "[blocks, block_size, kv_heads, head_dim]", {-1, -1, -1, -1});
  check_layout(op, name, cache);
  const ScalarType type = cache.scalar_type();
  const bool is_e3m4 = type == ScalarType::Byte;
  if (scaled != (is_e3m4 || type == ScalarType::Float8_e4m3fn)) {
    fail(op, "the cache", "float8_e4m3fn or uint8 (E3M4 codes) if and only if there are scales",
         dtype_text(type));
  }
  // Kernels count slots in 32 bits; beside heads that is room for any memory.
  const int64_t slots = cache.size(0) * cache.size(1);
  if (slots > INT32_MAX) fail(op, name, "of at most 2^31 - 1 slots", std::to_string(slots));
  if (scaled) return is_e3m4 ? WeightFormat::kE3M4 : WeightFormat::kE4M3;
  return stored_format(float_type(op, name, type));
}

// Per head or for all: the distance from one head's scale to the next.
inline int32_t scale_stride(const char* op, const char* name, const Tensor& scale, int64_t heads) {
  if (scale.scalar_type() != ScalarType::Float) {
    fail(op, name, "float32", dtype_text(scale.scalar_type()));
  }
  check_layout(op, name, scale);
  if (scale.numel() != 1 && scale.numel() != heads) {
    fail(op, name, "1 or " + std::to_string(heads) + " numbers", std::to_string(scale.numel()));
  }
  return scale.numel() == 1 ? 0 : 1;
}

inline CacheView cache_view(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                            const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale) {
  CacheView view{};
  view.type = cache_format(op, "k_cache", k_cache, k_scale.has_value());
  cache_format(op, "v_cache", v_cache, v_scale.has_value());
  view.blocks = k_cache.size(0);
  view.block_size = k_cache.size(1);
  view.heads = k_cache.size(2);
  view.head_dim = k_cache.size(3);
  check_shape(op, "v_cache", v_cache, "k_cache's",
              {view.blocks, view.block_size, view.heads, view.head_dim});
  if (v_cache.scalar_type() != k_cache.scalar_type()) {
    fail(op, "v_cache", "of k_cache's dtype", dtype_text(v_cache.scalar_type()));
  }
  if (k_scale.has_value()) {
    view.k_scale_stride = scale_stride(op, "k_scale", *k_scale, view.heads);
    view.v_scale_stride = scale_stride(op, "v_scale", *v_scale, view.heads);
    view.k_scale = data<float>(k_scale);
    view.v_scale = data<float>(v_scale);
  }
  // Ops that only read the cache declare it so; one view serves both kinds.
  view.keys = const_cast<uint8_t*>(data<uint8_t>(k_cache));
  view.values = const_cast<uint8_t*>(data<uint8_t>(v_cache));
  return view;
}

// int32 indices; what they are is for the caller to know, as reading them would wait for the GPU.
inline const int32_t* index_data(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.scalar_type() != ScalarType::Int) {
    fail(op, name, "int32", dtype_text(tensor.scalar_type()));
  }
  check_layout(op, name, tensor);
  return data<int32_t>(tensor);
}

inline const int64_t* slot_data(const char* op, const Tensor& slots, int64_t tokens) {
  if (slots.scalar_type() != ScalarType::Long) {
    fail(op, "slots", "int64", dtype_text(slots.scalar_type()));
  }
  check_shape(op, "slots", slots, "[num_tokens]", {tokens});
  check_layout(op, "slots", slots);
  return data<int64_t>(slots);
}

}  // namespace quantkit::cuda
