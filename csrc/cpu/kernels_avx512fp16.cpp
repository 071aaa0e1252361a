// AVX-512 with FP16 arithmetic: the AVX-512 kernels, but for 8-bit weights and 16-bit x, whose
// products are summed eighteen at a time in float16 before they go to float32. A weight then costs
// a third of the instructions, which is what stands between the float32 kernels and the memory's
// speed. x in float32 keeps float32 accumulation.
//
// Error. Every row of x is scaled by a power of two so that its largest magnitude is in [512,
// 1024): a sum of 18 products with weights below 1.75 stays within float16, and 16-bit x keep all
// their bits, or absolute precision of 2^-25 of the largest. A sum is off by at most 19 roundings
// of 2^-11 relative to sum |x w|, in practice by 7e-4 of the result; rounding x to bfloat16 has
// cost 2e-3 before.
//
// The order of summation depends on columns and group size only: as in kernel_template.h.

#include <cstdint>
#include <cstring>

#include "float16.h"
#include "formats.h"
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512fp16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512fp16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "kernel_template.h"
// After the template that it fills.
#include "isa_avx512.h"

namespace quantkit {
namespace {

using Lanes = Avx512::Lanes;

constexpr int kColumns = Avx512::kColumns;
// Of 2 products a lane each. Half of what is added before float32 costs as many instructions as the
// products of one row of x.
constexpr int kChunksPerFlush = 9;

bool sums_in_half(FloatType x, WeightFormat weight) {
  const bool narrow = weight == WeightFormat::kE4M3 || weight == WeightFormat::kE3M4;
  return narrow && x != FloatType::kFloat32;
}

// Packed x: one factor per row of the padded batch, that undoes its scaling; then, for each chunk
// of columns of each group, every row's even columns and every row's odd columns as float16.
constexpr int64_t kHeader = 16;  // floats

int64_t packed_size_half(const PackTask& task) {
  if (!sums_in_half(task.type, task.format)) return avx512_kernels()->packed_size(task);
  return kHeader + packed_size<Avx512>(task) / 2;
}

// A power of two that brings the largest finite magnitude of a row into [512, 1024).
template <class T>
float row_factor(const T* x, int64_t columns) {
  const __m512i infinity = _mm512_set1_epi32(0x7F800000);
  __m512i highest = _mm512_setzero_si512();
  for (int64_t column = 0; column < columns; column += Avx512::kLanes) {
    const Lanes value = load_lanes<Lanes, Avx512::kLanes>(x + column, columns - column);
    const __m512i bits =
        _mm512_and_si512(_mm512_castps_si512(value.v), _mm512_set1_epi32(0x7FFFFFFF));
    const __mmask16 finite = _mm512_cmplt_epi32_mask(bits, infinity);
    highest = _mm512_mask_max_epi32(highest, finite, highest, bits);
  }
  const uint32_t exponent = static_cast<uint32_t>(_mm512_reduce_max_epi32(highest)) >> 23;
  // x is in [2^(e - 127), 2^(e - 126)); the factor is 2^(136 - e), kept normal in float32.
  const uint32_t wanted = 127 + 136 - (exponent < 11 ? 11 : exponent);
  return bits_float(wanted << 23);
}

template <class T>
void pack_row(const T* x, int64_t columns, int64_t group_size, float factor, int64_t stride,
              char* packed) {
  for (int64_t begin = 0; begin < columns; begin += group_size) {
    const int64_t end = at_most(begin + group_size, columns);
    for (int64_t column = begin; column < end; column += kColumns, packed += stride) {
      alignas(64) float parts[kColumns];
      pack_columns<Avx512>(x + column, at_most(end - column, kColumns), parts);
      for (int part = 0; part < 4; ++part) {
        const __m512 scaled =
            _mm512_mul_ps(_mm512_load_ps(parts + part * 16), _mm512_set1_ps(factor));
        const __m256i halves = _mm512_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT);
        _mm256_store_si256(reinterpret_cast<__m256i*>(packed) + part, halves);
      }
    }
  }
}

template <class T>
void pack_rows(const PackTask& task, float* packed) {
  const int padded = padded_batch(task.batch);
  const int64_t bytes = (packed_size_half(task) - kHeader) * sizeof(float);
  char* chunks = reinterpret_cast<char*>(packed + kHeader);
  const int64_t row_bytes = kColumns * 2;
  if (padded > task.batch) __builtin_memset(chunks, 0, bytes);
  for (int m = 0; m < task.batch; ++m) {
    const T* x = static_cast<const T*>(task.x) + m * task.columns;
    const float factor = row_factor(x, task.columns);
    packed[m] = 1.0f / factor;
    pack_row(x, task.columns, task.group_size, factor, padded * row_bytes, chunks + m * row_bytes);
  }
}

void pack_half(const PackTask& task, float* packed) {
  if (!sums_in_half(task.type, task.format)) return avx512_kernels()->pack(task, packed);
  if (task.type == FloatType::kBFloat16) return pack_rows<BFloat16>(task, packed);
  pack_rows<Half>(task, packed);
}

inline __m512h as_half(__m512i bits) { return _mm512_castsi512_ph(bits); }

// float32 sums of kR weight rows by kM rows of x, over the columns of one group.
template <class Format, int kR, int kM>
struct HalfBlock {
  using Codes = Avx512::Codes<Format>;

  __m512 sum[kR][kM];
  typename Codes::Peak peak;

  inline __attribute__((always_inline)) void clear() {
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      QK_UNROLL for (int m = 0; m < kM; ++m) sum[r][m] = _mm512_setzero_ps();
    }
  }

  static inline __attribute__((always_inline)) void add(const Codes& codes, const char* x, int m,
                                                        __m512h* half) {
    const __m512i* row = reinterpret_cast<const __m512i*>(x) + 2 * m;
    *half = _mm512_fmadd_ph(as_half(codes.even), as_half(_mm512_load_si512(row)), *half);
    *half = _mm512_fmadd_ph(as_half(codes.odd), as_half(_mm512_load_si512(row + 1)), *half);
  }

  // Up to kChunksPerFlush chunks, `count` columns.
  inline __attribute__((always_inline)) const char* add_run(const uint8_t* const (&w)[kR],
                                                            int64_t count, int64_t row_bytes,
                                                            const char* x) {
    __m512h half[kR][kM];
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      QK_UNROLL for (int m = 0; m < kM; ++m) half[r][m] = _mm512_setzero_ph();
    }
    for (int64_t column = 0; column < count; column += kColumns) {
      const int64_t left = count - column;
      QK_UNROLL for (int r = 0; r < kR; ++r) {
        prefetch_group<kR>(w[r] + column, row_bytes);
        const Codes codes = left >= kColumns
                                ? Codes::load(w[r] + column)
                                : Codes::load_some(w[r] + column, static_cast<int>(left));
        peak.add(codes);
        QK_UNROLL for (int m = 0; m < kM; ++m) add(codes, x, m, &half[r][m]);
      }
      x += kM * kColumns * 2;
    }
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      QK_UNROLL for (int m = 0; m < kM; ++m) {
        const __m512i bits = _mm512_castph_si512(half[r][m]);
        const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
        const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
        sum[r][m] = _mm512_add_ps(sum[r][m], _mm512_add_ps(low, high));
      }
    }
    return x;
  }
};

// One weight row against one row of x by table, for rows that hold NaN or infinite codes.
template <class Format>
float half_dot_by_table(const LinearTask& task, int64_t row, int m) {
  const WeightMatrix& weight = task.weight;
  const int64_t padded = padded_batch(task.batch);
  const auto* chunk = reinterpret_cast<const Half*>(task.x + kHeader) + m * kColumns;
  float total = 0.0f;
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t begin = group * weight.group_size;
    const int64_t count = at_most(weight.group_size, weight.columns - begin);
    const uint8_t* codes = weight.codes + row * weight.columns + begin;
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = i % 2 * (kColumns / 2) + i % kColumns / 2;
      const Half x = chunk[i / kColumns * padded * kColumns + slot];
      sum += to_float(x) * kDecodeTable<Format>.value[codes[i]];
    }
    total += sum * weight.scale[row * weight.groups + group];
    chunk += ceil_div(count, kColumns) * padded * kColumns;
  }
  return total * task.x[m];
}

// Lanes that add up to rows `row` to `row + kR` by each row of x; true if there was a special code.
template <class Format, int kR, int kM>
inline __attribute__((always_inline)) bool half_rows(const LinearTask& task, int64_t row, int valid,
                                                     Lanes (&total)[kM][kR]) {
  const WeightMatrix& weight = task.weight;
  const uint8_t* w[kR];
  const float* scale[kR];
  QK_UNROLL for (int r = 0; r < kR; ++r) {  // rows beyond the end repeat the last one
    const int64_t source = row + at_most(r, valid - 1);
    w[r] = weight.codes + source * weight.columns;
    scale[r] = weight.scale + source * weight.groups;
  }
  HalfBlock<Format, kR, kM> block;
  block.peak = HalfBlock<Format, kR, kM>::Codes::Peak::none();
  QK_UNROLL for (int r = 0; r < kR; ++r) {
    QK_UNROLL for (int m = 0; m < kM; ++m) total[m][r] = Lanes::zero();
  }
  const char* x = reinterpret_cast<const char*>(task.x + kHeader);
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t end = at_most((group + 1) * weight.group_size, weight.columns);
    block.clear();
    for (int64_t at = group * weight.group_size; at < end; at += kChunksPerFlush * kColumns) {
      const uint8_t* start[kR];
      QK_UNROLL for (int r = 0; r < kR; ++r) start[r] = w[r] + at;
      const int64_t count = at_most(kChunksPerFlush * kColumns, end - at);
      x = block.add_run(start, count, weight.columns, x);
    }
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      const __m512 factor = _mm512_set1_ps(scale[r][group]);
      QK_UNROLL for (int m = 0; m < kM; ++m) {
        total[m][r].v = _mm512_fmadd_ps(block.sum[r][m], factor, total[m][r].v);
      }
    }
  }
  return block.peak.special();
}

// Up to 16 weight rows at a time, whose lanes are added up together; see DotRows.
template <class Format, int kR, int kM>
__attribute__((noinline)) void half_sums(const LinearTask& task, int64_t row, int valid,
                                         float* out) {
  Lanes total[kM][Avx512::kLanes];
  QK_UNROLL for (int m = 0; m < kM; ++m) {
    for (int r = valid / kR * kR; r < Avx512::kLanes; ++r) total[m][r] = Lanes::zero();
  }
  bool special = false;
  for (int r = 0; r < valid; r += kR) {
    Lanes part[kM][kR];
    special |= half_rows<Format, kR, kM>(task, row + r, valid - r, part);
    QK_UNROLL for (int m = 0; m < kM; ++m) {
      QK_UNROLL for (int i = 0; i < kR; ++i) total[m][r + i] = part[m][i];
    }
  }
  for (int m = 0; m < task.batch; ++m) {
    const float factor = task.x[m] * Format::kHalfFactor;
    const Lanes sums = Lanes::sums(total[m]);
    Lanes::mul(sums, Lanes::broadcast(factor)).store(out + m * Avx512::kLanes);
  }
  if (!special) return;
  for (int r = 0; r < valid; ++r) {
    const int64_t columns = task.weight.columns;
    if (!has_special<Format>(task.weight.codes + (row + r) * columns, columns)) continue;
    for (int m = 0; m < task.batch; ++m) {
      out[m * Avx512::kLanes + r] = half_dot_by_table<Format>(task, row + r, m);
    }
  }
}

template <class Format>
DotKernel choose_half_batch(int batch) {
  if (batch == 1) return {half_sums<Format, 4, 1>, Avx512::kLanes};
  if (batch == 2) return {half_sums<Format, 4, 2>, Avx512::kLanes};
  if (batch == 3) return {half_sums<Format, 4, 3>, Avx512::kLanes};
  if (batch == 4) return {half_sums<Format, 4, 4>, Avx512::kLanes};
  return {half_sums<Format, 2, 8>, Avx512::kLanes};
}

DotKernel choose_half(const LinearTask& task) {
  return task.weight.format == WeightFormat::kE4M3 ? choose_half_batch<E4M3>(task.batch)
                                                   : choose_half_batch<E3M4>(task.batch);
}

void linear_half(const LinearTask& task, int64_t begin, int64_t end) {
  if (!sums_in_half(task.x_type, task.weight.format)) {
    return avx512_kernels()->linear(task, begin, end);
  }
  linear<Avx512, choose_half>(task, begin, end);
}

void gated_linear_half(const LinearTask& task, int64_t begin, int64_t end) {
  if (!sums_in_half(task.x_type, task.weight.format)) {
    return avx512_kernels()->gated_linear(task, begin, end);
  }
  gated_linear<Avx512, choose_half>(task, begin, end);
}

KernelSet with_half_sums(KernelSet set) {
  set.packed_size = packed_size_half;
  set.pack = pack_half;
  set.linear = linear_half;
  set.gated_linear = gated_linear_half;
  return set;
}

}  // namespace

const KernelSet* avx512fp16_kernels() {
  static const KernelSet set = with_half_sums(*avx512_kernels());
  return &set;
}

}  // namespace quantkit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace quantkit {
const KernelSet* avx512fp16_kernels() { return nullptr; }
}  // namespace quantkit

#endif
