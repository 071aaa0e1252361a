// head_step: a pass of a drafter head, from what the target knew and tokens to logits, in one call.

#include <numeric>

#include "decoder_layers.h"
#include "ops.h"

namespace quantkit {
namespace {

constexpr const char* kOp = "head_step";

// What the lists hold, in this order: norms of what was known and of tokens, the linear layer that
// joins both, a decoder layer, the final norm, the output.
enum HeadTensor {
  kKnownNorm,
  kTokenNorm,
  kInput,
  kLayer = kInput + kLinearTensors,
  kFinalNorm = kLayer + kLayerTensors,
  kOutput,
  kHeadTensors = kOutput + kLinearTensors
};
enum HeadNumber {
  kInputGroup,
  kOutputGroup,
  kLayerFirst,
  kHeadNumbers = kLayerFirst + kLayerNumbers
};

// Rows of a table, by number.
struct TableRows {
  const char* table;
  const int64_t* numbers;
  int64_t bytes;  // of a row

  const char* at(int64_t token) const { return table + numbers[token] * bytes; }
  void copy(int64_t tokens, char* out) const {
    for (int64_t i = 0; i < tokens; ++i) __builtin_memcpy(out + i * bytes, at(i), bytes);
  }
};

// What comes before the layer and after it.
struct HeadEnds {
  NormWeight known_norm, token_norm, final_norm;
  LinearTask input, output;
  const char* known;  // [tokens, hidden]
  TableRows tokens;
};

// Norms of what was known and of the tokens, side by side, to work.hidden.
void run_input(const DecoderStep& step, const HeadEnds& ends, const DecoderWorkspace& work,
               char* both, Team& team) {
  const DecoderSizes& sizes = step.sizes;
  const int64_t bytes = sizes.hidden * sizes.item();
  const auto norm = [&](const char* x, const NormWeight& weight, char* out) {
    const NormTask task{x,          nullptr,     nullptr,      weight.data, out,
                        sizes.type, weight.type, sizes.hidden, step.eps};
    cpu_kernels().rms_norm(task, 0, 1);
  };
  team.for_each(sizes.tokens, [&](int64_t token, int64_t) {
    char* out = both + token * 2 * bytes;
    norm(ends.known + token * bytes, ends.known_norm, out);
    norm(ends.tokens.at(token), ends.token_norm, out + bytes);
  });
  LinearTask input = ends.input;
  input.out = work.hidden;
  run_linear(input, {both, sizes.type, sizes.tokens}, cpu_kernels(), team);
}

// Moves the last row of each sequence to the front.
void keep_last(const AttentionBatch& batch, int64_t bytes, char* rows) {
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int64_t last = batch.starts[s + 1] - 1;
    if (last != s) __builtin_memcpy(rows + s * bytes, rows + last * bytes, bytes);
  }
}

void check_all_have_tokens(const AttentionBatch& batch) {
  for (int64_t s = 0; s < batch.sequences; ++s) {
    if (batch.starts[s + 1] == batch.starts[s]) {
      fail(kOp, "query_starts", "those of sequences with new tokens",
           "none of sequence " + std::to_string(s));
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor> head_step(Tensor known, Tensor token_ids, Tensor embedding,
                                     std::vector<Tensor> weights, std::vector<Tensor> caches,
                                     std::vector<int64_t> numbers, Tensor cos, Tensor sin,
                                     Tensor positions, Tensor slots, Tensor block_tables,
                                     Tensor lengths, Tensor query_starts, int64_t heads,
                                     int64_t kv_heads, double eps, double softmax_scale,
                                     std::string activation) {
  if (weights.size() != kHeadTensors || caches.size() != kCacheTensors ||
      numbers.size() != kHeadNumbers) {
    fail(kOp, "weights, caches and numbers", "39, 4 and 8",
         std::to_string(weights.size()) + ", " + std::to_string(caches.size()) + " and " +
             std::to_string(numbers.size()));
  }
  DecoderSizes sizes = checked_sizes(kOp, known, heads, kv_heads, caches[0]);
  check_shape(kOp, "cos", cos, "[positions, rotary_dim]", {-1, -1});
  sizes.turned = checked_angles(kOp, cos, sin, sizes.head_dim, known);
  sizes.angles = 1;
  check_shape(kOp, "embedding", embedding, "[vocab, hidden]", {-1, sizes.hidden});
  check_layout(kOp, "embedding", embedding);
  check_same_dtype(kOp, "embedding", embedding, known);
  const DecoderLayer layer =
      checked_layer(kOp, &weights[kLayer], caches.data(), &numbers[kLayerFirst], sizes, known,
                    activation_named(kOp, activation));
  const auto norm = [&](HeadTensor at) {
    check_shape(kOp, "norm", weights[at], "[features]", {sizes.hidden});
    return norm_weight(kOp, weights[at], sizes.hidden, known);
  };
  const auto of_tokens = [&](const char* argument, const Tensor& indices, int64_t end) {
    return checked_indices(kOp, argument, indices, "[num_tokens]", sizes.tokens, end);
  };
  const HeadEnds ends{
      norm(kKnownNorm),
      norm(kTokenNorm),
      norm(kFinalNorm),
      step_linear(kOp, &weights[kInput], numbers[kInputGroup], sizes.hidden, 2 * sizes.hidden,
                  sizes.type),
      step_linear(kOp, &weights[kOutput], numbers[kOutputGroup], -1, sizes.hidden,
                  FloatType::kFloat32),
      static_cast<const char*>(known.const_data_ptr()),
      {static_cast<const char*>(embedding.const_data_ptr()),
       of_tokens("token_ids", token_ids, embedding.size(0)),
       sizes.hidden * sizes.item()}};
  const AttentionBatch batch =
      checked_batch(kOp, block_tables, lengths, query_starts, sizes.tokens, layer.cache);
  check_all_have_tokens(batch);
  const int64_t* places = of_tokens("positions", positions, cos.size(0));
  const int64_t* targets = checked_slots(kOp, slots, sizes.tokens, layer.cache);
  const int64_t sequences = batch.sequences;
  Tensor hidden = torch::stable::new_empty(known, {sequences, sizes.hidden});
  Tensor logits =
      torch::stable::new_empty(known, {sequences, ends.output.weight.rows}, ScalarType::Float);
  if (sequences == 0) return {hidden, logits};

  const DecoderWorkspace work(sizes, layer.inner());
  const int64_t angle_bytes = sizes.turned * sizes.item();
  std::vector<char> cosine(sizes.tokens * angle_bytes);
  std::vector<char> sine(sizes.tokens * angle_bytes);
  TableRows{static_cast<const char*>(cos.const_data_ptr()), places, angle_bytes}.copy(
      sizes.tokens, cosine.data());
  TableRows{static_cast<const char*>(sin.const_data_ptr()), places, angle_bytes}.copy(
      sizes.tokens, sine.data());
  std::vector<char> both(sizes.tokens * 2 * sizes.hidden * sizes.item());
  const DecoderStep step{sizes,         static_cast<float>(eps), static_cast<float>(softmax_scale),
                         0.0f,          cosine.data(),           sine.data(),
                         targets,       &block_tables,           batch};
  // All tokens are stored; only what follows the last of each sequence is of interest.
  DecoderStep last = step;
  std::vector<int32_t> starts(sequences + 1);
  std::iota(starts.begin(), starts.end(), 0);
  last.sizes.tokens = sequences;
  last.batch.starts = starts.data();
  LinearTask output = ends.output;
  output.out = logits.mutable_data_ptr();
  auto* result = static_cast<char*>(hidden.mutable_data_ptr());
  Team::run(0, cpu_kernels(), [&](Team& team) {
    run_input(step, ends, work, both.data(), team);
    run_projections(step, layer, true, work, team);
    keep_last(batch, sizes.qkv() * sizes.item(), work.qkv);
    keep_last(batch, sizes.hidden * sizes.item(), work.hidden);
    run_attention_and_mlp(last, layer, work, team);
    step_norm(last, work.hidden, work.delta, ends.final_norm, result, team);
    run_linear(output, {result, sizes.type, sequences}, cpu_kernels(), team);
  });
  return {hidden, logits};
}

}  // namespace quantkit
