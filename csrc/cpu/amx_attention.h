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
// For kernels_amx.cpp, after amx_attention_weights.h.
#pragma once

namespace quantkit {
namespace {

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
    return cache + (tile.kv_head + head) * task.head_dim * PairDecoder<Format>::kBytes;
  }

  // Scores of a head, whose keys are decoded; decodes its values. Returns whether all values are
  // finite, or all queries see all of them.
  template <bool kAll, bool kCheck>
  bool multiply_queries(int64_t head, const StoredKeys& keys, const StoredKeys& later) const {
    ValueDecoding<Format, kAll, kCheck> decoding{PairDecoder<Format>::make(),
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
      ValueDecoding<Format, false, false> decoding{PairDecoder<Format>::make(),
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
      return KeyDecoding<Format, kAll>{PairDecoder<Format>::make(),
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
