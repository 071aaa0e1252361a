// AVX2 + FMA + F16C kernels: 32 weights at a time, decoded as even and odd bytes.
//
// Every header comes before the target pragma: inline code of the standard library must stay built
// for the baseline, because the linker keeps one copy of it for the whole program.

#include <cstdint>
#include <cstring>

#include "float16.h"
#include "formats.h"
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "kernel_template.h"

namespace quantkit {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kColumns = 32;
  static constexpr int kMaxBatch = 4;
  // 16 registers: weight rows * batch sums, three times as many weights as rows, one x.
  static constexpr int weight_rows(int batch) { return batch == 1 ? 4 : 2; }

  struct Lanes {
    __m256 v;

    static Lanes zero() { return {_mm256_setzero_ps()}; }
    static Lanes broadcast(float value) { return {_mm256_set1_ps(value)}; }
    static Lanes load(const float* source) { return {_mm256_load_ps(source)}; }
    void store(float* target) const { _mm256_store_ps(target, v); }
    template <class T>
    static Lanes from(const T* source) {  // any alignment
      return {load8(source)};
    }
    template <class T>
    void to(T* target) const {
      store8(v, target);
    }
    static Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    static Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.v, b.v)}; }
    static Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.v, b.v)}; }
    static Lanes div(Lanes a, Lanes b) { return {_mm256_div_ps(a.v, b.v)}; }
    static Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.v, b.v)}; }
    float highest() const {
      const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
      const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
      return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
    static Lanes exp(Lanes x) {
      // Max and min return their second operand for NaN; not-less-than holds for it.
      const __m256 seen = _mm256_cmp_ps(x.v, _mm256_set1_ps(kExpLowest), _CMP_NLT_UQ);
      x.v = _mm256_max_ps(_mm256_set1_ps(kExpLowest), x.v);
      x.v = _mm256_min_ps(_mm256_set1_ps(kExpHighest), x.v);
      const __m256 n = _mm256_round_ps(_mm256_mul_ps(x.v, _mm256_set1_ps(kLog2E)),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      // 2^n in two factors, because n may be 128.
      const __m256i whole = _mm256_cvtps_epi32(n);
      const __m256i half = _mm256_srai_epi32(whole, 1);
      const Lanes scaled = mul(exp_reduced(x, Lanes{n}), power_of_two(half));
      const Lanes power = mul(scaled, power_of_two(_mm256_sub_epi32(whole, half)));
      return {_mm256_and_ps(power.v, seen)};
    }
    static Lanes power_of_two(__m256i n) {
      const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
      return {_mm256_castsi256_ps(bits)};
    }
    float sum() const {
      const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
      const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
      return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    // Lane i of the result is the sum of all lanes of v[i].
    static Lanes sums(const Lanes (&v)[kLanes]) {
      __m256 four[2];  // per 128 bits, partial sums of v[4 i] to v[4 i + 3]
      QK_UNROLL for (int i = 0; i < 2; ++i) {
        const __m256 a = pair_sums(v[4 * i].v, v[4 * i + 1].v);
        const __m256 b = pair_sums(v[4 * i + 2].v, v[4 * i + 3].v);
        const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
        const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
        four[i] = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
      }
      return {_mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                            _mm256_permute2f128_ps(four[0], four[1], 0x31))};
    }
    static __m256 pair_sums(__m256 a, __m256 b) {
      return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    }
  };

  template <class Format>
  struct Codes {
    static constexpr float kFactor = Format::kHalfFactor;
    __m256i raw, even, odd;  // even and odd: float16 of value / kFactor

    static Codes load(const uint8_t* codes) {
      return decode(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    }
    static Codes load_some(const uint8_t* codes, int count) {
      alignas(32) uint8_t padded[kColumns] = {};
      __builtin_memcpy(padded, codes, count);
      return load(padded);
    }
    static Codes decode(__m256i raw) {
      const __m256i mask = _mm256_set1_epi16(static_cast<short>(Format::kHalfMask));
      const __m256i high = _mm256_slli_epi16(raw, 8);
      return {raw, _mm256_and_si256(_mm256_srai_epi16(high, Format::kHalfShift), mask),
              _mm256_and_si256(_mm256_srai_epi16(raw, Format::kHalfShift), mask)};
    }
    Lanes part(int index) const {
      const __m256i half = index < 2 ? even : odd;
      const __m128i bits =
          index % 2 == 0 ? _mm256_castsi256_si128(half) : _mm256_extracti128_si256(half, 1);
      return {_mm256_cvtph_ps(bits)};
    }

    // The largest magnitude seen, in the low seven bits of each byte; costs two instructions.
    struct Peak {
      __m256i highest;

      static Peak none() { return {_mm256_setzero_si256()}; }
      void add(const Codes& codes) {
        if constexpr (Format::kFirstSpecial != kNoSpecial) {
          const __m256i magnitude = _mm256_or_si256(codes.raw, _mm256_set1_epi8(-128));
          highest = _mm256_max_epu8(highest, magnitude);
        }
      }
      bool special() const {
        const __m256i first = _mm256_set1_epi8(static_cast<char>(0x80 | Format::kFirstSpecial));
        if constexpr (Format::kFirstSpecial == kNoSpecial) return false;
        return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(highest, first), highest));
      }
    };
  };

  static int slot(int column) { return (column % 2 * 2 + column / 16) * kLanes + column % 16 / 2; }

  static __m256 load8(const float* x) { return _mm256_loadu_ps(x); }
  static __m256 load8(const BFloat16* x) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static __m256 load8(const Half* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }

  // kColumns floats in the order in which Codes decode.
  template <class T>
  struct Cells {
    static constexpr float kFactor = 1.0f;
    Lanes parts[kColumns / kLanes];

    static Cells load(const T* x) {
      Cells out;
      if constexpr (kIsBFloat16<T>) {
        QK_UNROLL for (int half = 0; half < 2; ++half) {
          const auto* source = reinterpret_cast<const __m256i*>(x + half * 16);
          const __m256i pairs = _mm256_loadu_si256(source);
          const __m256i high = _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xFFFF0000)));
          out.parts[half].v = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
          out.parts[2 + half].v = _mm256_castsi256_ps(high);
        }
        return out;
      }
      QK_UNROLL for (int half = 0; half < 2; ++half) {
        const __m256 a = load8(x + half * 16);
        const __m256 b = load8(x + half * 16 + 8);
        out.parts[half].v = in_order(_mm256_shuffle_ps(a, b, 0x88));
        out.parts[2 + half].v = in_order(_mm256_shuffle_ps(a, b, 0xDD));
      }
      return out;
    }
    const Lanes& part(int index) const { return parts[index]; }
  };
  // shuffle_ps works within 128-bit halves; this puts its pairs back in order.
  static __m256 in_order(__m256 v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xD8));
  }

  static void store8(__m256 v, float* out) { _mm256_storeu_ps(out, v); }
  static void store8(__m256 v, Half* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store8(__m256 v, BFloat16* out) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), packed);
  }

  template <class Format, class T>
  static void dequantize(const uint8_t* codes, float scale, T* out) {
    const __m256 factor = _mm256_set1_ps(Format::kHalfFactor);
    for (int half = 0; half < 2; ++half) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + half);
      const __m256i bits = half_bits<Format>(_mm256_cvtepu8_epi16(bytes));
      const __m128i quarter[2] = {_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)};
      for (int i = 0; i < 2; ++i) {
        const __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(quarter[i]), factor);
        store8(_mm256_mul_ps(value, _mm256_set1_ps(scale)), out + half * 16 + i * 8);
      }
    }
  }
  // float16 bits of value / kHalfFactor; special codes become the float16 NaN or infinity.
  template <class Format>
  static __m256i half_bits(__m256i codes) {
    const __m256i moved = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), Format::kHalfShift);
    const __m256i bits = _mm256_and_si256(moved, _mm256_set1_epi16(short(Format::kHalfMask)));
    if constexpr (Format::kFirstSpecial == kNoSpecial) return bits;
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7F));
    const __m256i last = _mm256_set1_epi16(Format::kFirstSpecial - 1);
    const __m256i special = _mm256_cmpgt_epi16(magnitude, last);
    return _mm256_or_si256(bits, _mm256_and_si256(special, _mm256_set1_epi16(0x7C00)));
  }
};

}  // namespace

const KernelSet* avx2_kernels() { return &kKernels<Avx2>; }

}  // namespace quantkit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace quantkit {
const KernelSet* avx2_kernels() { return nullptr; }
}  // namespace quantkit

#endif
