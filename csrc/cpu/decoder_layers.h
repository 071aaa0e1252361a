// Decoder layers on a few tokens: what decoder_step and head_step are made of. The same kernels as
// the single ops, rounding where they do, and so the same bits.
#pragma once

#include <string>
#include <vector>

#include "buffer.h"
#include "cache_view.h"
#include "linear.h"
#include "step_linear.h"

namespace quantkit {

// What the lists of an op hold for each layer: tensors of its weights and of its cache, numbers.
constexpr int kLayerTensors = 26;
constexpr int kCacheTensors = 4;
constexpr int kLayerNumbers = 6;

struct DecoderSizes {
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
struct DecoderLayer {
  NormWeight input_norm, query_norm, key_norm, post_norm, attention_norm, mlp_norm;
  LinearTask qkv, out, gate_up, down;
  CacheView cache;
  int64_t window;
  int64_t angles;  // which set, from 1; 0 for no rotation

  int64_t inner() const { return down.weight.columns; }
};

// What is the same in all layers.
struct DecoderStep {
  DecoderSizes sizes;
  float eps;
  float softmax_scale;
  float softcap;       // of attention's scores; 0 for none
  const char* cosine;  // [sets, tokens, turned]
  const char* sine;
  const int64_t* slots;
  const Tensor* block_tables;
  AttentionBatch batch;
};

// Activations of one layer, a row for every token.
struct DecoderWorkspace {
  Buffer memory;
  char *hidden, *normed, *qkv, *attended, *inner, *delta;

  DecoderWorkspace(const DecoderSizes& sizes, int64_t inner_size);
};

NormWeight norm_weight(const char* op, const Tensor& weight, int64_t features, const Tensor& x);

// All but the angles. The size of a head is that of the keys of a layer; every layer's is compared
// with it.
DecoderSizes checked_sizes(const char* op, const Tensor& hidden, int64_t heads, int64_t kv_heads,
                           const Tensor& keys);
DecoderLayer checked_layer(const char* op, const Tensor* weights, const Tensor* caches,
                           const int64_t* numbers, const DecoderSizes& sizes, const Tensor& hidden,
                           Activation activation);

// hidden += delta unless null; out = rms_norm(hidden) * weight. Returns where what follows reads:
// out, or hidden where there is no norm.
char* step_norm(const DecoderStep& step, char* hidden, const char* delta, const NormWeight& weight,
                char* out, Team& team);

// work.hidden (+ work.delta, unless it is the first layer) to queries in work.qkv, and keys and
// values in the cache.
void run_projections(const DecoderStep& step, const DecoderLayer& layer, bool first,
                     const DecoderWorkspace& work, Team& team);
// From there to the next layer's work.hidden and work.delta.
void run_attention_and_mlp(const DecoderStep& step, const DecoderLayer& layer,
                           const DecoderWorkspace& work, Team& team);

}  // namespace quantkit
