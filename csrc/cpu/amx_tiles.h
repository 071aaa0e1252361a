// Tiles of AMX: registers of 16 rows by 64 bytes, always used whole. A product of tiles adds
//   C[i, j] += sum over pairs p of A[i, 2 p] * B[p, 2 j] + A[i, 2 p + 1] * B[p, 2 j + 1]
// with A [16, 32] and B [16 pairs, 16 columns, 2] in bfloat16 and C [16, 16] in float32. Products
// are exact, sums are rounded to nearest; numbers below 2^-126 count as zero. What is not a number
// goes to the outputs it belongs to, as in other float arithmetic.
//
// A chunk of columns of a row becomes two tile rows, see bf16_pairs.h.
//
// For kernels_amx.cpp, after its target pragma, kernel_template.h and bf16_pairs.h.
#pragma once

namespace quantkit {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileFloats = kTileBytes / 4;

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
      PairDecoder<BFloat16>::load(x, mask, &first[i], &second[i]);
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
