// Products of tiles of keys, values and queries, and what turns scores into weights of values: rows
// of 64 keys, a tile's queries in its columns.
//
// For kernels_amx.cpp, after amx_attention_tile.h.
#pragma once

namespace quantkit {
namespace {

inline void clear_four_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Tiles 0 to 3, to memory.
inline void store_four_tiles(float* products) {
  _tile_stored(0, products, 64);
  _tile_stored(1, products + kTileFloats, 64);
  _tile_stored(2, products + 2 * kTileFloats, 64);
  _tile_stored(3, products + 3 * kTileFloats, 64);
  finish_stores();
}

// Products of 64 keys with 16 queries: [keys, queries]. Decodes something meanwhile.
template <class Decoding>
inline void multiply_keys(const char* keys, const char* query, int64_t chunks, float* products,
                          Decoding& decoding) {
  const int64_t stride = chunks * 2 * kTileBytes;
  clear_four_tiles();
  for (int64_t at = 0; at < stride; at += kTileBytes) {
    _tile_loadd(7, query + at, 64);
    _tile_loadd(4, keys + at, 64);
    decoding.step();
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, keys + stride + at, 64);
    decoding.step();
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, keys + 2 * stride + at, 64);
    decoding.step();
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(4, keys + 3 * stride + at, 64);
    decoding.step();
    _tile_dpbf16ps(3, 4, 7);
  }
  store_four_tiles(products);
}

// 8 rows of weights, in two parts, by `steps` times 32 keys: 64 dimensions. Decodes meanwhile.
template <class Decoding>
inline void multiply_values(const char* weights, const char* values, int64_t steps,
                            int64_t step_bytes, float* products, Decoding& decoding) {
  clear_four_tiles();
  for (int64_t step = 0; step < steps; ++step, weights += kTileBytes, values += step_bytes) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(6, values, 64);
    decoding.step();
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + kTileBytes, 64);
    decoding.step();
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, values + 2 * kTileBytes, 64);
    decoding.step();
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, values + 3 * kTileBytes, 64);
    decoding.step();
    _tile_dpbf16ps(3, 4, 7);
  }
  store_four_tiles(products);
}

// Scores of up to 4 rows with 16 keys; products have the rows in their first lanes.
inline void turn_four_rows(const float* products, __m512 factor, float* scores) {
  __m512 keys[4];  // lanes 4 l to 4 l + 3 are of key 4 l + i
  QK_UNROLL for (int i = 0; i < 4; ++i) {
    keys[i] = _mm512_castps128_ps512(_mm_load_ps(products + i * 16));
    keys[i] = _mm512_insertf32x4(keys[i], _mm_load_ps(products + (4 + i) * 16), 1);
    keys[i] = _mm512_insertf32x4(keys[i], _mm_load_ps(products + (8 + i) * 16), 2);
    keys[i] = _mm512_insertf32x4(keys[i], _mm_load_ps(products + (12 + i) * 16), 3);
    keys[i] = _mm512_mul_ps(keys[i], factor);
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(keys[0], keys[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(keys[0], keys[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(keys[2], keys[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(keys[2], keys[3]));
  _mm512_store_ps(scores, _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)));
  _mm512_store_ps(scores + kPartitionKeys, _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)));
  _mm512_store_ps(scores + 2 * kPartitionKeys, _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)));
  _mm512_store_ps(scores + 3 * kPartitionKeys, _mm512_castpd_ps(_mm512_unpackhi_pd(b, d)));
}

inline void turn_rows(const float* products, __m512 factor, float* scores) {
  __m512i values[16];
  QK_UNROLL for (int i = 0; i < 16; ++i) {
    const __m512 score = _mm512_mul_ps(_mm512_load_ps(products + i * 16), factor);
    values[i] = _mm512_castps_si512(score);
  }
  transpose(values);
  QK_UNROLL for (int i = 0; i < 16; ++i) {
    _mm512_store_si512(scores + i * kPartitionKeys, values[i]);
  }
}

// exp(x) for x up to 0, in the lanes of `mask`, zero in others; zero below kExpLowest, as in
// Lanes::exp.
inline __attribute__((always_inline)) __m512 exp_negative(__mmask16 mask, __m512 x) {
  const __mmask16 seen =
      _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(kExpLowest), _CMP_NLT_UQ);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E)), 0);
  const Avx512::Lanes power = exp_reduced(Avx512::Lanes{x}, Avx512::Lanes{n});
  return _mm512_maskz_scalef_ps(seen, power.v, n);
}

// Two times 16 weights as pairs of bfloat16: their upper halves, and, 8 rows below, what these cut
// off.
inline __attribute__((always_inline)) void split_weights(__m512 a, __m512 b, char* target) {
  const __m512i upper = _mm512_set1_epi32(int(0xFFFF0000));
  const __m512i bits[] = {_mm512_castps_si512(a), _mm512_castps_si512(b)};
  const __m512 cut[] = {_mm512_castsi512_ps(_mm512_and_si512(bits[0], upper)),
                        _mm512_castsi512_ps(_mm512_and_si512(bits[1], upper))};
  const __m512i half = _mm512_set1_epi32(0x8000);  // to nearest
  const __m512i rest_a = _mm512_add_epi32(_mm512_castps_si512(_mm512_sub_ps(a, cut[0])), half);
  const __m512i rest_b = _mm512_add_epi32(_mm512_castps_si512(_mm512_sub_ps(b, cut[1])), half);
  // (b & upper) | a >> 16
  const __m512i first = _mm512_srli_epi32(bits[0], 16);
  const __m512i second = _mm512_srli_epi32(rest_a, 16);
  _mm512_store_si512(target, _mm512_ternarylogic_epi32(first, bits[1], upper, 0xF8));
  _mm512_store_si512(target + kTileBytes / 2,
                     _mm512_ternarylogic_epi32(second, rest_b, upper, 0xF8));
}

// Lanes of the partition's vector `index` that belong to keys within `seen`.
inline __mmask16 seen_lanes(Range seen, int64_t index) {
  const int64_t first = index * 16;
  const int64_t begin = seen.begin > first ? seen.begin - first : 0;
  const int64_t end = at_most(seen.end - first, 16);
  if (begin >= end) return 0;
  return static_cast<__mmask16>((0xFFFFu >> (16 - end)) & (0xFFFFu << begin));
}

// Weights of one row: exp(score - highest) where seen, otherwise zero. `sum` gets 16 partial sums.
template <bool kAll>
inline void row_weights(const float* scores, Range seen, float* highest, float* sum,
                        char* target) {
  __m512 score[kPartitionTiles];
  __mmask16 mask[kPartitionTiles];
  __m512 peak = _mm512_set1_ps(kNoScore);
  QK_UNROLL for (int i = 0; i < kPartitionTiles; ++i) {
    mask[i] = kAll ? __mmask16{0xFFFF} : seen_lanes(seen, i);
    score[i] = _mm512_load_ps(scores + 16 * i);
    peak = _mm512_mask_max_ps(peak, mask[i], peak, score[i]);
  }
  *highest = _mm512_reduce_max_ps(peak);
  const __m512 minus = _mm512_set1_ps(-*highest);
  QK_UNROLL for (int i = 0; i < kPartitionTiles; ++i) {
    score[i] = exp_negative(mask[i], _mm512_add_ps(score[i], minus));
  }
  const __m512 first = _mm512_add_ps(score[0], score[1]);
  _mm512_store_ps(sum, _mm512_add_ps(first, _mm512_add_ps(score[2], score[3])));
  split_weights(score[0], score[1], target);
  split_weights(score[2], score[3], target + kTileBytes);
}

void cap_scores(float cap, int64_t rows, float* scores) {
  for (int64_t i = 0; i < rows * kPartitionKeys; i += 16) {
    soft_capped(Avx512::Lanes::load(scores + i), cap).store(scores + i);
  }
}

// From products of keys with a tile of rows to weights of values.
void tile_weights(const AttentionTask& task, const AttentionTile& tile, Range partition,
                  int64_t first_row, int64_t rows, const float* products, float* scores,
                  char* weights, const Partial& result) {
  const float scale =
      task.k_scale == nullptr ? 1.0f : task.k_scale[tile.kv_head * task.k_scale_stride];
  const __m512 factor = _mm512_set1_ps(task.softmax_scale * scale);
  for (int64_t i = 0; i < kPartitionTiles; ++i) {
    const auto turn = rows <= 4 ? turn_four_rows : turn_rows;
    turn(products + i * kTileFloats, factor, scores + i * kTileRows);
  }
  if (task.softcap > 0) cap_scores(task.softcap, rows, scores);
  alignas(64) float sums[kTileRows][16];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = first_row + i;
    const Range seen = seen_by(task, tile, row / task.group).within(partition.begin, partition.end);
    const Range relative{seen.begin - partition.begin, seen.end - partition.begin};
    const bool all = relative.begin == 0 && relative.end == kPartitionKeys;
    const auto weigh = all ? row_weights<true> : row_weights<false>;
    char* target = weights + i / kWeightRows * 2 * kTileBytes + i % kWeightRows * 64;
    weigh(scores + i * kPartitionKeys, relative, result.highest + row, sums[i], target);
  }
  Avx512::Lanes lanes[kTileRows];
  QK_UNROLL for (int i = 0; i < kTileRows; ++i) {
    lanes[i] = i < rows ? Avx512::Lanes::load(sums[i]) : Avx512::Lanes::zero();
  }
  Avx512::Lanes::sums(lanes).store(result.total + first_row);
}

}  // namespace
}  // namespace quantkit
