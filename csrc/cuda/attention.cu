// paged_attention: checks, and the kernels for its types and sizes.

#include "attention_plan.h"
#include "cache_view.h"
#include "launch_overlapped.h"
#include "ops.h"

namespace quantkit::cuda {
namespace {

using MaybeTensor = std::optional<Tensor>;

constexpr int kFoldThreads = 32;

bool is_multiple(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// The kernels that read such a cache for such queries: none for types that their instructions
// cannot multiply, or for memory that is not aligned.
std::span<const AttentionKernel> fast_kernels(const AttentionCall& call, WeightFormat cache) {
  const bool aligned = is_multiple(call.keys, 16) && is_multiple(call.values, 16) &&
                       is_multiple(call.query, 8) && call.query_stride % 4 == 0;
  if (!aligned || call.type == FloatType::kFloat32) return {};
  switch (cache) {
    case WeightFormat::kE4M3: return e4m3_attention_kernels();
    case WeightFormat::kE3M4: return e3m4_attention_kernels();
    case WeightFormat::kFloat16: return float16_attention_kernels();
    case WeightFormat::kBFloat16:
      if (call.type == FloatType::kBFloat16) return bfloat16_attention_kernels();
      return {};
    default: return {};
  }
}

// The smallest tiles that hold `rows`, or the largest there are; null for other head dimensions.
const AttentionKernel* pick(std::span<const AttentionKernel> kernels, int64_t head_dim,
                            int64_t rows) {
  const AttentionKernel* picked = nullptr;
  for (const AttentionKernel& kernel : kernels) {
    if (kernel.head_dim != head_dim) continue;
    if (picked == nullptr || picked->rows < rows) picked = &kernel;
  }
  return picked;
}

class Attention {
 public:
  Attention(const Launch& launch, const AttentionSize& size, const Tensor& query)
      : launch_(launch), size_(size), query_(query), rows_(size.tokens * size.kv_heads * size.group) {}

  void run(AttentionCall call, WeightFormat cache) const {
    const AttentionKernel* kernel =
        pick(fast_kernels(call, cache), size_.head_dim, typical_rows(size_));
    if (kernel != nullptr) return run_tiles(call, *kernel);
    start(attention_plain_kernel(cache, size_.head_dim), grid(rows_), kPlainThreads, 0, call,
          static_cast<int>(size_.head_dim));
  }

 private:
  void run_tiles(AttentionCall call, const AttentionKernel& kernel) const {
    const AttentionPlan plan = plan_attention(size_, kernel.rows, kernel.chunk);
    plan.apply(call);
    Tensor partial;
    if (plan.chunk_blocks > 1) {
      const int64_t count = rows_ * plan.chunks;
      partial = torch::stable::new_empty(query_, {count * (size_.head_dim + 2)}, ScalarType::Float);
      call.sums = mutable_data<float>(partial);
      call.weights = call.sums + count * size_.head_dim;
    }
    if (kernel.shared_bytes > 48 * 1024) {
      launch_.allow_shared_memory(kernel.attend, kernel.shared_bytes);
    }
    start(kernel.attend, grid(plan.blocks, plan.chunk_blocks), kernel.threads, kernel.shared_bytes,
          call);
    if (plan.chunk_blocks > 1) {
      start(attention_fold_kernel(), grid(rows_), kFoldThreads, 0, call, kernel.chunk,
            kernel.head_dim);
    }
  }

  static dim3 grid(int64_t x, int64_t y = 1) {
    return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
  }

  template <class... Parameters, class... Arguments>
  void start(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
             const Arguments&... arguments) const {
    launch_overlapped(launch_.properties().architecture >= 90, kernel, grid, threads, shared_bytes,
                      launch_.stream(), arguments...);
    launch_.check();
  }

  const Launch& launch_;
  const AttentionSize& size_;
  const Tensor& query_;
  int64_t rows_;
};

AttentionCall describe(const Tensor& query, const CacheView& cache, const Tensor& block_tables,
                       double softmax_scale, int64_t window) {
  constexpr double kLog2E = 1.4426950408889634;
  AttentionCall call{};
  call.query = query.const_data_ptr();
  call.keys = cache.keys;
  call.values = cache.values;
  call.k_scale = cache.k_scale;
  call.v_scale = cache.v_scale;
  call.k_scale_stride = cache.k_scale_stride;
  call.v_scale_stride = cache.v_scale_stride;
  call.query_stride = query.stride(0);
  call.table_width = block_tables.size(1);
  call.scale = static_cast<float>(softmax_scale * kLog2E);
  call.e3m4 = cache.type == WeightFormat::kE3M4;
  call.type = float_type("paged_attention", "query", query.scalar_type());
  call.sequences = static_cast<int32_t>(block_tables.size(0));
  call.kv_heads = static_cast<int32_t>(cache.heads);
  call.group = static_cast<int32_t>(query.size(1) / cache.heads);
  call.block_size = static_cast<int32_t>(cache.block_size);
  call.block_shift = shift_of(cache.block_size);
  call.window = static_cast<int32_t>(window);
  return call;
}

}  // namespace

Tensor paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, MaybeTensor k_scale,
                       MaybeTensor v_scale, Tensor block_tables, Tensor lengths,
                       Tensor query_starts, double softmax_scale,
                       std::optional<int64_t> sliding_window, std::optional<double> softcap) {
  const char* op = "paged_attention";
  const CacheView cache = cache_view(op, k_cache, v_cache, k_scale, v_scale);
  check_shape(op, "query", query, "[num_tokens, heads, head_dim]", {-1, -1, cache.head_dim});
  check_rows(op, "query", query);
  if (cache.heads == 0 || query.size(1) % cache.heads != 0) {
    fail(op, "query", "a multiple of " + std::to_string(cache.heads) + " KV heads",
         shape_text(query.sizes()));
  }
  if (cache.head_dim > kMostPlainHeadDim) {
    fail(op, "head_dim", "at most " + std::to_string(kMostPlainHeadDim),
         std::to_string(cache.head_dim));
  }
  if (sliding_window.has_value() && *sliding_window < 1) {
    fail(op, "sliding_window", "at least 1", std::to_string(*sliding_window));
  }
  if (softcap.has_value() && !(*softcap > 0)) {
    fail(op, "softcap", "above 0", std::to_string(*softcap));
  }
  const int64_t window = std::min<int64_t>(sliding_window.value_or(0), INT32_MAX);
  const int64_t sequences = lengths.numel();
  const int32_t* tables = index_data(op, "block_tables", block_tables);
  const int32_t* length_data = index_data(op, "lengths", lengths);
  const int32_t* starts = index_data(op, "query_starts", query_starts);
  check_shape(op, "lengths", lengths, "[num_sequences]", {sequences});
  check_shape(op, "block_tables", block_tables, "[num_sequences, max_blocks]", {sequences, -1});
  check_shape(op, "query_starts", query_starts, "[num_sequences + 1]", {sequences + 1});
  const Launch launch = launch_on(op, query,
                                  {{"k_cache", k_cache},
                                   {"v_cache", v_cache},
                                   {"k_scale", k_scale},
                                   {"v_scale", v_scale},
                                   {"block_tables", block_tables},
                                   {"lengths", lengths},
                                   {"query_starts", query_starts}});
  Tensor out = torch::stable::new_empty(query, query.sizes());
  if (out.numel() == 0 || sequences == 0) return out;
  AttentionCall call = describe(query, cache, block_tables, softmax_scale, window);
  if (softcap.has_value()) {
    constexpr double kLog2E = 1.4426950408889634;
    call.scale = static_cast<float>(2 * kLog2E * softmax_scale / *softcap);
    call.cap = static_cast<float>(kLog2E * *softcap);
  }
  call.out = out.mutable_data_ptr();
  call.tables = tables;
  call.lengths = length_data;
  call.starts = starts;
  // A sequence has no block twice, however wide its table.
  const int64_t capacity = std::min(block_tables.size(1), cache.blocks) * cache.block_size;
  const AttentionSize size{.tokens = query.size(0),
                           .sequences = sequences,
                           .kv_heads = cache.heads,
                           .group = query.size(1) / cache.heads,
                           .head_dim = cache.head_dim,
                           .capacity = capacity,
                           .window = window,
                           .multiprocessors = launch.properties().multiprocessors};
  Attention(launch, size, query).run(call, cache.type);
  return out;
}

}  // namespace quantkit::cuda
