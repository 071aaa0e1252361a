// Checks of the KV cache and of what points into it.

#include "cache_view.h"

namespace quantkit {
namespace {

// Codes if and only if there is a scale: E4M3, or bytes, which are E3M4.
WeightFormat cache_format(const char* op, const char* name, const Tensor& cache, bool scaled) {
  check_shape(op, name, cache, "[blocks, block_size, kv_heads, head_dim]", {-1, -1, -1, -1});
  check_layout(op, name, cache);
  const ScalarType type = cache.scalar_type();
  const bool is_e3m4 = type == ScalarType::Byte;
  if (scaled != (is_e3m4 || type == ScalarType::Float8_e4m3fn)) {
    fail(op, "the cache", "float8_e4m3fn or uint8 if and only if there are scales",
         dtype_text(type));
  }
  if (!scaled) return stored_format(float_type(op, name, type));
  return is_e3m4 ? WeightFormat::kE3M4 : WeightFormat::kE4M3;
}

// Per head or for all: the distance from one head's scale to the next.
int64_t scale_stride(const char* op, const char* name, const Tensor& scale, int64_t heads) {
  if (scale.scalar_type() != ScalarType::Float) {
    fail(op, name, "float32", dtype_text(scale.scalar_type()));
  }
  check_layout(op, name, scale);
  if (scale.numel() != 1 && scale.numel() != heads) {
    fail(op, name, "1 or " + std::to_string(heads) + " numbers", std::to_string(scale.numel()));
  }
  return scale.numel() == 1 ? 0 : 1;
}

const int32_t* index_data(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.scalar_type() != ScalarType::Int) {
    fail(op, name, "int32", dtype_text(tensor.scalar_type()));
  }
  check_layout(op, name, tensor);
  return static_cast<const int32_t*>(tensor.const_data_ptr());
}

bool table_fits(const int32_t* table, int64_t used, int64_t width, int64_t blocks) {
  if (used > width) return false;
  for (int64_t i = 0; i < used; ++i) {
    if (table[i] < 0 || table[i] >= blocks) return false;
  }
  return true;
}

}  // namespace

AppendTask CacheView::append_keys() const {
  AppendTask task{};
  task.cache = keys;
  task.cache_type = type;
  task.scale = k_scale;
  task.scale_stride = k_scale_stride;
  task.heads = heads;
  task.head_dim = head_dim;
  return task;
}

AppendTask CacheView::append_values() const {
  AppendTask task = append_keys();
  task.cache = values;
  task.scale = v_scale;
  task.scale_stride = v_scale_stride;
  return task;
}

AttentionTask CacheView::attention(const Tensor& block_tables, int64_t query_heads) const {
  AttentionTask task{};
  task.keys = keys;
  task.values = values;
  task.cache_type = type;
  task.k_scale = k_scale;
  task.v_scale = v_scale;
  task.k_scale_stride = k_scale_stride;
  task.v_scale_stride = v_scale_stride;
  task.tables = static_cast<const int32_t*>(block_tables.const_data_ptr());
  task.max_blocks = block_tables.size(1);
  task.kv_heads = heads;
  task.group = query_heads / heads;
  task.head_dim = head_dim;
  task.block_size = block_size;
  return task;
}

CacheView cache_view(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                     const Tensor* k_scale, const Tensor* v_scale) {
  CacheView view{};
  view.type = cache_format(op, "k_cache", k_cache, k_scale != nullptr);
  cache_format(op, "v_cache", v_cache, v_scale != nullptr);
  view.blocks = k_cache.size(0);
  view.block_size = k_cache.size(1);
  view.heads = k_cache.size(2);
  view.head_dim = k_cache.size(3);
  check_shape(op, "v_cache", v_cache, "k_cache's",
              {view.blocks, view.block_size, view.heads, view.head_dim});
  if (v_cache.scalar_type() != k_cache.scalar_type()) {
    fail(op, "v_cache", "of k_cache's dtype", dtype_text(v_cache.scalar_type()));
  }
  if (k_scale != nullptr) {
    view.k_scale_stride = scale_stride(op, "k_scale", *k_scale, view.heads);
    view.v_scale_stride = scale_stride(op, "v_scale", *v_scale, view.heads);
    view.k_scale = static_cast<const float*>(k_scale->const_data_ptr());
    view.v_scale = static_cast<const float*>(v_scale->const_data_ptr());
  }
  // Ops that only read the cache declare it so; one view serves both kinds.
  view.keys = static_cast<uint8_t*>(const_cast<void*>(k_cache.const_data_ptr()));
  view.values = static_cast<uint8_t*>(const_cast<void*>(v_cache.const_data_ptr()));
  return view;
}

const int64_t* checked_slots(const char* op, const Tensor& slots, int64_t tokens,
                             const CacheView& cache) {
  return checked_indices(op, "slots", slots, "[num_tokens]", tokens, cache.slots());
}

AttentionBatch checked_batch(const char* op, const Tensor& block_tables, const Tensor& lengths,
                             const Tensor& query_starts, int64_t rows, const CacheView& cache) {
  const int32_t* table = index_data(op, "block_tables", block_tables);
  const AttentionBatch batch{index_data(op, "lengths", lengths),
                             index_data(op, "query_starts", query_starts), lengths.numel()};
  const int64_t sequences = batch.sequences;
  check_shape(op, "lengths", lengths, "[num_sequences]", {sequences});
  check_shape(op, "block_tables", block_tables, "[num_sequences, max_blocks]", {sequences, -1});
  check_shape(op, "query_starts", query_starts, "[num_sequences + 1]", {sequences + 1});
  const int64_t width = block_tables.size(1);
  bool fits = batch.starts[0] == 0 && batch.starts[sequences] == rows;
  for (int64_t s = 0; s < sequences && fits; ++s) {
    const int64_t count = batch.starts[s + 1] - batch.starts[s];
    const int64_t used = (batch.lengths[s] + cache.block_size - 1) / cache.block_size;
    fits = count >= 0 && count <= batch.lengths[s] &&
           table_fits(table + s * width, used, width, cache.blocks);
  }
  if (!fits) {
    fail(op, "block_tables, lengths and query_starts", "within the cache and the query",
         "sequences that are not");
  }
  return batch;
}

float checked_softcap(const char* op, std::optional<double> softcap) {
  if (softcap.has_value() && !(*softcap > 0)) {
    fail(op, "softcap", "above 0", std::to_string(*softcap));
  }
  return static_cast<float>(softcap.value_or(0));
}

}  // namespace quantkit
