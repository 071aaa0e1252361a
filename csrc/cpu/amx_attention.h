// Attention with tiles, for bfloat16 queries and caches of codes or bfloat16. Scores are a
// product of 16 keys by 16 queries, with queries and keys as they are. The weights of values are
// split into two bfloat16, of which the second holds what the first cuts off: together they are off
// by 2^-16 at most. All sums are float32.
//
// As in kernel_attention.h every query attends to exactly the keys it sees, and a query's result
// does not depend on its tile: keys that it does not see have the weight zero, which adds nothing.
// Where a value is not finite, zero would spoil the sum; then unseen values are left out, token by
// token.
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

// A tile of queries, some heads, one partition.
template <class Format>
struct TileAttention {
  const AttentionTask& task;
  const AttentionTile& tile;  // of the first head
  const AttentionHeads& heads;
  Range partition;
  TileSizes sizes;
  TileScratch scratch;

  int64_t count() const { return partition.end - partition.begin; }
  Partial result(int64_t head) const {
    return Partial::at(heads.partial + head * heads.partial_stride, sizes.rows);
  }
  const uint8_t* stored(const uint8_t* cache, int64_t head) const {
    return cache + (tile.kv_head + head) * task.head_dim * TileDecoder<Format>::kBytes;
  }

  // Scores of a head, whose keys are decoded; decodes its values. Returns whether all values are
  // finite, or all queries see all of them.
  template <bool kAll, bool kCheck>
  bool multiply_queries(int64_t head, const StoredKeys& keys, const StoredKeys& later) const {
    ValueDecoding<Format, kAll, kCheck> decoding{TileDecoder<Format>::make(),
                                                 stored(task.values, head),
                                                 keys,
                                                 later,
                                                 count(),
                                                 task.head_dim,
                                                 scratch.values};
    const char* query = reinterpret_cast<const char*>(heads.query + head * heads.query_stride);
    for (int64_t t = 0; t < sizes.row_tiles; ++t) {
      multiply_keys(scratch.keys, query + t * sizes.chunks * 2 * kTileBytes, sizes.chunks,
                    scratch.products + t * 4 * kTileFloats, decoding);
    }
    while (decoding.step()) {
    }
    return decoding.finite;
  }

  void weigh(int64_t head) const {
    AttentionTile of_head = tile;
    of_head.kv_head += head;
    for (int64_t t = 0; t < sizes.row_tiles; ++t) {
      const int64_t first = t * kTileRows;
      tile_weights(task, of_head, partition, first, at_most(kTileRows, sizes.rows - first),
                   scratch.products + t * 4 * kTileFloats, scratch.scores,
                   scratch.weights + t * 4 * kTileBytes, result(head));
    }
    finish_stores();
  }

  // Output of some rows, from the weights and values at hand. Decodes meanwhile.
  template <class Decoding>
  void multiply_weights(int64_t head, Range rows, Decoding& decoding) const {
    const Partial target = result(head);
    for (int64_t first = rows.begin / kWeightRows * kWeightRows; first < rows.end;
         first += kWeightRows) {
      const Range stored = rows.within(first, first + kWeightRows);
      for (int64_t chunk = 0; chunk < sizes.chunks; ++chunk) {
        multiply_values(scratch.weights + first / kWeightRows * 2 * kTileBytes,
                        scratch.values + chunk * 4 * kTileBytes, ceil_div(count(), kStepKeys),
                        sizes.chunks * 4 * kTileBytes, scratch.output, decoding);
        for (int64_t row = stored.begin; row < stored.end; ++row) {
          float* out = target.output + (row * sizes.chunks + chunk) * kChunk;
          const float* cut = scratch.output + (row - first) * 16;
          QK_UNROLL for (int t = 0; t < 4; ++t) {
            const __m512 upper = _mm512_load_ps(cut + t * kTileFloats);
            const __m512 rest = _mm512_load_ps(cut + t * kTileFloats + kTileFloats / 2);
            _mm512_store_ps(out + 16 * t, _mm512_add_ps(upper, rest));
          }
        }
      }
    }
    while (decoding.step()) {
    }
    finish_stores();
  }

  // Token by token, each with the values that it sees.
  void weigh_apart(int64_t head) const {
    for (int64_t token = 0; token < tile.tokens; ++token) {
      const Range seen = seen_by(task, tile, token).within(partition.begin, partition.end);
      const Range visible = seen.empty() ? Range{partition.begin, partition.begin} : seen;
      const auto keys = StoredKeys::of(task, tile, partition.begin, visible);
      ValueDecoding<Format, false, false> decoding{TileDecoder<Format>::make(),
                                                   stored(task.values, head),
                                                   keys,
                                                   keys,
                                                   count(),
                                                   task.head_dim,
                                                   scratch.values};
      while (decoding.step()) {
      }
      finish_stores();
      NothingToDecode nothing;
      multiply_weights(head, {token * task.group, (token + 1) * task.group}, nothing);
    }
  }

  template <bool kAll, bool kCheck>
  void run_heads(const StoredKeys& keys, const StoredKeys& later) const {
    const auto decode_keys = [&](int64_t head) {
      return KeyDecoding<Format, kAll>{TileDecoder<Format>::make(),
                                       stored(task.keys, head),
                                       keys,
                                       later,
                                       count(),
                                       task.head_dim,
                                       scratch.keys};
    };
    auto first = decode_keys(0);
    while (first.step()) {
    }
    finish_stores();
    for (int64_t head = 0; head < heads.count; ++head) {
      const bool finite = multiply_queries<kAll, kCheck>(head, keys, later);
      weigh(head);
      if (!finite) weigh_apart(head);
      auto next = decode_keys(head + 1);
      NothingToDecode nothing;
      if (head + 1 == heads.count) {
        if (finite) multiply_weights(head, {0, sizes.rows}, nothing);
      } else {
        multiply_weights(head, {0, finite ? sizes.rows : 0}, next);
      }
    }
  }

  void run() const {
    const int64_t first = seen_by(task, tile, 0).within(partition.begin, partition.end).begin;
    const auto keys = StoredKeys::of(task, tile, partition.begin, {first, partition.end});
    const int64_t length = tile.position + tile.tokens;
    const Range next = Range{partition.end, partition.end + kPartitionKeys}.within(0, length);
    const auto later = next.empty() ? keys : StoredKeys::of(task, tile, next.begin, next);
    if (tile.tokens > 1) return run_heads<false, true>(keys, later);
    if (keys.all()) return run_heads<true, false>(keys, later);
    run_heads<false, false>(keys, later);
  }
};

template <class Format>
void attend_with_tiles(const AttentionTask& task, const AttentionTile& tile, int64_t number,
                       const AttentionHeads& heads, float* data) {
  const TileSizes sizes = TileSizes::of(task, tile.tokens);
  const TileScratch scratch = TileScratch::at(data, sizes);
  TileAttention<Format>{task, tile, heads, partition_of(tile, number), sizes, scratch}.run();
}

// Natural order of 64 dimensions of one row: four by four vectors of four change places.
inline void in_order(const float* output, __m512 (&values)[4]) {
  __m512 t[4];
  QK_UNROLL for (int i = 0; i < 4; ++i) t[i] = _mm512_load_ps(output + 16 * i);
  const __m512 a = _mm512_shuffle_f32x4(t[0], t[1], 0x88);  // lanes 0 and 2 of both
  const __m512 b = _mm512_shuffle_f32x4(t[2], t[3], 0x88);
  const __m512 c = _mm512_shuffle_f32x4(t[0], t[1], 0xDD);  // lanes 1 and 3
  const __m512 d = _mm512_shuffle_f32x4(t[2], t[3], 0xDD);
  values[0] = _mm512_shuffle_f32x4(a, b, 0x88);
  values[1] = _mm512_shuffle_f32x4(c, d, 0x88);
  values[2] = _mm512_shuffle_f32x4(a, b, 0xDD);
  values[3] = _mm512_shuffle_f32x4(c, d, 0xDD);
}

void finish_with_tiles(const AttentionTask& task, const AttentionTile& tile, const float* data) {
  const TileSizes sizes = TileSizes::of(task, tile.tokens);
  const Partial folded = Partial::at(const_cast<float*>(data), sizes.rows);
  const float scale =
      task.v_scale == nullptr ? 1.0f : task.v_scale[tile.kv_head * task.v_scale_stride];
  for (int64_t row = 0; row < sizes.rows; ++row) {
    const int64_t token = tile.row + row / task.group;
    const int64_t head = tile.kv_head * task.group + row % task.group;
    auto* out = static_cast<BFloat16*>(task.out) +
                (token * task.kv_heads * task.group + head) * task.head_dim;
    const __m512 factor = _mm512_set1_ps(scale / folded.total[row]);
    for (int64_t chunk = 0; chunk < sizes.chunks; ++chunk) {
      __m512 values[4];
      in_order(folded.output + (row * sizes.chunks + chunk) * kChunk, values);
      for (int i = 0; i < 4; ++i) {
        const int64_t column = chunk * kChunk + 16 * i;
        const Avx512::Lanes value{_mm512_mul_ps(values[i], factor)};
        if (column >= task.head_dim) break;
        store_lanes<Avx512::Lanes, 16>(value, out + column, task.head_dim - column);
      }
    }
  }
}

// What KernelSet offers; other types go to the AVX-512 kernels. Partial results have one layout.

int64_t amx_tile_rows(const AttentionTask& task) {
  return tiles_attend(task) ? 64 : avx512_kernels()->tile_rows(task);
}

int64_t amx_query_size(const AttentionTask& task, int64_t tokens) {
  return tiles_attend(task) ? TileSizes::of(task, tokens).query()
                            : avx512_kernels()->query_size(task, tokens);
}

int64_t amx_attention_scratch(const AttentionTask& task, int64_t tokens) {
  return tiles_attend(task) ? TileSizes::of(task, tokens).scratch()
                            : avx512_kernels()->scratch_size(task, tokens);
}

void amx_pack_queries(const AttentionTask& task, const AttentionTile& tile, float* query) {
  if (tiles_attend(task)) return pack_tile_queries(task, tile, query);
  avx512_kernels()->pack_queries(task, tile, query);
}

void amx_attend(const AttentionTask& task, const AttentionTile& tile, int64_t number,
                const AttentionHeads& heads, float* scratch) {
  if (!tiles_attend(task)) return avx512_kernels()->attend(task, tile, number, heads, scratch);
  if (task.cache_type == WeightFormat::kE4M3) {
    return attend_with_tiles<E4M3>(task, tile, number, heads, scratch);
  }
  if (task.cache_type == WeightFormat::kE3M4) {
    return attend_with_tiles<E3M4>(task, tile, number, heads, scratch);
  }
  attend_with_tiles<BFloat16>(task, tile, number, heads, scratch);
}

void amx_finish(const AttentionTask& task, const AttentionTile& tile, const float* folded,
                float* scratch) {
  if (tiles_attend(task)) return finish_with_tiles(task, tile, folded);
  avx512_kernels()->finish(task, tile, folded, scratch);
}

}  // namespace
}  // namespace quantkit
