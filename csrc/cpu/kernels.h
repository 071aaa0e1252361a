// What a set of CPU kernels offers, one set per instruction set, and how one is chosen.
// Raw pointers only: the files that implement a set never include torch.
#pragma once

#include <cstdint>

#include "../types.h"
#include "formats.h"

namespace quantkit {

// One call on `batch` rows of x, at most KernelSet::pass_rows of them.
struct LinearTask {
  WeightMatrix weight;
  const float* x;    // packed by KernelSet::pack
  FloatType x_type;  // before packing
  const void* bias;  // [weight.rows] or null
  FloatType bias_type;
  void* out;  // [batch, features]: weight.rows features, or half of them when gated
  FloatType out_type;
  int64_t features;
  int batch;
  Activation activation;  // used by gated_linear only
  OutlierMatrix outliers;
  const float* outlier_x;  // [batch, outliers.count]: x in those columns
};

struct DequantizeTask {
  WeightMatrix weight;
  void* out;  // [rows, columns], contiguous
  FloatType out_type;
};

struct PackTask {
  const void* x;  // [batch, columns], contiguous
  FloatType type;
  WeightFormat format;  // of the weight that it will meet
  int batch;
  int64_t columns;
  int64_t group_size;
};

// out = rms_norm(x + delta) * weight, and sum = x + delta; every step rounded to `type`. A float32
// weight of 16-bit x multiplies before the normalized value is rounded.
struct NormTask {
  const void* x;       // [rows, columns]
  const void* delta;   // [rows, columns], or null for nothing to add
  void* sum;           // [rows, columns], may be x; unused without delta
  const void* weight;  // [columns], or null for the sum alone
  void* out;           // [rows, columns], may be x
  FloatType type;
  FloatType weight_type;  // type or float32
  int64_t columns;
  float eps;
};

// out = act(first half of the columns) * second half, in float32 with one rounding.
struct GateTask {
  const void* both;  // [rows, 2 * features]
  void* out;         // [rows, features]
  FloatType type;
  int64_t features;
  Activation activation;
};

struct RotaryTask {
  const void* x;       // token t, head h at t * x_stride + h * head_dim
  void* out;           // alike with out_stride; may be x
  const void* cosine;  // [tokens, turned], of x's type
  const void* sine;
  FloatType type;
  int64_t x_stride, out_stride;  // elements
  int64_t heads, head_dim;
  int64_t turned;  // leading features of a head that turn; the others are copied
};

// One of keys and values: rows to their slots, as codes (E4M3, E3M4) of x / scale or in a float type.
struct AppendTask {
  const void* x;  // token t at t * x_stride, then [heads, head_dim]
  FloatType type;
  int64_t x_stride;
  void* cache;  // [slots, heads, head_dim]
  WeightFormat cache_type;
  const float* scale;  // per head `scale_stride` apart; null for float caches
  int64_t scale_stride;
  const int64_t* slots;  // [tokens]
  int64_t heads, head_dim;
};

// What rounding to an 8-bit format needs to know of it; see numerics.round_to_format.
struct RoundingGrid {
  float largest;
  float least_power;  // of two, below which the step is fixed
  float shift;        // 1.5 * 2^(23 - mantissa bits)
};

// out = x rounded to the format and back, each row with its scale.
struct RoundTask {
  const void* x;  // [rows, columns]
  void* out;      // [rows, columns]
  FloatType type;
  const float* scale;    // null for a row's own
  int64_t scale_stride;  // 0 for one scale for all
  int64_t columns;
  RoundingGrid grid;
};

// errors[c, n] = sum_k importance[k] * (weight[n, k] rounded with scales[c, n] - weight[n, k])^2.
struct ScaleErrorsTask {
  const float* weight;  // [rows, columns]
  const float* scales;  // [candidates, scales_stride]: a scale for each row, or one
  int64_t scales_stride;
  const float* importance;  // [columns]
  double* errors;           // [candidates, rows]
  int64_t candidates, rows, columns;
  RoundingGrid grid;
};

// A block of columns of a weight, rounded one after another; all but `factor` transposed,
// [columns, rows]. See rounding_ops.feed_back.
struct FeedbackTask {
  const float* aims;
  const float* target;
  const float* factor;  // [columns, columns]
  const float* scales;  // [columns, rows], or [rows] with has_one_scale
  bool has_one_scale;
  float* steps;
  float* error;
  float* residual;
  int64_t columns, rows;
  int64_t first_exact;
  RoundingGrid grid;
};

// Attention of new tokens to all that their sequences store; see paged_attention in Python.
struct AttentionTask {
  const void* query;  // token t at t * query_stride, then [kv_heads, group, head_dim]
  FloatType type;
  int64_t query_stride;
  void* out;            // [tokens, kv_heads, group, head_dim], of query's type
  const uint8_t* keys;  // [blocks, block_size, kv_heads, head_dim]
  const uint8_t* values;
  WeightFormat cache_type;
  const float* k_scale;  // both null for float caches
  const float* v_scale;
  int64_t k_scale_stride, v_scale_stride;  // from head to head: 0 or 1
  const int32_t* tables;                   // [sequences, max_blocks]
  int64_t max_blocks;
  int64_t kv_heads, group, head_dim, block_size;
  float softmax_scale;
  float softcap;   // scores become softcap * tanh(score / softcap); 0 for none
  int64_t window;  // tokens that a query sees, itself included; 0 for all
};

// Queries of adjacent tokens of one sequence that read one KV head.
struct AttentionTile {
  int64_t sequence;
  int64_t row;       // of the first token, in query and out
  int64_t position;  // of the first token, in its sequence
  int64_t tokens;
  int64_t kv_head;
};

// Adjacent KV heads of one tile: their packed queries, and where their partial results go.
struct AttentionHeads {
  int64_t count;
  const float* query;
  int64_t query_stride;  // floats from head to head
  float* partial;
  int64_t partial_stride;
};

// Keys are taken in partitions of this many, counted from the start of their sequence. A result is
// the partitions' partial results, folded in order: the same bits however work is split.
constexpr int64_t kPartitionKeys = 64;

// Weight rows that one unit of parallel work holds; a multiple of what any kernel takes at a time.
constexpr int64_t kRowsPerUnit = 4;

// Linear layers by a matrix unit: x is packed in tiles of 16 rows, and weights are decoded into tiles
// in cache. Rows of the result are the same bits whatever the batch, but not those of KernelSet's
// other linear kernels.
struct TileKernels {
  // Fewest rows of x for which they are the faster ones.
  int64_t fewest_rows;
  bool (*takes)(FloatType x, const WeightMatrix& weight);
  // Rows of x that a call may have: as many as fit in cache, a multiple of 16.
  int64_t (*max_batch)(int64_t columns);
  // In floats, like all sizes; buffers are aligned to 64 bytes.
  int64_t (*packed_size)(const PackTask&);
  // Packs rows [16 * tile, 16 * tile + 16) to their place.
  void (*pack)(const PackTask&, int64_t tile, float* packed);
  int64_t (*scratch_size)(const LinearTask&);
  // Features that are computed at a time.
  int64_t (*step)(const LinearTask&, bool gated);
  void (*linear)(const LinearTask&, int64_t begin, int64_t end, float* scratch);
  void (*gated_linear)(const LinearTask&, int64_t begin, int64_t end, float* scratch);
};

// One token a row.
struct ChoiceTask {
  const float* scores;  // [rows, columns], contiguous; at least one column
  const int64_t* keys;  // [rows], of Gumbel noise, or null for none
  int64_t* tokens;      // [rows]
  int64_t columns;
};

// One token a row, and how likely it was. Weights are (score - largest of the row) / temperature.
struct DrawTask {
  const float* scores;       // [rows, columns], contiguous; at least one column
  const int64_t* keys;       // [rows], of Gumbel noise on the weights, or null for none
  const int64_t* token_ids;  // [columns], ascending, or null where a column is its own token
  float temperature;
  float* weights;      // [rows, columns], for the kernel's use
  int64_t* tokens;     // [rows]
  float* likelihoods;  // [rows]: softmax of the weights, at the token
  int64_t columns;
};

// sums = rows^T rows.
struct GramTask {
  const void* rows;  // bfloat16 [tokens, columns]
  float* sums;       // [columns, columns]
  int64_t tokens, columns;
};

// Second moments. Rows are packed first, columns in vectors of `lanes`; then come tiles of the result.
struct GramKernels {
  int64_t lanes;
  int64_t (*packed_size)(int64_t tokens, int64_t columns);
  // Packs vectors of columns [begin, end) to their places.
  void (*pack)(const GramTask&, int64_t begin, int64_t end, float* packed);
  int64_t (*tiles)(int64_t columns);
  // Computes the tiles [begin, end).
  void (*add)(const GramTask&, int64_t begin, int64_t end, const float* packed);
};

struct KernelSet {
  // To be called on each thread before and after all others; null for nothing.
  void (*enter)();
  void (*leave)();
  const TileKernels* tiles;  // null for none

  // Rows of x that a call takes, of `batch` rows; the last call takes what is left.
  int64_t (*pass_rows)(FloatType x, WeightFormat weight, int64_t batch);
  // Number of floats that pack() writes, to a buffer aligned to 64 bytes.
  int64_t (*packed_size)(const PackTask&);
  void (*pack)(const PackTask&, float* packed);
  // These three work on output features (or weight rows) [begin, end).
  void (*linear)(const LinearTask&, int64_t begin, int64_t end);
  void (*gated_linear)(const LinearTask&, int64_t begin, int64_t end);
  // Add what outlier columns give to the sums of all others, [batch, end - begin], and round: the
  // features [begin, end) of task.out.
  void (*add_outliers)(const LinearTask&, const float* sums, int64_t begin, int64_t end);
  void (*add_gated_outliers)(const LinearTask&, const float* gates, const float* ups, int64_t begin,
                             int64_t end);
  void (*dequantize)(const DequantizeTask&, int64_t begin, int64_t end);
  // On rows or tokens [begin, end).
  void (*rms_norm)(const NormTask&, int64_t begin, int64_t end);
  void (*gate)(const GateTask&, int64_t begin, int64_t end);
  void (*rotary)(const RotaryTask&, int64_t begin, int64_t end);
  void (*append)(const AppendTask&, int64_t begin, int64_t end);
  void (*choose)(const ChoiceTask&, int64_t begin, int64_t end);
  void (*draw)(const DrawTask&, int64_t begin, int64_t end);
  void (*round_rows)(const RoundTask&, int64_t begin, int64_t end);
  void (*scale_errors)(const ScaleErrorsTask&, int64_t begin, int64_t end);
  void (*feed_back)(const FeedbackTask&, int64_t begin, int64_t end);
  const GramKernels* gram;
  // Attention of one tile. Buffers are aligned to 64 bytes, their sizes in floats.
  // Queries that are worth having share decoded keys.
  int64_t (*tile_rows)(const AttentionTask&);
  int64_t (*query_size)(const AttentionTask&, int64_t tokens);
  int64_t (*partial_size)(const AttentionTask&, int64_t tokens);
  int64_t (*scratch_size)(const AttentionTask&, int64_t tokens);
  void (*pack_queries)(const AttentionTask&, const AttentionTile&, float* query);
  // Attends to one partition of the keys, for the tile's KV head and those that follow it.
  void (*attend)(const AttentionTask&, const AttentionTile&, int64_t partition,
                 const AttentionHeads&, float* scratch);
  // Adds a partition's result to that of all before it.
  void (*fold)(const AttentionTask&, int64_t tokens, float* folded, const float* partial);
  void (*finish)(const AttentionTask&, const AttentionTile&, const float* folded, float* scratch);
};

// Each returns null where the compiler or the architecture cannot build the set.
const KernelSet* portable_kernels();
const KernelSet* avx2_kernels();
const KernelSet* avx512_kernels();
const KernelSet* avx512bf16_kernels();
const KernelSet* avx512fp16_kernels();
const KernelSet* amx_kernels();

// The widest set that this processor runs, capped by QUANTKIT_CPU_ISA, which
// holds the name of one (see dispatch.cpp).
// Throws std::runtime_error if that variable holds anything else.
const KernelSet& cpu_kernels();

}  // namespace quantkit
