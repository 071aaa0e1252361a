// AVX-512 (F, BW, VL, DQ): 64 weights at a time, decoded as even and odd bytes.
// For kernels_avx512*.cpp, after their target pragma and kernel_template.h.
#pragma once

namespace quantkit {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kColumns = 64;
  // 16 rows of x by one weight row fit too, but then x is read once per product: measured slower
  // than two passes of 8.
  static constexpr int kMaxBatch = 8;
  // 32 registers: weight rows * batch sums, three times as many weights as rows, one x.
  static constexpr int weight_rows(int batch) { return batch <= 4 ? 4 : 2; }

  struct Lanes {
    __m512 v;

    static Lanes zero() { return {_mm512_setzero_ps()}; }
    static Lanes broadcast(float value) { return {_mm512_set1_ps(value)}; }
    static Lanes load(const float* source) { return {_mm512_load_ps(source)}; }
    void store(float* target) const { _mm512_store_ps(target, v); }
    template <class T>
    static Lanes from(const T* source) {  // any alignment
      return {load16(source)};
    }
    template <class T>
    void to(T* target) const {
      store16(v, target);
    }
    static Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    static Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
    static Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
    static Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
    static Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
    float highest() const { return _mm512_reduce_max_ps(v); }
    static Lanes exp(Lanes x) {
      // Max and min return their second operand for NaN; not-less-than holds for it.
      const __mmask16 seen = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(kExpLowest), _CMP_NLT_UQ);
      x.v = _mm512_max_ps(_mm512_set1_ps(kExpLowest), x.v);
      x.v = _mm512_min_ps(_mm512_set1_ps(kExpHighest), x.v);
      const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x.v, _mm512_set1_ps(kLog2E)), 0);
      return {_mm512_maskz_scalef_ps(seen, exp_reduced(x, Lanes{n}).v, n)};
    }
    float sum() const {
      const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
      const __m128 four =
          _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
      const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
      return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    // Lane i of the result is the sum of all lanes of v[i].
    static Lanes sums(const Lanes (&v)[kLanes]) {
      __m512 four[4];  // per 128 bits, partial sums of v[4 i] to v[4 i + 3]
      QK_UNROLL for (int i = 0; i < 4; ++i) {
        const __m512 a = pair_sums(v[4 * i].v, v[4 * i + 1].v);
        const __m512 b = pair_sums(v[4 * i + 2].v, v[4 * i + 3].v);
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
        four[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
      }
      return {quarter_sums(quarter_sums(four[0], four[1]), quarter_sums(four[2], four[3]))};
    }
    static __m512 pair_sums(__m512 a, __m512 b) {
      return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    static __m512 quarter_sums(__m512 a, __m512 b) {
      return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
  };

  template <class Format>
  struct Codes {
    static constexpr float kFactor = Format::kHalfFactor;
    __m512i raw, even, odd;  // even and odd: float16 of value / kFactor

    static Codes load(const uint8_t* codes) { return decode(_mm512_loadu_si512(codes)); }
    static Codes load_some(const uint8_t* codes, int count) {
      return decode(_mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, codes));
    }
    static Codes decode(__m512i raw) {
      const __m512i mask = _mm512_set1_epi16(static_cast<short>(Format::kHalfMask));
      const __m512i high = _mm512_slli_epi16(raw, 8);
      return {raw, _mm512_and_si512(_mm512_srai_epi16(high, Format::kHalfShift), mask),
              _mm512_and_si512(_mm512_srai_epi16(raw, Format::kHalfShift), mask)};
    }
    Lanes part(int index) const {
      const __m512i half = index < 2 ? even : odd;
      const __m256i bits =
          index % 2 == 0 ? _mm512_castsi512_si256(half) : _mm512_extracti64x4_epi64(half, 1);
      return {_mm512_cvtph_ps(bits)};
    }

    // The largest magnitude seen, in the low seven bits of each byte; costs two instructions.
    struct Peak {
      __m512i highest;

      static Peak none() { return {_mm512_setzero_si512()}; }
      void add(const Codes& codes) {
        if constexpr (Format::kFirstSpecial != kNoSpecial) {
          const __m512i magnitude = _mm512_or_si512(codes.raw, _mm512_set1_epi8(-128));
          highest = _mm512_max_epu8(highest, magnitude);
        }
      }
      bool special() const {
        if constexpr (Format::kFirstSpecial == kNoSpecial) return false;
        const __m512i first = _mm512_set1_epi8(static_cast<char>(0x80 | Format::kFirstSpecial));
        return _mm512_cmpge_epu8_mask(highest, first) != 0;
      }
    };
  };

  static int slot(int column) { return (column % 2 * 2 + column / 32) * kLanes + column % 32 / 2; }

  static __m512 load16(const float* x) { return _mm512_loadu_ps(x); }
  static __m512 load16(const BFloat16* x) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m512 load16(const Half* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
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
          const __m512i pairs = _mm512_loadu_si512(x + half * 32);
          const __m512i high = _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xFFFF0000)));
          out.parts[half].v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
          out.parts[2 + half].v = _mm512_castsi512_ps(high);
        }
        return out;
      }
      const __m512i even =
          _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
      QK_UNROLL for (int half = 0; half < 2; ++half) {
        const __m512 a = load16(x + half * 32);
        const __m512 b = load16(x + half * 32 + 16);
        out.parts[half].v = _mm512_permutex2var_ps(a, even, b);
        out.parts[2 + half].v = _mm512_permutex2var_ps(a, odd, b);
      }
      return out;
    }
    const Lanes& part(int index) const { return parts[index]; }
  };

  static void store16(__m512 v, float* out) { _mm512_storeu_ps(out, v); }
  static void store16(__m512 v, Half* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store16(__m512 v, BFloat16* out) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i words = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(words));
  }

  template <class Format, class T>
  static void dequantize(const uint8_t* codes, float scale, T* out) {
    const __m512 factor = _mm512_set1_ps(Format::kHalfFactor);
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + half);
      const __m512i bits = half_bits<Format>(_mm512_cvtepu8_epi16(bytes));
      const __m256i quarter[2] = {_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1)};
      for (int i = 0; i < 2; ++i) {
        const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(quarter[i]), factor);
        store16(_mm512_mul_ps(value, _mm512_set1_ps(scale)), out + half * 32 + i * 16);
      }
    }
  }
  // float16 bits of value / kHalfFactor; special codes become the float16 NaN or infinity.
  template <class Format>
  static __m512i half_bits(__m512i codes) {
    const __m512i moved = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), Format::kHalfShift);
    const __m512i bits = _mm512_and_si512(moved, _mm512_set1_epi16(short(Format::kHalfMask)));
    if constexpr (Format::kFirstSpecial == kNoSpecial) return bits;
    const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7F));
    const __mmask32 special =
        _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(Format::kFirstSpecial));
    const __m512i infinity = _mm512_maskz_mov_epi16(special, _mm512_set1_epi16(0x7C00));
    return _mm512_or_si512(bits, infinity);
  }
};

// Brings what lies kR weight rows further on into L1, which is near enough to be in time only where
// rows are long. Below kNearBytes, groups of kR rows further ahead are brought into L2 first, which
// takes many more requests at once than L1: 1.2 times the speed at 576 columns.
constexpr int64_t kNearBytes = 8 * 1024;
constexpr int64_t kGroupsAhead = 4;

template <int kR>
inline __attribute__((always_inline)) void prefetch_group(const uint8_t* stored,
                                                          int64_t row_bytes) {
  __builtin_prefetch(stored + kR * row_bytes);
  if (kR * row_bytes < kNearBytes) {
    __builtin_prefetch(stored + kGroupsAhead * kR * row_bytes, 0, 2);
  }
}

}  // namespace
}  // namespace quantkit
