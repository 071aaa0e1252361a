// What a set of CPU kernels offers, one set per instruction set, and how one is chosen.
// Raw pointers only: the files that implement a set never include torch.
#pragma once

#include <cstdint>

#include "formats.h"

namespace quantkit {

enum class FloatType { kFloat32, kBFloat16, kFloat16 };
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu };

// Weights of a linear layer, exactly as a checkpoint stores them.
struct WeightMatrix {
  const uint8_t* codes;  // [rows, columns], contiguous
  const float* scale;    // [rows, groups], contiguous; groups = ceil(columns / group_size)
  int64_t rows;
  int64_t columns;
  int64_t group_size;
  int64_t groups;
  WeightFormat format;
};

// One call on `batch` rows of x, at most KernelSet::max_batch of them.
struct LinearTask {
  WeightMatrix weight;
  const float* x;    // packed by KernelSet::pack
  const void* bias;  // [weight.rows] or null
  FloatType bias_type;
  void* out;  // [batch, features]: weight.rows features, or half of them when gated
  FloatType out_type;
  int64_t features;
  int batch;
  Activation activation;  // used by gated_linear only
};

struct DequantizeTask {
  WeightMatrix weight;
  void* out;  // [rows, columns], contiguous
  FloatType out_type;
};

struct PackTask {
  const void* x;  // [batch, columns], contiguous
  FloatType type;
  int batch;
  int64_t columns;
  int64_t group_size;
};

// Weight rows that one unit of parallel work holds; a multiple of what any kernel takes at a time.
constexpr int64_t kRowsPerUnit = 4;

struct KernelSet {
  int max_batch;
  // Number of floats that pack() writes, to a buffer aligned to 64 bytes.
  int64_t (*packed_size)(const PackTask&);
  void (*pack)(const PackTask&, float* packed);
  // These three work on output features (or weight rows) [begin, end).
  void (*linear)(const LinearTask&, int64_t begin, int64_t end);
  void (*gated_linear)(const LinearTask&, int64_t begin, int64_t end);
  void (*dequantize)(const DequantizeTask&, int64_t begin, int64_t end);
};

// Each returns null where the compiler or the architecture cannot build the set.
const KernelSet* portable_kernels();
const KernelSet* avx2_kernels();
const KernelSet* avx512_kernels();

// The widest set that this processor runs, capped by QUANTKIT_CPU_ISA (portable, avx2, avx512).
// Throws std::runtime_error if that variable holds anything else.
const KernelSet& cpu_kernels();

}  // namespace quantkit
