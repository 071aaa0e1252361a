// AVX-512 BF16: the AVX-512 kernels, but for bfloat16 x and weights that are bfloat16 numbers, as
// those of every 8-bit format are, and for second moments: pairs of numbers are multiplied and
// added to float32 sums at once, which is twice as fast as one at a time. Products are exact and
// sums are rounded to nearest; the processor takes numbers below 2^-126 for zeros. What is not a
// number goes to the outputs it belongs to.
//
// The order of summation depends on columns and group size only: as in kernel_template.h.

#include <cstdint>
#include <cstring>

#include "float16.h"
#include "formats.h"
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 10)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((                                                                         \
        target("avx512bf16,avx512vbmi,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512vbmi,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "kernel_template.h"
// After the template that it fills.
#include "bf16_pairs.h"
#include "isa_avx512.h"

namespace quantkit {
namespace {

using Lanes = Avx512::Lanes;

inline __attribute__((always_inline)) __m512 add_pairs(__m512i a, __m512i b, __m512 sums) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Second moments: two tokens a cell.
struct PairCells {
  using Lanes = Avx512::Lanes;
  static constexpr int64_t kTokens = 2;

  static Lanes add_products(Lanes a, Lanes b, Lanes sums) {
    return {add_pairs(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v), sums.v)};
  }
};

bool multiplies_pairs(FloatType x, WeightFormat weight) {
  const bool exact = weight != WeightFormat::kFloat32 && weight != WeightFormat::kFloat16;
  return exact && x == FloatType::kBFloat16;
}

// As Avx512, with more rows of x: a weight beside constants and x in memory leaves room for them.
struct PairRows : Avx512 {
  static constexpr int kMaxBatch = 10;
};

// More rows than one call takes are dealt evenly: calls of six and six are faster than of ten and
// two.
int64_t pass_rows_pairs(FloatType x, WeightFormat weight, int64_t batch) {
  if (!multiplies_pairs(x, weight)) return avx512_kernels()->pass_rows(x, weight, batch);
  if (batch <= PairRows::kMaxBatch) return batch;
  return ceil_div(batch, ceil_div(batch, PairRows::kMaxBatch));
}

// Rows of x that a kernel computes for `batch` of them; the rest is zero padding.
int padded_pairs(int batch) { return batch <= 4 ? batch : (batch + 1) / 2 * 2; }

// Packed x: for each chunk of columns of each group, two vectors of every row of the padded batch.
constexpr int64_t kChunkBytes = kChunk * 2;

int64_t packed_size_pairs(const PackTask& task) {
  const int64_t size = avx512_kernels()->packed_size(task);
  if (!multiplies_pairs(task.type, task.format)) return size;
  return size / padded_batch(task.batch) * padded_pairs(task.batch) / 2;
}

void pack_pairs(const PackTask& task, float* packed) {
  if (!multiplies_pairs(task.type, task.format)) return avx512_kernels()->pack(task, packed);
  const int padded = padded_pairs(task.batch);
  const auto* x = static_cast<const BFloat16*>(task.x);
  auto* target = reinterpret_cast<char*>(packed);
  for (int64_t begin = 0; begin < task.columns; begin += task.group_size) {
    const int64_t end = at_most(begin + task.group_size, task.columns);
    for (int64_t column = begin; column < end; column += kChunk) {
      for (int m = 0; m < padded; ++m, target += kChunkBytes) {
        const uint64_t mask = m < task.batch ? first_columns(end - column) : 0;
        const BFloat16* row = x + at_most(m, task.batch - 1) * task.columns + column;
        store_pairs(PairDecoder<BFloat16>{}, reinterpret_cast<const uint8_t*>(row), mask, target,
                    target + kChunkBytes / 2);
      }
    }
  }
}

// float32 sums of kR weight rows by kM rows of x, over the columns of one group.
template <class Format, int kR, int kM>
struct PairBlock {
  static constexpr int64_t kBytes = PairDecoder<Format>::kBytes;

  __m512 sum[kR][kM];

  inline __attribute__((always_inline)) void clear() {
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      QK_UNROLL for (int m = 0; m < kM; ++m) sum[r][m] = _mm512_setzero_ps();
    }
  }

  // Adds `count` columns, starting at w[r]; returns where the next group starts in x.
  inline __attribute__((always_inline)) const char* add_columns(const PairDecoder<Format>& decoder,
                                                                const uint8_t* const (&w)[kR],
                                                                int64_t count, int64_t row_bytes,
                                                                const char* x) {
    for (int64_t column = 0; column < count; column += kChunk, x += kM * kChunkBytes) {
      const uint64_t mask = first_columns(count - column);
      __m512i first[kR], second[kR];
      QK_UNROLL for (int r = 0; r < kR; ++r) {
        const uint8_t* stored = w[r] + column * kBytes;
        QK_UNROLL for (int64_t line = 0; line < kBytes; ++line) {
          prefetch_group<kR>(stored + 64 * line, row_bytes);
        }
        decoder.load(stored, mask, &first[r], &second[r]);
      }
      QK_UNROLL for (int m = 0; m < kM; ++m) {
        const __m512i a = _mm512_load_si512(x + m * kChunkBytes);
        const __m512i b = _mm512_load_si512(x + m * kChunkBytes + kChunkBytes / 2);
        QK_UNROLL for (int r = 0; r < kR; ++r) {
          sum[r][m] = add_pairs(second[r], b, add_pairs(first[r], a, sum[r][m]));
        }
      }
    }
    return x;
  }
};

// Lanes that add up to rows `row` to `row + kR` by each row of x.
template <class Format, int kR, int kM>
inline __attribute__((always_inline)) void pair_rows(const LinearTask& task, int64_t row, int valid,
                                                     Lanes (&total)[kM][kR]) {
  static constexpr float kOne = 1.0f;
  using Sums = PairBlock<Format, kR, kM>;
  const WeightMatrix& weight = task.weight;
  const int64_t row_bytes = weight.columns * Sums::kBytes;
  const uint8_t* w[kR];
  const float* scale[kR];
  QK_UNROLL for (int r = 0; r < kR; ++r) {  // rows beyond the end repeat the last one
    const int64_t source = row + at_most(r, valid - 1);
    w[r] = weight.codes + source * row_bytes;
    scale[r] = weight.scale == nullptr ? &kOne : weight.scale + source * weight.groups;
  }
  const auto decoder = PairDecoder<Format>::make();
  Sums block;
  QK_UNROLL for (int r = 0; r < kR; ++r) {
    QK_UNROLL for (int m = 0; m < kM; ++m) total[m][r] = Lanes::zero();
  }
  const char* x = reinterpret_cast<const char*>(task.x);
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t begin = group * weight.group_size;
    const uint8_t* start[kR];
    QK_UNROLL for (int r = 0; r < kR; ++r) start[r] = w[r] + begin * Sums::kBytes;
    block.clear();
    const int64_t count = at_most(weight.group_size, weight.columns - begin);
    x = block.add_columns(decoder, start, count, row_bytes, x);
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      const __m512 factor = _mm512_set1_ps(scale[r][group]);
      QK_UNROLL for (int m = 0; m < kM; ++m) {
        total[m][r].v = _mm512_fmadd_ps(block.sum[r][m], factor, total[m][r].v);
      }
    }
  }
}

// Up to 16 weight rows at a time, whose lanes are added up together; see DotRows.
template <class Format, int kR, int kM>
__attribute__((noinline)) void pair_sums(const LinearTask& task, int64_t row, int valid,
                                         float* out) {
  Lanes total[kM][Avx512::kLanes];
  QK_UNROLL for (int m = 0; m < kM; ++m) {
    for (int r = valid / kR * kR; r < Avx512::kLanes; ++r) total[m][r] = Lanes::zero();
  }
  for (int r = 0; r < valid; r += kR) {
    Lanes part[kM][kR];
    pair_rows<Format, kR, kM>(task, row + r, valid - r, part);
    QK_UNROLL for (int m = 0; m < kM; ++m) {
      QK_UNROLL for (int i = 0; i < kR; ++i) total[m][r + i] = part[m][i];
    }
  }
  for (int m = 0; m < task.batch; ++m) Lanes::sums(total[m]).store(out + m * Avx512::kLanes);
}

template <class Format>
DotKernel choose_pair_batch(int batch) {
  if (batch == 1) return {pair_sums<Format, 4, 1>, Avx512::kLanes};
  if (batch == 2) return {pair_sums<Format, 4, 2>, Avx512::kLanes};
  if (batch == 3) return {pair_sums<Format, 4, 3>, Avx512::kLanes};
  if (batch == 4) return {pair_sums<Format, 4, 4>, Avx512::kLanes};
  if (batch <= 6) return {pair_sums<Format, 2, 6>, Avx512::kLanes};
  if (batch <= 8) return {pair_sums<Format, 2, 8>, Avx512::kLanes};
  return {pair_sums<Format, 2, 10>, Avx512::kLanes};
}

DotKernel choose_pairs(const LinearTask& task) {
  switch (task.weight.format) {
    case WeightFormat::kE4M3: return choose_pair_batch<E4M3>(task.batch);
    case WeightFormat::kE5M2: return choose_pair_batch<E5M2>(task.batch);
    case WeightFormat::kE3M4: return choose_pair_batch<E3M4>(task.batch);
    default: return choose_pair_batch<BFloat16>(task.batch);
  }
}

void linear_pairs(const LinearTask& task, int64_t begin, int64_t end) {
  if (!multiplies_pairs(task.x_type, task.weight.format)) {
    return avx512_kernels()->linear(task, begin, end);
  }
  linear<PairRows, choose_pairs>(task, begin, end);
}

void gated_linear_pairs(const LinearTask& task, int64_t begin, int64_t end) {
  if (!multiplies_pairs(task.x_type, task.weight.format)) {
    return avx512_kernels()->gated_linear(task, begin, end);
  }
  gated_linear<PairRows, choose_pairs>(task, begin, end);
}

KernelSet with_pairs(KernelSet set) {
  set.pass_rows = pass_rows_pairs;
  set.packed_size = packed_size_pairs;
  set.pack = pack_pairs;
  set.linear = linear_pairs;
  set.gated_linear = gated_linear_pairs;
  set.gram = &kGramKernels<Avx512, PairCells>;
  return set;
}

}  // namespace

const KernelSet* avx512bf16_kernels() {
  static const KernelSet set = with_pairs(*avx512_kernels());
  return &set;
}

}  // namespace quantkit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace quantkit {
const KernelSet* avx512bf16_kernels() { return nullptr; }
}  // namespace quantkit

#endif
