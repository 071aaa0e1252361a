// Pairs of bfloat16 numbers, a 32-bit lane each: what the processor multiplies and adds two at a
// time (vdpbf16ps, tdpbf16ps), with float32 sums. Every code of an 8-bit format is a bfloat16
// number.
//
// 64 columns of a row become two vectors, dealt in eights: 0-7, 16-23, 32-39 and 48-55 go to the
// first, the others to the second. That is what interleaving bytes within 128 bits gives; both
// operands are laid out alike, so it changes the order of a sum and nothing else.
//
// For kernels_avx512bf16.cpp and kernels_amx.cpp, after their target pragma and kernel_template.h.
#pragma once

namespace quantkit {
namespace {

constexpr int64_t kChunk = 64;  // columns

// The two bytes of the bfloat16 of every code without a sign: exact, in all three formats.
template <class Format>
struct CodeBytes {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];

  constexpr CodeBytes() : high(), low() {
    for (int code = 0; code < 128; ++code) {
      const auto bits = __builtin_bit_cast(uint32_t, kDecodeTable<Format>.value[code]);
      high[code] = static_cast<uint8_t>(bits >> 24);
      low[code] = static_cast<uint8_t>(bits >> 16);
    }
  }
};

template <class Format>
inline constexpr CodeBytes<Format> kCodeBytes{};

// Makes two vectors of a chunk of stored columns: `Format` is that of codes, or BFloat16.
template <class Format>
struct PairDecoder {
  static constexpr int64_t kBytes = 1;
  __m512i high[2], low[2];

  static PairDecoder make() {
    PairDecoder decoder;
    for (int i = 0; i < 2; ++i) {
      decoder.high[i] = _mm512_load_si512(kCodeBytes<Format>.high + 64 * i);
      decoder.low[i] = _mm512_load_si512(kCodeBytes<Format>.low + 64 * i);
    }
    return decoder;
  }

  // Adjacent codes within 128 bits: the lower eight of each to `first`, the others to `second`.
  inline __attribute__((always_inline)) void decode(__m512i codes, __m512i* first,
                                                    __m512i* second) const {
    const __m512i top = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    const __m512i bottom = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i sign = _mm512_set1_epi8(-128);
    const __m512i with_sign = _mm512_ternarylogic_epi64(top, codes, sign, 0xF8);  // a | b & c
    *first = _mm512_unpacklo_epi8(bottom, with_sign);
    *second = _mm512_unpackhi_epi8(bottom, with_sign);
  }
  inline __attribute__((always_inline)) void decode(__m512i codes, char* first,
                                                    char* second) const {
    __m512i a, b;
    decode(codes, &a, &b);
    _mm512_store_si512(first, a);
    _mm512_store_si512(second, b);
  }

  // The columns in `mask`, the others being zero.
  inline __attribute__((always_inline)) void load(const uint8_t* stored, uint64_t mask,
                                                  __m512i* first, __m512i* second) const {
    decode(_mm512_maskz_loadu_epi8(mask, stored), first, second);
  }
};

template <>
struct PairDecoder<BFloat16> {
  static constexpr int64_t kBytes = 2;

  static PairDecoder make() { return {}; }

  static inline __attribute__((always_inline)) void load(const uint8_t* stored, uint64_t mask,
                                                         __m512i* first, __m512i* second) {
    const __m512i a = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), stored);
    const __m512i b = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), stored + 64);
    *first = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), b);
    *second = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15), b);
  }
};

// `load` into memory.
template <class Format>
inline __attribute__((always_inline)) void store_pairs(const PairDecoder<Format>& decoder,
                                                       const uint8_t* stored, uint64_t mask,
                                                       char* first, char* second) {
  __m512i a, b;
  decoder.load(stored, mask, &a, &b);
  _mm512_store_si512(first, a);
  _mm512_store_si512(second, b);
}

// The first `count` of 64 columns.
inline uint64_t first_columns(int64_t count) {
  return count >= kChunk ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

}  // namespace
}  // namespace quantkit
