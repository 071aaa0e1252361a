// kv_append and paged_attention: checks and threads.

#include <algorithm>

#include "cache_view.h"
#include "ops.h"

namespace quantkit {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Elements below which a second thread costs more than it brings.
constexpr int64_t kElementsPerThread = 32 * 1024;

const Tensor* pointer_to(const OptionalTensor& tensor) {
  return tensor.has_value() ? &*tensor : nullptr;
}

void set_rows(const char* op, const char* name, const Tensor& x, int64_t tokens,
              const CacheView& cache, AppendTask* task) {
  check_shape(op, name, x, "[num_tokens, kv_heads, head_dim]",
              {tokens, cache.heads, cache.head_dim});
  check_rows(op, name, x);
  task->x = x.const_data_ptr();
  task->type = float_type(op, name, x.scalar_type());
  task->x_stride = x.stride(0);
}

}  // namespace

void kv_append(Tensor key, Tensor value, Tensor k_cache, Tensor v_cache, OptionalTensor k_scale,
               OptionalTensor v_scale, Tensor slots) {
  const char* op = "kv_append";
  const CacheView cache =
      cache_view(op, k_cache, v_cache, pointer_to(k_scale), pointer_to(v_scale));
  AppendTask keys = cache.append_keys();
  AppendTask values = cache.append_values();
  const int64_t tokens = slots.numel();
  set_rows(op, "key", key, tokens, cache, &keys);
  set_rows(op, "value", value, tokens, cache, &values);
  keys.slots = values.slots = checked_slots(op, slots, tokens, cache);
  const int64_t row = std::max<int64_t>(1, cache.heads * cache.head_dim);
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / row);
  const KernelSet& kernels = cpu_kernels();
  torch::stable::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    kernels.append(keys, begin, end);
    kernels.append(values, begin, end);
  });
}

Tensor paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, OptionalTensor k_scale,
                       OptionalTensor v_scale, Tensor block_tables, Tensor lengths,
                       Tensor query_starts, double softmax_scale,
                       std::optional<int64_t> sliding_window, std::optional<double> softcap) {
  const char* op = "paged_attention";
  const CacheView cache =
      cache_view(op, k_cache, v_cache, pointer_to(k_scale), pointer_to(v_scale));
  check_shape(op, "query", query, "[num_tokens, heads, head_dim]", {-1, -1, cache.head_dim});
  check_rows(op, "query", query);
  if (cache.heads == 0 || query.size(1) % cache.heads != 0) {
    fail(op, "query", "a multiple of " + std::to_string(cache.heads) + " KV heads",
         shape_text(query.sizes()));
  }
  if (sliding_window.has_value() && *sliding_window < 1) {
    fail(op, "sliding_window", "at least 1", std::to_string(*sliding_window));
  }
  const float cap = checked_softcap(op, softcap);
  const AttentionBatch batch =
      checked_batch(op, block_tables, lengths, query_starts, query.size(0), cache);
  Tensor out = torch::stable::new_empty(query, query.sizes());
  if (out.numel() == 0) return out;
  AttentionTask task = cache.attention(block_tables, query.size(1));
  task.query = query.const_data_ptr();
  task.type = float_type(op, "query", query.scalar_type());
  task.query_stride = query.stride(0);
  task.out = out.mutable_data_ptr();
  task.softmax_scale = static_cast<float>(softmax_scale);
  task.softcap = cap;
  task.window = sliding_window.value_or(0);
  const KernelSet& kernels = cpu_kernels();
  Team::run(attention_threads(task, batch), kernels,
            [&](Team& team) { run_attention(task, batch, kernels, team); });
  return out;
}

}  // namespace quantkit
