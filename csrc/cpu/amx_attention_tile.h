// What attention with tiles does before any arithmetic: sizes, buffers, packing of queries, decoding
// of keys and values into operands. For kernels_amx.cpp, after amx_linear.h.
#pragma once

namespace quantkit {
namespace {

constexpr int64_t kPartitionTiles = kPartitionKeys / kTileRows;
constexpr int64_t kStepKeys = 32;  // of one product with values
constexpr int64_t kWeightRows = 8;  // rows of one tile of weights

bool tiles_attend(const AttentionTask& task) {
  return task.type == FloatType::kBFloat16 && (task.cache_type == WeightFormat::kE4M3 ||
                                               task.cache_type == WeightFormat::kE3M4 ||
                                               task.cache_type == WeightFormat::kBFloat16);
}

// Rows of queries, their tiles, chunks of head_dim; sizes of buffers, in floats.
struct TileSizes {
  int64_t rows, row_tiles, chunks;

  static TileSizes of(const AttentionTask& task, int64_t tokens) {
    const int64_t rows = tokens * task.group;
    return {rows, ceil_div(rows, kTileRows), chunks_of(task.head_dim)};
  }
  int64_t query() const { return row_tiles * chunks * 2 * kTileFloats; }
  int64_t decoded() const { return chunks * 8 * kTileFloats; }
  int64_t products() const { return row_tiles * 4 * kTileFloats; }
  int64_t scratch() const { return 8 * kTileFloats + 2 * decoded() + 2 * products(); }
};

struct TileScratch {
  float* scores;    // [16 rows, kPartitionKeys]
  float* output;    // 4 tiles
  char* keys;       // [16 keys, chunks, 2] tiles
  char* values;     // [32 keys, chunks, 4] tiles
  float* products;  // of queries and keys: [row tiles, 4] tiles
  char* weights;    // [8 rows, 32 keys] tiles

  static TileScratch at(float* data, const TileSizes& sizes) {
    const auto take = [&](int64_t floats) {
      float* taken = data;
      data += floats;
      return taken;
    };
    const auto bytes = [](float* floats) { return reinterpret_cast<char*>(floats); };
    TileScratch scratch;
    scratch.scores = take(4 * kTileFloats);
    scratch.output = take(4 * kTileFloats);
    scratch.keys = bytes(take(sizes.decoded()));
    scratch.values = bytes(take(sizes.decoded()));
    scratch.products = take(sizes.products());
    scratch.weights = bytes(take(sizes.products()));
    return scratch;
  }
};

void pack_tile_queries(const AttentionTask& task, const AttentionTile& tile, float* packed) {
  const TileSizes sizes = TileSizes::of(task, tile.tokens);
  for (int64_t first = 0; first < sizes.rows; first += kTileRows) {
    const int64_t rows = at_most(kTileRows, sizes.rows - first);
    const BFloat16* row[kTileRows];
    for (int64_t i = 0; i < rows; ++i) {
      row[i] = static_cast<const BFloat16*>(task.query) +
               (tile.row + (first + i) / task.group) * task.query_stride +
               (tile.kv_head * task.group + (first + i) % task.group) * task.head_dim;
    }
    float* target = packed + first / kTileRows * sizes.chunks * 2 * kTileFloats;
    pack_tile_columns(row, rows, task.head_dim, reinterpret_cast<char*>(target));
  }
}

// Where the keys of a partition are stored, and their values; in bytes, of the first head. Those
// that do not exist have a place too: a load with an empty mask takes long where nothing may be
// read.
struct StoredKeys {
  int64_t offset[kPartitionKeys];
  Range existing;  // counted from the first

  static StoredKeys of(const AttentionTask& task, const AttentionTile& tile,
                       int64_t partition_begin, Range keys) {
    const int64_t stride = task.kv_heads * task.head_dim * bytes_of(task.cache_type);
    const int32_t* table = task.tables + tile.sequence * task.max_blocks;
    StoredKeys stored;
    stored.existing = {keys.begin - partition_begin, keys.end - partition_begin};
    for (int64_t i = 0; i < stored.existing.begin; ++i) stored.offset[i] = 0;
    for (int64_t i = stored.existing.end; i < kPartitionKeys; ++i) stored.offset[i] = 0;
    for (int64_t key = keys.begin; key < keys.end;) {
      const int64_t block = key / task.block_size;
      const int64_t stop = at_most((block + 1) * task.block_size, keys.end);
      int64_t offset = (table[block] * task.block_size + key % task.block_size) * stride;
      const __m512i steps =
          _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(stride));
      for (; key + 8 <= stop; key += 8, offset += 8 * stride) {
        _mm512_storeu_si512(stored.offset + key - partition_begin,
                            _mm512_add_epi64(steps, _mm512_set1_epi64(offset)));
      }
      for (; key < stop; ++key, offset += stride) stored.offset[key - partition_begin] = offset;
    }
    return stored;
  }

  bool all() const { return existing.begin == 0 && existing.end == kPartitionKeys; }
  bool has(int64_t key) const { return key >= existing.begin && key < existing.end; }
};

// Keys as first operands: a row of a tile for each of the first `count`, eight at a step, so that
// products can be calculated at the same time. The keys at `later` are asked for in L2, which takes
// more requests at once than L1.
template <class Format, bool kAll>
struct KeyDecoding {
  static constexpr int64_t kBytes = PairDecoder<Format>::kBytes;
  PairDecoder<Format> decoder;
  const uint8_t* cache;  // of the head
  const StoredKeys& stored;
  const StoredKeys& later;
  int64_t count, head_dim;
  char* tiles;
  int64_t chunk = 0;
  int64_t key = 0;

  inline __attribute__((always_inline)) bool step() {
    const int64_t chunks = chunks_of(head_dim);
    if (chunk == chunks) return false;
    const uint64_t mask = first_columns(head_dim - chunk * kChunk);
    const uint8_t* columns = cache + chunk * kChunk * kBytes;
    char* target =
        tiles + (key / kTileRows * chunks + chunk) * 2 * kTileBytes + key % kTileRows * 64;
    QK_UNROLL for (int64_t i = 0; i < 8; ++i) {
      QK_UNROLL for (int64_t line = 0; line < kBytes; ++line) {
        __builtin_prefetch(columns + later.offset[key + i] + 64 * line, 0, 2);
      }
      const uint64_t wanted = kAll || stored.has(key + i) ? mask : 0;
      store_pairs(decoder, columns + stored.offset[key + i], wanted, target + 64 * i,
                  target + kTileBytes + 64 * i);
    }
    key += 8;
    if (key >= round_up(count, kTileRows)) {
      key = 0;
      ++chunk;
    }
    return true;
  }
};

// Values as second operands: keys i and i + 16 of 32 make row i of four tiles. Tile t, column
// 4 l + j holds dimension 16 l + 4 t + j of a chunk.

template <bool kCheck, class Format>
inline __attribute__((always_inline)) void decode_value_pair(const PairDecoder<Format>& decoder,
                                                             const uint8_t* const (&row)[2],
                                                             const uint64_t (&mask)[2],
                                                             char* target, __m512i* highest) {
  const __m512i a = _mm512_maskz_loadu_epi8(mask[0], row[0]);
  const __m512i b = _mm512_maskz_loadu_epi8(mask[1], row[1]);
  if constexpr (kCheck) {
    const __m512i sign = _mm512_set1_epi8(-128);
    *highest = _mm512_max_epu8(*highest, _mm512_or_si512(a, sign));
    *highest = _mm512_max_epu8(*highest, _mm512_or_si512(b, sign));
  }
  decoder.decode(_mm512_unpacklo_epi8(a, b), target, target + kTileBytes);
  decoder.decode(_mm512_unpackhi_epi8(a, b), target + 2 * kTileBytes, target + 3 * kTileBytes);
}

template <bool kCheck>
inline __attribute__((always_inline)) void decode_value_pair(const PairDecoder<BFloat16>&,
                                                             const uint8_t* const (&row)[2],
                                                             const uint64_t (&mask)[2],
                                                             char* target, __m512i* highest) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i lower[2], upper[2];  // of 32 dimensions, within 128 bits four of each eight
  QK_UNROLL for (int half = 0; half < 2; ++half) {
    const auto some = [&](int i) { return static_cast<__mmask32>(mask[i] >> (32 * half)); };
    const __m512i a = _mm512_maskz_loadu_epi16(some(0), row[0] + 64 * half);
    const __m512i b = _mm512_maskz_loadu_epi16(some(1), row[1] + 64 * half);
    if constexpr (kCheck) {
      *highest = _mm512_max_epu16(*highest, _mm512_and_si512(a, magnitude));
      *highest = _mm512_max_epu16(*highest, _mm512_and_si512(b, magnitude));
    }
    lower[half] = _mm512_unpacklo_epi16(a, b);
    upper[half] = _mm512_unpackhi_epi16(a, b);
  }
  _mm512_store_si512(target, _mm512_shuffle_i32x4(lower[0], lower[1], 0x88));
  _mm512_store_si512(target + kTileBytes, _mm512_shuffle_i32x4(upper[0], upper[1], 0x88));
  _mm512_store_si512(target + 2 * kTileBytes, _mm512_shuffle_i32x4(lower[0], lower[1], 0xDD));
  _mm512_store_si512(target + 3 * kTileBytes, _mm512_shuffle_i32x4(upper[0], upper[1], 0xDD));
}

template <class Format>
inline bool all_finite(const PairDecoder<Format>&, __m512i highest) {
  const __m512i first = _mm512_set1_epi8(static_cast<char>(0x80 | Format::kFirstSpecial));
  return _mm512_cmpge_epu8_mask(highest, first) == 0;
}
inline bool all_finite(const PairDecoder<BFloat16>&, __m512i highest) {
  return _mm512_cmpge_epu16_mask(highest, _mm512_set1_epi16(0x7F80)) == 0;
}

// Four pairs of values at a step; after the last, `finite` tells whether all of them are, if kCheck.
template <class Format, bool kAll, bool kCheck>
struct ValueDecoding {
  static constexpr int64_t kBytes = PairDecoder<Format>::kBytes;
  PairDecoder<Format> decoder;
  const uint8_t* cache;  // of the head
  const StoredKeys& stored;
  const StoredKeys& later;
  int64_t count, head_dim;
  char* tiles;
  int64_t chunk = 0;
  int64_t step_begin = 0;  // first of 32 keys
  int64_t pair = 0;
  bool finite = true;

  inline __attribute__((always_inline)) bool step() {
    const int64_t chunks = chunks_of(head_dim);
    if (chunk == chunks) return false;
    const uint64_t mask = first_columns(head_dim - chunk * kChunk);
    const uint8_t* columns = cache + chunk * kChunk * kBytes;
    char* target = tiles + (step_begin / kStepKeys * chunks + chunk) * 4 * kTileBytes + pair * 64;
    __m512i highest = _mm512_setzero_si512();
    QK_UNROLL for (int64_t i = 0; i < 4; ++i) {
      const int64_t key = step_begin + pair + i;
      const int64_t other = key + kTileRows;
      QK_UNROLL for (int64_t line = 0; line < kBytes; ++line) {
        __builtin_prefetch(columns + later.offset[key] + 64 * line, 0, 2);
        __builtin_prefetch(columns + later.offset[other] + 64 * line, 0, 2);
      }
      const uint8_t* const row[] = {columns + stored.offset[key], columns + stored.offset[other]};
      const uint64_t masks[] = {kAll || stored.has(key) ? mask : 0,
                                kAll || stored.has(other) ? mask : 0};
      decode_value_pair<kCheck>(decoder, row, masks, target + 64 * i, &highest);
    }
    if constexpr (kCheck) finite = finite && all_finite(decoder, highest);
    pair += 4;
    if (pair == kTileRows) {
      pair = 0;
      step_begin += kStepKeys;
      if (step_begin >= count) {
        step_begin = 0;
        ++chunk;
      }
    }
    return true;
  }
};

struct NothingToDecode {
  bool step() { return false; }
};

}  // namespace
}  // namespace quantkit
