// Tiles of AMX: registers of 16 rows by 64 bytes, always used whole. A product of tiles adds
//   C[i, j] += sum over pairs p of A[i, 2 p] * B[p, 2 j] + A[i, 2 p + 1] * B[p, 2 j + 1]
// with A [16, 32] and B [16 pairs, 16 columns, 2] in bfloat16 and C [16, 16] in float32. Products
// are exact, sums are rounded to nearest; numbers below 2^-126 count as zero. What is not a number
// goes to the outputs it belongs to, as in other float arithmetic.
//
// 64 columns of a row become two tile rows, dealt in eights: 0-7, 16-23, 32-39 and 48-55 go to the
// first, the others to the second. That is what interleaving bytes within 128 bits gives; both
// operands are laid out alike, so it changes the order of a sum and nothing else.
//
// For kernels_amx.cpp, after its target pragma and kernel_template.h.
#pragma once

namespace quantkit {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileFloats = kTileBytes / 4;
constexpr int64_t kChunk = 64;  // columns of a pair of tiles

struct TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

void enter_tiles() {
  alignas(64) static constexpr TileConfig kWhole = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&kWhole);
}

void leave_tiles() { _tile_release(); }

// Compilers do not know that loading a tile reads memory: to stand between stores and such loads.
inline __attribute__((always_inline)) void finish_stores() { asm volatile("" ::: "memory"); }

// Lane j of v[i] and lane i of v[j] change places.
inline __attribute__((always_inline)) void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  QK_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  QK_UNROLL for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  QK_UNROLL for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xDD);
  }
  QK_UNROLL for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

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

// Makes pairs of tile rows of stored columns: `Format` is that of codes, or BFloat16.
template <class Format>
struct TileDecoder {
  static constexpr int64_t kBytes = 1;
  __m512i high[2], low[2];

  static TileDecoder make() {
    TileDecoder decoder;
    for (int i = 0; i < 2; ++i) {
      decoder.high[i] = _mm512_load_si512(kCodeBytes<Format>.high + 64 * i);
      decoder.low[i] = _mm512_load_si512(kCodeBytes<Format>.low + 64 * i);
    }
    return decoder;
  }

  // Adjacent codes within 128 bits: the lower eight of each to `first`, the others to `second`.
  inline __attribute__((always_inline)) void decode(__m512i codes, char* first,
                                                    char* second) const {
    const __m512i top = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    const __m512i bottom = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i sign = _mm512_set1_epi8(-128);
    const __m512i with_sign = _mm512_ternarylogic_epi64(top, codes, sign, 0xF8);  // a | b & c
    _mm512_store_si512(first, _mm512_unpacklo_epi8(bottom, with_sign));
    _mm512_store_si512(second, _mm512_unpackhi_epi8(bottom, with_sign));
  }

  // 64 columns, those in `mask`, the others being zero.
  inline __attribute__((always_inline)) void row(const uint8_t* stored, uint64_t mask, char* first,
                                                 char* second) const {
    decode(_mm512_maskz_loadu_epi8(mask, stored), first, second);
  }
};

template <>
struct TileDecoder<BFloat16> {
  static constexpr int64_t kBytes = 2;

  static TileDecoder make() { return {}; }

  static inline __attribute__((always_inline)) void load(const uint8_t* stored, uint64_t mask,
                                                         __m512i* first, __m512i* second) {
    const __m512i a = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), stored);
    const __m512i b = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), stored + 64);
    *first = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), b);
    *second = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15), b);
  }

  static inline __attribute__((always_inline)) void row(const uint8_t* stored, uint64_t mask,
                                                        char* first, char* second) {
    __m512i a, b;
    load(stored, mask, &a, &b);
    _mm512_store_si512(first, a);
    _mm512_store_si512(second, b);
  }
};

// The first `count` of 64 columns.
inline uint64_t first_columns(int64_t count) {
  return count >= kChunk ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

// Packs up to 16 rows of bfloat16 as second operands: for each chunk of columns its two tiles, a
// column of a tile being a row here, or zeros. row[i] points to row i, of `rows`.
inline void pack_tile_columns(const BFloat16* const* row, int64_t rows, int64_t columns,
                              char* packed) {
  for (int64_t column = 0; column < columns; column += kChunk, packed += 2 * kTileBytes) {
    const uint64_t mask = first_columns(columns - column);
    __m512i first[16], second[16];
    QK_UNROLL for (int i = 0; i < 16; ++i) {
      first[i] = second[i] = _mm512_setzero_si512();
      if (i >= rows) continue;
      const auto* x = reinterpret_cast<const uint8_t*>(row[i] + column);
      TileDecoder<BFloat16>::load(x, mask, &first[i], &second[i]);
    }
    transpose(first);
    QK_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(packed + 64 * i, first[i]);
    transpose(second);
    QK_UNROLL for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(packed + kTileBytes + 64 * i, second[i]);
    }
  }
}

}  // namespace
}  // namespace quantkit
