#include "decoder_layers.h"

namespace quantkit {
namespace {

// Elements below which one thread is done before another has heard of them.
constexpr int64_t kSharedElements = 4 * 1024;

// What the lists hold for each layer, in this order; an empty tensor stands for none.
enum LayerTensor {
  kInputNorm,
  kQkv,  // weight, scale, bias, outlier columns and weight; so are the other three linear layers
  kQueryNorm = kQkv + kLinearTensors,
  kKeyNorm,
  kOut,
  kPostNorm = kOut + kLinearTensors,
  kGateUp,
  kDown = kGateUp + kLinearTensors,
  kAttentionNorm = kDown + kLinearTensors,  // of what attention adds, and the MLP
  kMlpNorm
};
static_assert(kMlpNorm + 1 == kLayerTensors);
enum CacheTensor { kKeys, kValues, kKeyScale, kValueScale };
static_assert(kValueScale + 1 == kCacheTensors);
enum LayerNumber {
  kQkvGroup,
  kOutGroup,
  kGateUpGroup,
  kDownGroup,
  kWindow,
  kRotary  // number of the angles, from 1; 0 for none
};
static_assert(kRotary + 1 == kLayerNumbers);

// Of each head, or of all heads together.
NormWeight head_norm_weight(const char* op, const Tensor& weight, int64_t heads, int64_t head_dim,
                            const Tensor& x) {
  const bool together = weight.numel() == heads * head_dim;
  return norm_weight(op, weight, together ? heads * head_dim : head_dim, x);
}

// Norm of what is about to be added to hidden, in place.
void norm_delta(const DecoderStep& step, char* delta, const NormWeight& weight, Team& team) {
  if (weight.data != nullptr) step_norm(step, delta, nullptr, weight, delta, team);
}

// Norms of the heads of each token, or of all its heads together, in place.
void norm_heads(const DecoderStep& step, char* first, int64_t heads, const NormWeight& weight) {
  if (weight.data == nullptr) return;
  const DecoderSizes& sizes = step.sizes;
  for (int64_t token = 0; token < sizes.tokens; ++token) {
    char* x = first + token * sizes.qkv() * sizes.item();
    const NormTask task{x,          nullptr,     nullptr,         weight.data, x,
                        sizes.type, weight.type, weight.features, step.eps};
    cpu_kernels().rms_norm(task, 0, heads * sizes.head_dim / weight.features);
  }
}

void append(const DecoderStep& step, AppendTask task, const char* rows) {
  task.x = rows;
  task.type = step.sizes.type;
  task.x_stride = step.sizes.qkv();
  task.slots = step.slots;
  cpu_kernels().append(task, 0, step.sizes.tokens);
}

Rows rows_of(const DecoderStep& step, const char* x) {
  return {x, step.sizes.type, step.sizes.tokens};
}

LinearTask into(LinearTask task, char* out) {
  task.out = out;
  return task;
}

}  // namespace

DecoderWorkspace::DecoderWorkspace(const DecoderSizes& sizes, int64_t inner_size) {
  const int64_t widths[] = {sizes.hidden,  sizes.hidden, sizes.qkv(),
                            sizes.query(), inner_size,   sizes.hidden};
  char** const targets[] = {&hidden, &normed, &qkv, &attended, &inner, &delta};
  int64_t offsets[7] = {};
  for (int i = 0; i < 6; ++i) {
    offsets[i + 1] = offsets[i] + (sizes.tokens * widths[i] * sizes.item() + 63) / 64 * 64;
  }
  memory = aligned_buffer(offsets[6] / static_cast<int64_t>(sizeof(float)));
  for (int i = 0; i < 6; ++i) *targets[i] = reinterpret_cast<char*>(memory.get()) + offsets[i];
}

NormWeight norm_weight(const char* op, const Tensor& weight, int64_t features, const Tensor& x) {
  if (weight.numel() == 0) return {};
  check_shape(op, "norm", weight, "[features]", {features});
  check_layout(op, "norm", weight);
  const FloatType type = float_type(op, "norm", weight.scalar_type());
  if (type != FloatType::kFloat32) check_same_dtype(op, "norm", weight, x);
  return {weight.const_data_ptr(), type, features};
}

DecoderSizes checked_sizes(const char* op, const Tensor& hidden, int64_t heads, int64_t kv_heads,
                           const Tensor& keys) {
  check_shape(op, "hidden", hidden, "[num_tokens, hidden]", {-1, -1});
  check_layout(op, "hidden", hidden);
  if (kv_heads < 1 || heads < kv_heads || heads % kv_heads != 0) {
    fail(op, "heads", "a multiple of kv_heads", std::to_string(heads));
  }
  check_shape(op, "k_cache", keys, "[blocks, block_size, kv_heads, head_dim]",
              {-1, -1, kv_heads, -1});
  DecoderSizes sizes{};
  sizes.tokens = hidden.size(0);
  sizes.hidden = hidden.size(1);
  sizes.heads = heads;
  sizes.kv_heads = kv_heads;
  sizes.head_dim = keys.size(3);
  sizes.type = float_type(op, "hidden", hidden.scalar_type());
  return sizes;
}

DecoderLayer checked_layer(const char* op, const Tensor* weights, const Tensor* caches,
                           const int64_t* numbers, const DecoderSizes& sizes, const Tensor& hidden,
                           Activation activation) {
  DecoderLayer layer{};
  const auto norm = [&](LayerTensor at) {
    return norm_weight(op, weights[at], sizes.hidden, hidden);
  };
  const auto head_norm = [&](LayerTensor at, int64_t heads) {
    return head_norm_weight(op, weights[at], heads, sizes.head_dim, hidden);
  };
  const auto linear = [&](LayerTensor at, LayerNumber group, int64_t rows, int64_t columns) {
    return step_linear(op, weights + at, numbers[group], rows, columns, sizes.type);
  };
  layer.input_norm = norm(kInputNorm);
  layer.query_norm = head_norm(kQueryNorm, sizes.heads);
  layer.key_norm = head_norm(kKeyNorm, sizes.kv_heads);
  layer.post_norm = norm(kPostNorm);
  layer.attention_norm = norm(kAttentionNorm);
  layer.mlp_norm = norm(kMlpNorm);
  layer.qkv = linear(kQkv, kQkvGroup, sizes.qkv(), sizes.hidden);
  layer.out = linear(kOut, kOutGroup, sizes.hidden, sizes.query());
  layer.gate_up = linear(kGateUp, kGateUpGroup, -1, sizes.hidden);
  layer.gate_up.activation = activation;
  layer.down = linear(kDown, kDownGroup, sizes.hidden, layer.gate_up.weight.rows / 2);
  const bool scaled = caches[kKeyScale].numel() > 0;
  layer.cache =
      cache_view(op, caches[kKeys], caches[kValues], scaled ? caches + kKeyScale : nullptr,
                 scaled ? caches + kValueScale : nullptr);
  check_shape(op, "k_cache", caches[kKeys], "[blocks, block_size, kv_heads, head_dim]",
              {-1, -1, sizes.kv_heads, sizes.head_dim});
  layer.window = numbers[kWindow];
  layer.angles = numbers[kRotary];
  if (layer.angles < 0 || layer.angles > sizes.angles) {
    fail(op, "rotary", "the number of a set of angles, or 0", std::to_string(layer.angles));
  }
  return layer;
}

char* step_norm(const DecoderStep& step, char* hidden, const char* delta, const NormWeight& weight,
                char* out, Team& team) {
  const NormTask task{hidden,          delta,       hidden,            weight.data, out,
                      step.sizes.type, weight.type, step.sizes.hidden, step.eps};
  const KernelSet& kernels = cpu_kernels();
  if (step.sizes.tokens * step.sizes.hidden < kSharedElements) {
    kernels.rms_norm(task, 0, step.sizes.tokens);
  } else {
    team.for_each(step.sizes.tokens,
                  [&](int64_t token, int64_t) { kernels.rms_norm(task, token, token + 1); });
  }
  return weight.data == nullptr ? hidden : out;
}

void run_projections(const DecoderStep& step, const DecoderLayer& layer, bool first,
                     const DecoderWorkspace& work, Team& team) {
  const DecoderSizes& sizes = step.sizes;
  const char* x = step_norm(step, work.hidden, first ? nullptr : work.delta, layer.input_norm,
                            work.normed, team);
  run_linear(into(layer.qkv, work.qkv), rows_of(step, x), cpu_kernels(), team);
  char* keys = work.qkv + sizes.query() * sizes.item();
  char* values = keys + sizes.kv_heads * sizes.head_dim * sizes.item();
  norm_heads(step, work.qkv, sizes.heads, layer.query_norm);
  norm_heads(step, keys, sizes.kv_heads, layer.key_norm);
  if (layer.angles > 0) {
    const int64_t at = (layer.angles - 1) * sizes.tokens * sizes.turned * sizes.item();
    const RotaryTask task{work.qkv,    work.qkv,    step.cosine + at, step.sine + at, sizes.type,
                          sizes.qkv(), sizes.qkv(), sizes.heads + sizes.kv_heads,
                          sizes.head_dim, sizes.turned};
    cpu_kernels().rotary(task, 0, sizes.tokens);
  }
  append(step, layer.cache.append_keys(), keys);
  append(step, layer.cache.append_values(), values);
}

void run_attention_and_mlp(const DecoderStep& step, const DecoderLayer& layer,
                           const DecoderWorkspace& work, Team& team) {
  const KernelSet& kernels = cpu_kernels();
  AttentionTask task = layer.cache.attention(*step.block_tables, step.sizes.heads);
  task.query = work.qkv;
  task.type = step.sizes.type;
  task.query_stride = step.sizes.qkv();
  task.out = work.attended;
  task.softmax_scale = step.softmax_scale;
  task.window = layer.window;
  task.softcap = step.softcap;
  run_attention(task, step.batch, kernels, team);
  run_linear(into(layer.out, work.delta), rows_of(step, work.attended), kernels, team);
  norm_delta(step, work.delta, layer.attention_norm, team);
  const char* x = step_norm(step, work.hidden, work.delta, layer.post_norm, work.normed, team);
  run_gated_linear(into(layer.gate_up, work.inner), rows_of(step, x), kernels, team);
  run_linear(into(layer.down, work.delta), rows_of(step, work.inner), kernels, team);
  norm_delta(step, work.delta, layer.mlp_norm, team);
}

}  // namespace quantkit
