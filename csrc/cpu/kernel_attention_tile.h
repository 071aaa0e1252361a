// What attention does before any arithmetic: the layout of buffers, which keys a query sees,
// packing of queries, decoding of keys and values.
//
// A partial result holds, with R = tokens * group: the largest score [R], the sum of exponentials
// [R], both padded to a line, and the unnormalized output [R, padded head_dim] in Codes' order.
// Part of kernel_template.h; include only that.
#pragma once

#include "kernel_common.h"
#include "kernel_pack.h"

namespace quantkit {
namespace {

constexpr int64_t kTileKeys = 32;  // decoded at a time; a multiple of every kLanes

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

template <class Isa>
int64_t padded_dim(const AttentionTask& task) {
  return round_up(task.head_dim, Isa::kColumns);
}

template <class Isa>
int64_t attention_partial_size(const AttentionTask& task, int64_t tokens) {
  const int64_t rows = tokens * task.group;
  return 2 * round_up(rows, 16) + rows * padded_dim<Isa>(task);
}

// Queries that share decoded keys; more cost cache without saving much.
inline int64_t attention_tile_rows(const AttentionTask&) { return 32; }

template <class Isa>
int64_t attention_query_size(const AttentionTask& task, int64_t tokens) {
  return tokens * task.group * padded_dim<Isa>(task);
}

struct Partial {
  float* highest;
  float* total;
  float* output;

  static Partial at(float* data, int64_t rows) {
    return {data, data + round_up(rows, 16), data + 2 * round_up(rows, 16)};
  }
};

// Scratch of one tile: scores, and decoded keys or values.
struct Scratch {
  float* scores;   // [rows, kPartitionKeys]
  float* decoded;  // [padded head_dim / kLanes, kTileKeys, kLanes]: constant steps between keys

  static Scratch at(float* data, int64_t rows) { return {data, data + rows * kPartitionKeys}; }
};

template <class Isa>
int64_t attention_scratch_size(const AttentionTask& task, int64_t tokens) {
  return kTileKeys * padded_dim<Isa>(task) + tokens * task.group * kPartitionKeys;
}

// Keys [begin, end) of a sequence.
struct Range {
  int64_t begin, end;

  Range within(int64_t first, int64_t last) const {
    return {begin > first ? begin : first, end < last ? end : last};
  }
  bool empty() const { return begin >= end; }
};

// The keys of a partition that some query of the tile sees.
inline Range partition_of(const AttentionTile& tile, int64_t number) {
  const int64_t begin = number * kPartitionKeys;
  return {begin, at_most(begin + kPartitionKeys, tile.position + tile.tokens)};
}

inline Range seen_by(const AttentionTask& task, const AttentionTile& tile, int64_t token) {
  const int64_t end = tile.position + token + 1;
  const int64_t begin = task.window > 0 && task.window < end ? end - task.window : 0;
  return {begin, end};
}

// [rows, padded head_dim], in the order of Codes.
template <class Isa, class T>
void pack_typed_queries(const AttentionTask& task, const AttentionTile& tile, float* packed) {
  for (int64_t row = 0; row < tile.tokens * task.group; ++row) {
    const T* x = static_cast<const T*>(task.query) +
                 (tile.row + row / task.group) * task.query_stride +
                 (tile.kv_head * task.group + row % task.group) * task.head_dim;
    for (int64_t column = 0; column < task.head_dim; column += Isa::kColumns) {
      pack_columns<Isa>(x + column, at_most(task.head_dim - column, Isa::kColumns), packed);
      packed += Isa::kColumns;
    }
  }
}

template <class Isa>
void pack_queries(const AttentionTask& task, const AttentionTile& tile, float* packed) {
  switch (task.type) {
    case FloatType::kFloat32: return pack_typed_queries<Isa, float>(task, tile, packed);
    case FloatType::kBFloat16: return pack_typed_queries<Isa, BFloat16>(task, tile, packed);
    case FloatType::kFloat16: return pack_typed_queries<Isa, Half>(task, tile, packed);
  }
}

// Zeros behind `count` decoded keys, to whole vectors: what is stale could be slow to compute with.
template <class Isa>
inline void clear_unused(int64_t count, int64_t padded, float* decoded) {
  const int64_t unused = round_up(count, Isa::kLanes) - count;
  if (unused == 0) return;
  for (int64_t i = 0; i < padded; i += Isa::kLanes) {
    float* first = decoded + i * kTileKeys + count * Isa::kLanes;
    __builtin_memset(first, 0, unused * Isa::kLanes * sizeof(float));
  }
}

// Asks for keys [keys.begin, keys.end) in L2, which takes more requests at once than L1.
template <class Isa, class Format>
inline void prefetch_keys(const AttentionTask& task, const AttentionTile& tile,
                          const uint8_t* cache, Range keys) {
  constexpr int64_t kBytes = Stored<Isa, Format>::kBytes;
  const int32_t* table = task.tables + tile.sequence * task.max_blocks;
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t block = key / task.block_size;
    const int64_t stop = at_most((block + 1) * task.block_size, keys.end);
    const int64_t slot = table[block] * task.block_size + key % task.block_size;
    const int64_t row = task.kv_heads * task.head_dim * kBytes;
    const uint8_t* stored = cache + slot * row + tile.kv_head * task.head_dim * kBytes;
    for (; key < stop; ++key, stored += row) {
      for (int64_t byte = 0; byte < task.head_dim * kBytes; byte += 64) {
        __builtin_prefetch(stored + byte, 0, 2);
      }
    }
  }
}

// Stores NaN and infinities, where a vector decoder takes the code for a number.
template <class Isa, class Format>
void decode_special(const uint8_t* stored, int64_t stride, int keys, int64_t columns,
                    float* target) {
  for (int key = 0; key < keys; ++key) {
    for (int column = 0; column < at_most(columns, Isa::kColumns); ++column) {
      const uint8_t code = stored[key * stride + column];
      if ((code & 0x7F) < Format::kFirstSpecial) continue;
      const int slot = Isa::slot(column);
      const int64_t part = slot / Isa::kLanes;
      target[(part * kTileKeys + key) * Isa::kLanes + slot % Isa::kLanes] =
          kDecodeTable<Format>.value[code];
    }
  }
}

// Decodes kColumns columns of kKeys keys whose rows are `stride` bytes apart. Loads come before all
// stores: a load waits for an earlier store whose address has the same last 12 bits.
template <class Isa, class Format, int kKeys>
inline void decode_some(const uint8_t* stored, int64_t stride, int64_t columns, float* target) {
  using Columns = Stored<Isa, Format>;
  typename Columns::type codes[kKeys];
  auto peak = Columns::type::Peak::none();
  QK_UNROLL for (int key = 0; key < kKeys; ++key) {
    const uint8_t* source = stored + key * stride;
    codes[key] = columns >= Isa::kColumns
                     ? Columns::type::load(source)
                     : Columns::type::load_some(source, static_cast<int>(columns));
  }
  QK_UNROLL for (int key = 0; key < kKeys; ++key) {
    peak.add(codes[key]);
    QK_UNROLL for (int part = 0; part < Isa::kColumns / Isa::kLanes; ++part) {
      codes[key].part(part).store(target + (part * kTileKeys + key) * Isa::kLanes);
    }
  }
  if constexpr (Columns::kIsCode) {
    if (__builtin_expect(peak.special(), 0)) {
      decode_special<Isa, Format>(stored, stride, kKeys, columns, target);
    }
  }
}

// Decodes the tile's head of keys [keys.begin, keys.end), at most kTileKeys of them.
template <class Isa, class Format>
void decode_keys(const AttentionTask& task, const AttentionTile& tile, const uint8_t* cache,
                 Range keys, float* decoded) {
  constexpr int64_t kBytes = Stored<Isa, Format>::kBytes;
  constexpr int kKeysAtOnce = 8;
  const int32_t* table = task.tables + tile.sequence * task.max_blocks;
  const int64_t length = tile.position + tile.tokens;
  const int64_t head_dim = task.head_dim;
  const int64_t stride = task.kv_heads * head_dim * kBytes;
  // A partition ahead; the heads in between may be done first.
  const Range later{keys.begin + kPartitionKeys, keys.end + kPartitionKeys};
  prefetch_keys<Isa, Format>(task, tile, cache, later.within(0, length));
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t block = key / task.block_size;
    const int64_t stop = at_most((block + 1) * task.block_size, keys.end);
    const int64_t slot = table[block] * task.block_size + key % task.block_size;
    const uint8_t* stored = cache + slot * stride + tile.kv_head * head_dim * kBytes;
    while (key < stop) {
      const int64_t count = stop - key >= kKeysAtOnce ? kKeysAtOnce : 1;
      for (int64_t column = 0; column < head_dim; column += Isa::kColumns) {
        const uint8_t* source = stored + column * kBytes;
        float* target = decoded + (key - keys.begin) * Isa::kLanes + column * kTileKeys;
        if (count == 1) {
          decode_some<Isa, Format, 1>(source, stride, head_dim - column, target);
        } else {
          decode_some<Isa, Format, kKeysAtOnce>(source, stride, head_dim - column, target);
        }
      }
      stored += count * stride;
      key += count;
    }
  }
}

}  // namespace
}  // namespace quantkit
