// decoder_step: all layers of a decoder for a few tokens, in one call. It is made of the same
// kernels as the single ops, rounds where they do, and so gives the same bits.

#include <vector>

#include "buffer.h"
#include "cache_view.h"
#include "linear.h"
#include "ops.h"
#include "step_linear.h"

namespace quantkit {
namespace {

constexpr const char* kOp = "decoder_step";

// Elements below which one thread is done before another has heard of them.
constexpr int64_t kSharedElements = 4 * 1024;

// What the lists hold for each layer, in this order; an empty tensor stands for none.
enum LayerTensor {
  kInputNorm,
  kQkv,  // weight, scale, bias, outlier columns and weight; so are the other three linear layers
  kQueryNorm = kQkv + 5,
  kKeyNorm,
  kOut,
  kPostNorm = kOut + 5,
  kGateUp,
  kDown = kGateUp + 5,
  kAttentionNorm = kDown + 5,  // of what attention adds, and the MLP
  kMlpNorm,
  kLayerTensors,
};
enum CacheTensor { kKeys, kValues, kKeyScale, kValueScale, kCacheTensors };
enum LayerNumber {
  kQkvGroup,
  kOutGroup,
  kGateUpGroup,
  kDownGroup,
  kWindow,
  kRotary,  // number of the angles, from 1; 0 for none
  kLayerNumbers
};

struct Sizes {
  int64_t tokens, hidden, heads, kv_heads, head_dim;
  int64_t angles;  // sets of them
  int64_t turned;  // features of a head that they turn
  FloatType type;

  int64_t item() const { return bytes_of(type); }
  int64_t query() const { return heads * head_dim; }
  int64_t qkv() const { return (heads + 2 * kv_heads) * head_dim; }
};

// The weight of a norm; without data there is no norm.
struct NormWeight {
  const void* data = nullptr;
  FloatType type = FloatType::kFloat32;
  int64_t features = 0;
};

// One layer, checked.
struct Layer {
  NormWeight input_norm, query_norm, key_norm, post_norm, attention_norm, mlp_norm;
  LinearTask qkv, out, gate_up, down;
  CacheView cache;
  int64_t window;
  int64_t angles;  // which set, from 1; 0 for no rotation
};

// What is the same in all layers.
struct Step {
  Sizes sizes;
  float eps;
  float softmax_scale;
  float softcap;       // of attention's scores; 0 for none
  const char* cosine;  // [sets, tokens, turned]
  const char* sine;
  const int64_t* slots;
  AttentionBatch batch;
};

// Activations of one layer, a row for every token.
struct Workspace {
  Buffer memory;
  char *hidden, *normed, *qkv, *attended, *inner, *delta;

  Workspace(const Sizes& sizes, int64_t inner_size) {
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
};

NormWeight norm_weight(const Tensor& weight, int64_t features, const Tensor& hidden) {
  if (weight.numel() == 0) return {};
  check_shape(kOp, "norm", weight, "[features]", {features});
  check_layout(kOp, "norm", weight);
  const FloatType type = float_type(kOp, "norm", weight.scalar_type());
  if (type != FloatType::kFloat32) check_same_dtype(kOp, "norm", weight, hidden);
  return {weight.const_data_ptr(), type, features};
}

// Of each head, or of all heads together.
NormWeight head_norm_weight(const Tensor& weight, int64_t heads, int64_t head_dim,
                            const Tensor& hidden) {
  const bool together = weight.numel() == heads * head_dim;
  return norm_weight(weight, together ? heads * head_dim : head_dim, hidden);
}

Layer checked_layer(const Tensor* weights, const Tensor* caches, const int64_t* numbers,
                    const Sizes& sizes, const Tensor& hidden, Activation activation) {
  Layer layer{};
  layer.input_norm = norm_weight(weights[kInputNorm], sizes.hidden, hidden);
  layer.query_norm = head_norm_weight(weights[kQueryNorm], sizes.heads, sizes.head_dim, hidden);
  layer.key_norm = head_norm_weight(weights[kKeyNorm], sizes.kv_heads, sizes.head_dim, hidden);
  layer.post_norm = norm_weight(weights[kPostNorm], sizes.hidden, hidden);
  layer.attention_norm = norm_weight(weights[kAttentionNorm], sizes.hidden, hidden);
  layer.mlp_norm = norm_weight(weights[kMlpNorm], sizes.hidden, hidden);
  const auto linear = [&](LayerTensor at, LayerNumber group, int64_t rows, int64_t columns) {
    return step_linear(kOp, weights + at, numbers[group], rows, columns, sizes.type);
  };
  layer.qkv = linear(kQkv, kQkvGroup, sizes.qkv(), sizes.hidden);
  layer.out = linear(kOut, kOutGroup, sizes.hidden, sizes.query());
  layer.gate_up = linear(kGateUp, kGateUpGroup, -1, sizes.hidden);
  layer.gate_up.activation = activation;
  layer.down = linear(kDown, kDownGroup, sizes.hidden, layer.gate_up.weight.rows / 2);
  const bool scaled = caches[kKeyScale].numel() > 0;
  layer.cache =
      cache_view(kOp, caches[kKeys], caches[kValues], scaled ? caches + kKeyScale : nullptr,
                 scaled ? caches + kValueScale : nullptr);
  check_shape(kOp, "k_cache", caches[kKeys], "[blocks, block_size, kv_heads, head_dim]",
              {-1, -1, sizes.kv_heads, sizes.head_dim});
  layer.window = numbers[kWindow];
  layer.angles = numbers[kRotary];
  if (layer.angles < 0 || layer.angles > sizes.angles) {
    fail(kOp, "rotary", "the number of a set of angles, or 0", std::to_string(layer.angles));
  }
  return layer;
}

// hidden += delta unless null; out = rms_norm(hidden) * weight. Returns where what follows reads:
// out, or hidden where there is no norm.
char* norm(const Step& step, char* hidden, const char* delta, const NormWeight& weight, char* out,
          Team& team) {
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

// Norm of what is about to be added to hidden, in place.
void norm_delta(const Step& step, char* delta, const NormWeight& weight, Team& team) {
  if (weight.data != nullptr) norm(step, delta, nullptr, weight, delta, team);
}

// Norms of the heads of each token, or of all its heads together, in place.
void norm_heads(const Step& step, char* first, int64_t heads, const NormWeight& weight) {
  if (weight.data == nullptr) return;
  const Sizes& sizes = step.sizes;
  for (int64_t token = 0; token < sizes.tokens; ++token) {
    char* x = first + token * sizes.qkv() * sizes.item();
    const NormTask task{x,          nullptr,     nullptr,         weight.data, x,
                        sizes.type, weight.type, weight.features, step.eps};
    cpu_kernels().rms_norm(task, 0, heads * sizes.head_dim / weight.features);
  }
}

void append(const Step& step, AppendTask task, const char* rows) {
  task.x = rows;
  task.type = step.sizes.type;
  task.x_stride = step.sizes.qkv();
  task.slots = step.slots;
  cpu_kernels().append(task, 0, step.sizes.tokens);
}

// From q, k and v to what the output projection reads.
void attention(const Step& step, const Layer& layer, const Tensor& tables, const Workspace& work,
               Team& team) {
  const Sizes& sizes = step.sizes;
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
  AttentionTask task = layer.cache.attention(tables, sizes.heads);
  task.query = work.qkv;
  task.type = sizes.type;
  task.query_stride = sizes.qkv();
  task.out = work.attended;
  task.softmax_scale = step.softmax_scale;
  task.window = layer.window;
  task.softcap = step.softcap;
  run_attention(task, step.batch, cpu_kernels(), team);
}

void run_layer(const Step& step, const Layer& layer, const Tensor& tables, bool first,
               const Workspace& work, Team& team) {
  const KernelSet& kernels = cpu_kernels();
  const auto rows = [&](const char* x) { return Rows{x, step.sizes.type, step.sizes.tokens}; };
  const auto into = [](LinearTask task, char* out) {
    task.out = out;
    return task;
  };
  const char* x = norm(step, work.hidden, first ? nullptr : work.delta, layer.input_norm,
                       work.normed, team);
  run_linear(into(layer.qkv, work.qkv), rows(x), kernels, team);
  attention(step, layer, tables, work, team);
  run_linear(into(layer.out, work.delta), rows(work.attended), kernels, team);
  norm_delta(step, work.delta, layer.attention_norm, team);
  x = norm(step, work.hidden, work.delta, layer.post_norm, work.normed, team);
  run_gated_linear(into(layer.gate_up, work.inner), rows(x), kernels, team);
  run_linear(into(layer.down, work.delta), rows(work.inner), kernels, team);
  norm_delta(step, work.delta, layer.mlp_norm, team);
}

// The size of a head is the caches'; every layer's is compared with it.
Sizes checked_sizes(const Tensor& hidden, int64_t heads, int64_t kv_heads, const Tensor& keys,
                    const Tensor& cosine, const Tensor& sine) {
  check_shape(kOp, "hidden", hidden, "[num_tokens, hidden]", {-1, -1});
  check_layout(kOp, "hidden", hidden);
  if (kv_heads < 1 || heads < kv_heads || heads % kv_heads != 0) {
    fail(kOp, "heads", "a multiple of kv_heads", std::to_string(heads));
  }
  check_shape(kOp, "k_cache", keys, "[blocks, block_size, kv_heads, head_dim]",
              {-1, -1, kv_heads, -1});
  check_shape(kOp, "cos", cosine, "[sets * num_tokens, rotary_dim]", {-1, -1});
  const int64_t turned = checked_angles(kOp, cosine, sine, keys.size(3), hidden);
  const int64_t tokens = hidden.size(0);
  // Without tokens any number of sets is empty.
  const int64_t sets = tokens > 0 ? cosine.size(0) / tokens : INT32_MAX;
  if (sets < 1 || sets * tokens != cosine.size(0)) {
    fail(kOp, "cos", "[sets * num_tokens, rotary_dim]", shape_text(cosine.sizes()));
  }
  return {tokens,
          hidden.size(1),
          heads,
          kv_heads,
          keys.size(3),
          sets,
          turned,
          float_type(kOp, "hidden", hidden.scalar_type())};
}

}  // namespace

Tensor decoder_step(Tensor hidden, std::vector<Tensor> weights, std::vector<Tensor> caches,
                    std::vector<int64_t> numbers, Tensor final_norm, Tensor cos, Tensor sin,
                    Tensor slots, Tensor block_tables, Tensor lengths, Tensor query_starts,
                    int64_t heads, int64_t kv_heads, double eps, double softmax_scale,
                    std::string activation, std::optional<double> softcap) {
  const size_t count = weights.size() / kLayerTensors;
  if (count == 0 || weights.size() != count * kLayerTensors ||
      caches.size() != count * kCacheTensors || numbers.size() != count * kLayerNumbers) {
    fail(kOp, "weights, caches and numbers", "26, 4 and 6 a layer",
         std::to_string(weights.size()) + ", " + std::to_string(caches.size()) + " and " +
             std::to_string(numbers.size()));
  }
  const Sizes sizes = checked_sizes(hidden, heads, kv_heads, caches[kKeys], cos, sin);
  const Activation act = activation_named(kOp, activation);
  std::vector<Layer> layers;
  layers.reserve(count);
  int64_t inner = 0;
  for (size_t i = 0; i < count; ++i) {
    layers.push_back(checked_layer(&weights[i * kLayerTensors], &caches[i * kCacheTensors],
                                   &numbers[i * kLayerNumbers], sizes, hidden, act));
    inner = std::max(inner, layers.back().down.weight.columns);
    if (layers.back().cache.slots() != layers[0].cache.slots()) {
      fail(kOp, "caches", "of one size", std::to_string(layers.back().cache.slots()) + " slots");
    }
  }
  Tensor out = torch::stable::new_empty(hidden, hidden.sizes());
  if (out.numel() == 0) return out;
  const CacheView& cache = layers[0].cache;
  const Step step{sizes,
                  static_cast<float>(eps),
                  static_cast<float>(softmax_scale),
                  checked_softcap(kOp, softcap),
                  static_cast<const char*>(cos.const_data_ptr()),
                  static_cast<const char*>(sin.const_data_ptr()),
                  checked_slots(kOp, slots, sizes.tokens, cache),
                  checked_batch(kOp, block_tables, lengths, query_starts, sizes.tokens, cache)};
  const Workspace work(sizes, inner);
  __builtin_memcpy(work.hidden, hidden.const_data_ptr(),
                   sizes.tokens * sizes.hidden * sizes.item());
  const NormWeight last_norm = norm_weight(final_norm, sizes.hidden, hidden);
  auto* result = static_cast<char*>(out.mutable_data_ptr());
  Team::run(0, cpu_kernels(), [&](Team& team) {
    for (size_t i = 0; i < count; ++i) run_layer(step, layers[i], block_tables, i == 0, work, team);
    norm(step, work.hidden, work.delta, last_norm, result, team);
  });
  return out;
}

}  // namespace quantkit
