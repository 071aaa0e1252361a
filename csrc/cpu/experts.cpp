// expert_mlps: the experts of a mixture-of-experts layer, each applied to the tokens that chose it.

#include <algorithm>

#include "buffer.h"
#include "checks.h"
#include "float16.h"
#include "grouped_linear.h"
#include "ops.h"
#include "step_linear.h"

namespace quantkit {
namespace {

constexpr const char* kOp = "expert_mlps";

// Tokens that are computed at a time; their rows at all stages are in memory.
constexpr int64_t kTokensAtOnce = 1024;
// Features of a token's result that a thread sums at a time.
constexpr int64_t kSummedFeatures = 1024;

struct Expert {
  LinearTask gate_up, down;
};

// Choices of some tokens, sorted by expert and then by token. A choice's slot is its place there.
struct Sorted {
  std::vector<int64_t> starts;  // of each expert's slots, and the end of the last one's
  std::vector<int64_t> tokens;  // of each slot
  std::vector<int64_t> slots;   // of each choice [tokens, chosen]; -1 for no expert

  Sorted(const int64_t* numbers, int64_t count, int64_t chosen, int64_t experts)
      : starts(experts + 1), slots(count * chosen, -1) {
    const auto valid = [&](int64_t number) { return number >= 0 && number < experts; };
    for (int64_t i = 0; i < count * chosen; ++i) {
      if (valid(numbers[i])) ++starts[numbers[i] + 1];
    }
    for (int64_t expert = 0; expert < experts; ++expert) starts[expert + 1] += starts[expert];
    tokens.resize(starts[experts]);
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < count * chosen; ++i) {
      if (!valid(numbers[i])) continue;
      slots[i] = next[numbers[i]]++;
      tokens[slots[i]] = i / chosen;
    }
  }

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

// All that is the same for every token.
struct Layer {
  std::vector<Expert> experts;
  int64_t hidden, inner, chosen;
  FloatType type;          // of x, what is between the two linears, and the result
  FloatType weights_type;  // of the choices
};

struct Choices {
  const char* x;  // [count, hidden]
  const int64_t* numbers;
  const char* weights;  // both [count, chosen]
  int64_t count;
  char* out;  // like x
};

float weight_at(const Layer& layer, const Choices& choices, int64_t i) {
  switch (layer.weights_type) {
    case FloatType::kBFloat16:
      return to_float(reinterpret_cast<const BFloat16*>(choices.weights)[i]);
    case FloatType::kFloat16: return to_float(reinterpret_cast<const Half*>(choices.weights)[i]);
    default: return reinterpret_cast<const float*>(choices.weights)[i];
  }
}

// Sums what a token's experts gave, float32 [slots, hidden], in the order of its choices.
template <class T>
void sum_choices(const Layer& layer, const Choices& choices, const Sorted& sorted,
                 const float* results, int64_t token, int64_t begin, int64_t end) {
  float sums[kSummedFeatures] = {};
  for (int64_t i = token * layer.chosen; i < (token + 1) * layer.chosen; ++i) {
    if (sorted.slots[i] < 0) continue;
    const float weight = weight_at(layer, choices, i);
    const float* result = results + sorted.slots[i] * layer.hidden + begin;
    for (int64_t at = 0; at < end - begin; ++at) sums[at] += result[at] * weight;
  }
  T* out = reinterpret_cast<T*>(choices.out) + token * layer.hidden + begin;
  for (int64_t at = 0; at < end - begin; ++at) from_float(sums[at], out + at);
}

void sum_experts(const Layer& layer, const Choices& choices, const Sorted& sorted,
                 const float* results, Team& team) {
  const int64_t parts = (layer.hidden + kSummedFeatures - 1) / kSummedFeatures;
  team.for_each(choices.count * parts, [&](int64_t unit, int64_t) {
    const int64_t begin = unit % parts * kSummedFeatures;
    const int64_t end = std::min(begin + kSummedFeatures, layer.hidden);
    const auto sum = layer.type == FloatType::kFloat32    ? sum_choices<float>
                     : layer.type == FloatType::kBFloat16 ? sum_choices<BFloat16>
                                                          : sum_choices<Half>;
    sum(layer, choices, sorted, results, unit / parts, begin, end);
  });
}

// One linear of every expert, on its slots' rows of x, [slots, columns], into rows of out.
std::vector<LinearCall> calls_of(const Layer& layer, const Sorted& sorted,
                                 LinearTask Expert::*linear, const void* x, void* out, bool gated) {
  std::vector<LinearCall> calls;
  for (size_t i = 0; i < layer.experts.size(); ++i) {
    const int64_t first = sorted.starts[i];
    const int64_t count = sorted.starts[i + 1] - first;
    if (count == 0) continue;
    LinearCall call{layer.experts[i].*linear, {}, gated};
    const int64_t row_bytes = call.task.weight.columns * bytes_of(layer.type);
    call.x = {static_cast<const char*>(x) + first * row_bytes, layer.type, count};
    const int64_t out_bytes = call.features() * bytes_of(call.task.out_type);
    call.task.out = static_cast<char*>(out) + first * out_bytes;
    calls.push_back(call);
  }
  return calls;
}

Buffer buffer_of_bytes(int64_t bytes) {
  return aligned_buffer((bytes + static_cast<int64_t>(sizeof(float)) - 1) /
                        static_cast<int64_t>(sizeof(float)));
}

void run_experts(const Layer& layer, const Choices& choices, const KernelSet& kernels, Team& team) {
  const Sorted sorted(choices.numbers, choices.count, layer.chosen,
                      static_cast<int64_t>(layer.experts.size()));
  const int64_t row_bytes = layer.hidden * bytes_of(layer.type);
  const Buffer rows = buffer_of_bytes(sorted.size() * row_bytes);
  const Buffer inner = buffer_of_bytes(sorted.size() * layer.inner * bytes_of(layer.type));
  const Buffer results = aligned_buffer(sorted.size() * layer.hidden);
  team.for_each(sorted.size(), [&](int64_t slot, int64_t) {
    __builtin_memcpy(reinterpret_cast<char*>(rows.get()) + slot * row_bytes,
                     choices.x + sorted.tokens[slot] * row_bytes, row_bytes);
  });
  run_grouped(calls_of(layer, sorted, &Expert::gate_up, rows.get(), inner.get(), true), kernels,
              team);
  run_grouped(calls_of(layer, sorted, &Expert::down, inner.get(), results.get(), false), kernels,
              team);
  sum_experts(layer, choices, sorted, results.get(), team);
}

Layer checked_layer(const Tensor& x, const std::vector<Tensor>& linears,
                    const std::vector<int64_t>& group_sizes, Activation activation) {
  const size_t count = group_sizes.size() / 2;
  if (count == 0 || group_sizes.size() != 2 * count ||
      linears.size() != 2 * kLinearTensors * count) {
    fail(kOp, "linears and group_sizes", "10 and 2 an expert",
         std::to_string(linears.size()) + " and " + std::to_string(group_sizes.size()));
  }
  Layer layer{};
  layer.type = float_type(kOp, "x", x.scalar_type());
  layer.hidden = x.size(1);
  for (size_t i = 0; i < count; ++i) {
    const Tensor* tensors = &linears[2 * kLinearTensors * i];
    Expert expert{};
    expert.gate_up = step_linear(kOp, tensors, group_sizes[2 * i], i == 0 ? -1 : 2 * layer.inner,
                                 layer.hidden, layer.type);
    if (expert.gate_up.weight.rows % 2 != 0) {
      fail(kOp, "weight", "gate rows then as many up rows", shape_text(tensors->sizes()));
    }
    expert.gate_up.activation = activation;
    layer.inner = expert.gate_up.weight.rows / 2;
    expert.down = step_linear(kOp, tensors + kLinearTensors, group_sizes[2 * i + 1], layer.hidden,
                              layer.inner, FloatType::kFloat32);
    layer.experts.push_back(expert);
  }
  return layer;
}

// Threads worth waking: one for experts that one reads before another has heard of them.
int64_t useful_threads(const Layer& layer, int64_t choices) {
  constexpr int64_t kBytesPerThread = 128 * 1024;
  const WeightMatrix& weight = layer.experts[0].gate_up.weight;
  const int64_t bytes = weight.rows * weight.columns * bytes_of(weight.format) * 3 / 2;
  return bytes * choices < 2 * kBytesPerThread ? 1 : 0;
}

}  // namespace

Tensor expert_mlps(Tensor x, Tensor numbers, Tensor weights, std::vector<Tensor> linears,
                   std::vector<int64_t> group_sizes, std::string activation) {
  check_shape(kOp, "x", x, "[num_tokens, hidden]", {-1, -1});
  check_layout(kOp, "x", x);
  if (numbers.scalar_type() != ScalarType::Long) {
    fail(kOp, "numbers", "int64", dtype_text(numbers.scalar_type()));
  }
  const int64_t tokens = x.size(0);
  check_shape(kOp, "numbers", numbers, "[num_tokens, chosen]", {tokens, -1});
  check_layout(kOp, "numbers", numbers);
  check_shape(kOp, "weights", weights, "numbers's", {tokens, numbers.size(1)});
  check_layout(kOp, "weights", weights);
  Layer layer = checked_layer(x, linears, group_sizes, activation_named(kOp, activation));
  layer.chosen = numbers.size(1);
  layer.weights_type = float_type(kOp, "weights", weights.scalar_type());
  Tensor out = torch::stable::new_empty(x, x.sizes());
  if (out.numel() == 0) return out;
  const Choices all{static_cast<const char*>(x.const_data_ptr()),
                    static_cast<const int64_t*>(numbers.const_data_ptr()),
                    static_cast<const char*>(weights.const_data_ptr()), tokens,
                    static_cast<char*>(out.mutable_data_ptr())};
  const KernelSet& kernels = cpu_kernels();
  Team::run(useful_threads(layer, tokens * layer.chosen), kernels, [&](Team& team) {
    for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
      Choices some = all;
      some.count = std::min(kTokensAtOnce, tokens - token);
      some.x += token * layer.hidden * bytes_of(layer.type);
      some.out += token * layer.hidden * bytes_of(layer.type);
      some.numbers += token * layer.chosen;
      some.weights += token * layer.chosen * bytes_of(layer.weights_type);
      run_experts(layer, some, kernels, team);
    }
  });
  return out;
}

}  // namespace quantkit
