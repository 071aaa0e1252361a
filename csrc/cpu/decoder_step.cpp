// decoder_step: all layers of a decoder for a few tokens, in one call.

#include <algorithm>

#include "decoder_layers.h"
#include "ops.h"

namespace quantkit {
namespace {

constexpr const char* kOp = "decoder_step";

// Of the angles: how many sets there are, and the features of a head that they turn.
void check_step_angles(const Tensor& cos, const Tensor& sin, const Tensor& hidden,
                       DecoderSizes& sizes) {
  check_shape(kOp, "cos", cos, "[sets * num_tokens, rotary_dim]", {-1, -1});
  sizes.turned = checked_angles(kOp, cos, sin, sizes.head_dim, hidden);
  // Without tokens any number of sets is empty.
  sizes.angles = sizes.tokens > 0 ? cos.size(0) / sizes.tokens : INT32_MAX;
  if (sizes.angles < 1 || sizes.angles * sizes.tokens != cos.size(0)) {
    fail(kOp, "cos", "[sets * num_tokens, rotary_dim]", shape_text(cos.sizes()));
  }
}

std::vector<DecoderLayer> checked_layers(const std::vector<Tensor>& weights,
                                         const std::vector<Tensor>& caches,
                                         const std::vector<int64_t>& numbers,
                                         const DecoderSizes& sizes, const Tensor& hidden,
                                         Activation activation) {
  std::vector<DecoderLayer> layers;
  const size_t count = weights.size() / kLayerTensors;
  layers.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    layers.push_back(checked_layer(kOp, &weights[i * kLayerTensors], &caches[i * kCacheTensors],
                                   &numbers[i * kLayerNumbers], sizes, hidden, activation));
    if (layers.back().cache.slots() != layers[0].cache.slots()) {
      fail(kOp, "caches", "of one size", std::to_string(layers.back().cache.slots()) + " slots");
    }
  }
  return layers;
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
  DecoderSizes sizes = checked_sizes(kOp, hidden, heads, kv_heads, caches[0]);
  check_step_angles(cos, sin, hidden, sizes);
  const std::vector<DecoderLayer> layers = checked_layers(
      weights, caches, numbers, sizes, hidden, activation_named(kOp, activation));
  int64_t inner = 0;
  for (const DecoderLayer& layer : layers) inner = std::max(inner, layer.inner());
  Tensor out = torch::stable::new_empty(hidden, hidden.sizes());
  if (out.numel() == 0) return out;
  const CacheView& cache = layers[0].cache;
  const DecoderStep step{
      sizes,
      static_cast<float>(eps),
      static_cast<float>(softmax_scale),
      checked_softcap(kOp, softcap),
      static_cast<const char*>(cos.const_data_ptr()),
      static_cast<const char*>(sin.const_data_ptr()),
      checked_slots(kOp, slots, sizes.tokens, cache),
      &block_tables,
      checked_batch(kOp, block_tables, lengths, query_starts, sizes.tokens, cache)};
  const DecoderWorkspace work(sizes, inner);
  __builtin_memcpy(work.hidden, hidden.const_data_ptr(),
                   sizes.tokens * sizes.hidden * sizes.item());
  const NormWeight last_norm = norm_weight(kOp, final_norm, sizes.hidden, hidden);
  auto* result = static_cast<char*>(out.mutable_data_ptr());
  Team::run(0, cpu_kernels(), [&](Team& team) {
    for (size_t i = 0; i < count; ++i) {
      run_projections(step, layers[i], i == 0, work, team);
      run_attention_and_mlp(step, layers[i], work, team);
    }
    step_norm(step, work.hidden, work.delta, last_norm, result, team);
  });
  return out;
}

}  // namespace quantkit
