// kv_append, rotary_append and kv_gather: checks and launches.

#include "kv_cache.cuh"

#include "cache_view.h"
#include "launch_overlapped.h"
#include "ops.h"

namespace quantkit::cuda {
namespace {

using MaybeTensor = std::optional<Tensor>;

// Launches what kv_cache.cuh picks. All its kernels wait for the one before them.
class Start {
 public:
  explicit Start(const Launch& launch) : launch_(launch) {}

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 grid, int threads,
                  const Arguments&... arguments) const {
    launch_overlapped(launch_.properties().architecture >= 90, kernel, grid, threads, 0,
                      launch_.stream(), arguments...);
    launch_.check();
  }

 private:
  const Launch& launch_;
};

// Calls use(type) with the type of a cache's elements.
template <class Use>
void with_cache_type(WeightFormat type, const Use& use) {
  switch (type) {
    case WeightFormat::kFloat32: return use(float{});
    case WeightFormat::kBFloat16: return use(BFloat16{});
    case WeightFormat::kFloat16: return use(Half{});
    case WeightFormat::kE3M4: return use(E3M4{});
    default: return use(E4M3{});
  }
}

bool are_aligned(const CacheView& cache) {
  return cache.head_dim % kChunk == 0 && is_aligned(cache.keys) && is_aligned(cache.values);
}

void check_rows_of(const char* op, const char* name, const Tensor& x, int64_t tokens,
                   const CacheView& cache) {
  check_shape(op, name, x, "[num_tokens, kv_heads, head_dim]",
              {tokens, cache.heads, cache.head_dim});
  check_rows(op, name, x);
}

// A norm's weight, which may be absent. Returns whether it is wider than x.
bool check_norm(const char* op, const char* name, const MaybeTensor& weight, const Tensor& x,
                int64_t head_dim) {
  if (!weight.has_value()) return false;
  check_shape(op, name, *weight, "[head_dim]", {head_dim});
  check_layout(op, name, *weight);
  check_norm_weight(op, name, *weight, x);
  return weight->scalar_type() != x.scalar_type();
}

}  // namespace

void kv_append(Tensor key, Tensor value, Tensor k_cache, Tensor v_cache, MaybeTensor k_scale,
               MaybeTensor v_scale, Tensor slots) {
  const char* op = "kv_append";
  const CacheView cache = cache_view(op, k_cache, v_cache, k_scale, v_scale);
  const int64_t tokens = slots.numel();
  check_rows_of(op, "key", key, tokens, cache);
  check_rows_of(op, "value", value, tokens, cache);
  if (value.scalar_type() != key.scalar_type()) {
    fail(op, "value", "of key's dtype, " + dtype_text(key.scalar_type()),
         dtype_text(value.scalar_type()));
  }
  const int64_t* slot_list = slot_data(op, slots, tokens);
  const Launch launch = launch_on(op, key,
                                  {{"value", value},
                                   {"k_cache", k_cache},
                                   {"v_cache", v_cache},
                                   {"k_scale", k_scale},
                                   {"v_scale", v_scale},
                                   {"slots", slots}});
  if (key.numel() == 0) return;
  with_float_type(op, "key", key.scalar_type(), [&](auto type) {
    using T = decltype(type);
    AppendCall<T> call{.key = data<T>(key),
                       .value = data<T>(value),
                       .key_stride = key.stride(0),
                       .value_stride = value.stride(0),
                       .keys = cache.key_side(),
                       .values = cache.value_side(),
                       .slots = slot_list,
                       .slot_count = cache.slots(),
                       .tokens = tokens,
                       .heads = cache.heads,
                       .head_dim = cache.head_dim};
    call.aligned = are_aligned(cache) && is_aligned(call.key) && is_aligned(call.value) &&
                   call.key_stride % kChunk == 0 && call.value_stride % kChunk == 0;
    with_cache_type(cache.type, [&](auto stored) {
      start_append<decltype(stored)>(call, Start(launch));
    });
  });
}

Tensor rotary_append(Tensor qkv, MaybeTensor q_norm, MaybeTensor k_norm, double eps,
                     MaybeTensor cos, MaybeTensor sin, Tensor k_cache, Tensor v_cache,
                     MaybeTensor k_scale, MaybeTensor v_scale, Tensor slots, int64_t heads) {
  const char* op = "rotary_append";
  const CacheView cache = cache_view(op, k_cache, v_cache, k_scale, v_scale);
  const int64_t tokens = slots.numel();
  if (heads < 0) fail(op, "heads", "at least 0", std::to_string(heads));
  check_shape(op, "qkv", qkv, "[num_tokens, heads + 2 kv_heads, head_dim]",
              {tokens, heads + 2 * cache.heads, cache.head_dim});
  check_layout(op, "qkv", qkv);
  if (cache.head_dim > kMostHeadDim) {
    fail(op, "head_dim", "at most " + std::to_string(kMostHeadDim), std::to_string(cache.head_dim));
  }
  check_both(op, "q_norm", "k_norm", q_norm, k_norm);
  check_both(op, "cos", "sin", cos, sin);
  const bool wide_q_norm = check_norm(op, "q_norm", q_norm, qkv, cache.head_dim);
  const bool wide_k_norm = check_norm(op, "k_norm", k_norm, qkv, cache.head_dim);
  int64_t rotary_dim = 0;
  if (cos.has_value()) {
    rotary_dim = rotary_dim_of(op, *cos, cache.head_dim);
    check_angles(op, "cos", *cos, qkv, rotary_dim);
    check_angles(op, "sin", *sin, qkv, rotary_dim);
  }
  const int64_t* slot_list = slot_data(op, slots, tokens);
  const Launch launch = launch_on(op, qkv,
                                  {{"q_norm", q_norm},
                                   {"k_norm", k_norm},
                                   {"cos", cos},
                                   {"sin", sin},
                                   {"k_cache", k_cache},
                                   {"v_cache", v_cache},
                                   {"k_scale", k_scale},
                                   {"v_scale", v_scale},
                                   {"slots", slots}});
  Tensor query = torch::stable::new_empty(qkv, {tokens, heads, cache.head_dim});
  if (qkv.numel() == 0) return query;
  with_float_type(op, "qkv", qkv.scalar_type(), [&](auto type) {
    using T = decltype(type);
    RotatedCall<T> call{.qkv = data<T>(qkv),
                        .q_norm = address(q_norm),
                        .k_norm = address(k_norm),
                        .cosine = data<T>(cos),
                        .sine = data<T>(sin),
                        .query = mutable_data<T>(query),
                        .keys = cache.key_side(),
                        .values = cache.value_side(),
                        .slots = slot_list,
                        .slot_count = cache.slots(),
                        .tokens = tokens,
                        .heads = heads,
                        .kv_heads = cache.heads,
                        .head_dim = cache.head_dim,
                        .rotary_dim = rotary_dim,
                        .eps = static_cast<float>(eps),
                        .wide_q_norm = wide_q_norm,
                        .wide_k_norm = wide_k_norm};
    call.aligned = are_aligned(cache) && rotary_dim % kChunk == 0 && is_aligned(call.qkv) && is_aligned(call.q_norm) &&
                   is_aligned(call.k_norm) && is_aligned(call.cosine) && is_aligned(call.sine) &&
                   is_aligned(call.query);
    with_cache_type(cache.type, [&](auto stored) {
      start_append_rotated<decltype(stored)>(call, Start(launch));
    });
  });
  return query;
}

Tensor kv_gather(Tensor cache, MaybeTensor scale, Tensor blocks, int64_t length, ScalarType dtype) {
  const char* op = "kv_gather";
  const WeightFormat stored_type = cache_format(op, "cache", cache, scale.has_value());
  const int64_t block_size = cache.size(1), heads = cache.size(2), head_dim = cache.size(3);
  check_shape(op, "blocks", blocks, "[n]", {-1});
  const int32_t* block_list = index_data(op, "blocks", blocks);
  if (length < 0 || length > blocks.numel() * block_size) {
    fail(op, "length", "from 0 to " + std::to_string(blocks.numel() * block_size),
         std::to_string(length));
  }
  if (length * heads * head_dim > INT32_MAX) {
    fail(op, "length", "such that there are at most 2^31 - 1 elements", std::to_string(length));
  }
  GatherCall call{.cache = data<uint8_t>(cache),
                  .scale = data<float>(scale),
                  .blocks = block_list,
                  .length = length,
                  .heads = heads,
                  .head_dim = head_dim,
                  .block_size = block_size};
  if (scale.has_value()) call.scale_stride = scale_stride(op, "scale", *scale, heads);
  const Launch launch = launch_on(op, cache, {{"scale", scale}, {"blocks", blocks}});
  Tensor out = torch::stable::new_empty(cache, {length, heads, head_dim}, dtype);
  if (out.numel() == 0) return out;
  call.out = out.mutable_data_ptr();
  with_float_type(op, "dtype", dtype, [&](auto type) {
    with_cache_type(stored_type, [&](auto stored) {
      start_gather<decltype(stored), decltype(type)>(call, Start(launch));
    });
  });
  return out;
}

}  // namespace quantkit::cuda
