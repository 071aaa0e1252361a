// Attention by one warp: loads, matrix instructions and softmax of a tile of rows and the keys of a
// chunk. The layout of all of it is told in attention.cuh.
#pragma once

#include "attention_call.cuh"

namespace quantkit::cuda {

constexpr float kSlack = 8;
constexpr float kHidden = -__builtin_huge_valf();

template <class Cache>
inline constexpr bool kIsCodes = false;
template <>
inline constexpr bool kIsCodes<E4M3> = true;
template <>
inline constexpr bool kIsCodes<E3M4> = true;

// shared_query: queries stay in shared memory where registers do not suffice.
template <class CacheType, int head_dim, int row_tiles, int key_tiles, int warps, int chunk,
          int blocks_per_sm, bool shared_query = false>
struct AttentionShape {
  using Cache = CacheType;
  static constexpr bool kCodes = kIsCodes<Cache>;
  static constexpr int kHeadDim = head_dim;
  static constexpr int kRowTiles = row_tiles;
  static constexpr int kRows = 8 * row_tiles;
  static constexpr int kKeyTiles = key_tiles;
  static constexpr int kStepKeys = 16 * key_tiles;
  static constexpr int kWarps = warps;
  static constexpr int kThreads = 32 * warps;
  static constexpr int kChunk = chunk;
  static constexpr int kBlocksPerSm = blocks_per_sm;
  static constexpr bool kSharedQuery = shared_query;
  static constexpr int kElement = kCodes ? 1 : 2;  // bytes
  static constexpr int kParts = head_dim / 16;     // instructions along d
  static constexpr int kKeyBytes = head_dim * kElement / 4;    // of one key, in one lane
  static constexpr int kValueBytes = head_dim * kElement / 8;  // of one value, in one lane
  static constexpr int kKeyWords = kKeyBytes / 4;
  static constexpr int kValueWords = (kValueBytes + 3) / 4;
  static constexpr int kRowStride = head_dim + 4;  // spreads rows over the banks
  static constexpr int kSharedBytes =
      4 * (chunk + warps * kRows * kRowStride + kRows * head_dim + 2 * warps * kRows) +
      24 * kRows + 64 + (shared_query ? row_tiles * kParts * 256 + 4 * kRows : 0);
  static_assert(kSharedBytes <= 99 * 1024);  // what a block may have on the smallest processors
  static_assert(head_dim % 16 == 0 && chunk % (kStepKeys * warps) == 0 && kRows <= kThreads);
};

// What instructions multiply: codes become float16.
template <class Cache>
struct MathOf {
  using type = Cache;
};
template <>
struct MathOf<E4M3> {
  using type = Half;
};
template <>
struct MathOf<E3M4> {
  using type = Half;
};

// Byte `index` of the `bytes` that a lane holds of a row is byte `first + part * stride` of it,
// where `part` says which of `parts` lanes it is: 16 adjacent bytes each, then 8, 4 and 2.
struct LanePlace {
  int first, stride;
};
QK_DEVICE constexpr LanePlace lane_place(int bytes, int parts, int index) {
  int offset = 0;
  for (;;) {
    const int size = bytes >= 16 ? 16 : bytes >= 8 ? 8 : bytes >= 4 ? 4 : 2;
    if (index < size) return {offset + index, size};
    offset += size * parts;
    bytes -= size;
    index -= size;
  }
}

template <int kBytes, int kPartCount>
QK_DEVICE void load_lane(const uint8_t* row, int part, uint32_t* words) {
  if constexpr (kBytes >= 16) {
    const Word4 loaded = load_written16(row + 16 * part);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = loaded.word[i];
    load_lane<kBytes - 16, kPartCount>(row + 16 * kPartCount, part, words + 4);
  } else if constexpr (kBytes >= 8) {
    const Word2 loaded = load_written8(row + 8 * part);
    words[0] = loaded.word[0];
    words[1] = loaded.word[1];
    load_lane<kBytes - 8, kPartCount>(row + 8 * kPartCount, part, words + 2);
  } else if constexpr (kBytes >= 4) {
    words[0] = load_written4(row + 4 * part);
    load_lane<kBytes - 4, kPartCount>(row + 4 * kPartCount, part, words + 1);
  } else if constexpr (kBytes >= 2) {
    words[0] = reinterpret_cast<const uint16_t*>(row)[part];
  }
}

// Which heads a block has of its tokens, and where a row's numbers are.
struct RowMap {
  int row, heads_all;  // of query
  int position;        // of the first token
  int head, heads;     // the block's first, and how many
  int rows;
  int reciprocal;  // 2^16 / heads, rounded up: exact quotients, as rows are few

  QK_DEVICE int token(int r) const { return (r * reciprocal) >> 16; }
  QK_DEVICE int head_of(int r) const { return head + r - token(r) * heads; }
  QK_DEVICE int64_t index(int r) const {  // of the row among all tokens' heads
    return static_cast<int64_t>(row + token(r)) * heads_all + head_of(r);
  }
};

// A block's place in the call.
struct BlockPlace {
  RowMap map;
  int kv_head;
  int sequence;
  Sight any, all;   // what any row sees, what all rows see
  int first_chunk;  // the block's
  bool alone;       // it has all chunks of its tile

  // Where a thread's i-th key of a chunk is; of one that is out of sight, the nearest in sight.
  template <class Shape>
  QK_DEVICE int32_t slot(const AttentionCall& call, int chunk, int i) const {
    const int key = chunk * Shape::kChunk + static_cast<int>(threadIdx.x) + i * Shape::kThreads;
    return static_cast<int32_t>(slot_of(call, call.tables + sequence * call.table_width,
                                        min(max(key, any.begin), any.end - 1)));
  }
};

// The power of two that brings a row's largest magnitude near 2^14, where float16 is exact for all
// 16-bit floats down to 2^-28 of it.
QK_DEVICE float range_factor(float largest) {
  uint32_t exponent = as_bits(largest) >> 23;
  exponent = exponent < 27 ? 27 : exponent;
  return as_float((268 - exponent) << 23);
}

// Q^T as right operands: lane g holds row g of each row tile. As loaded, and then as multiplied.
template <class Shape>
QK_DEVICE void load_query(const AttentionCall& call, const RowMap& map, int g, int t,
                          Word2 (&query)[Shape::kRowTiles][Shape::kParts]) {
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) {
    const int row = 8 * r + g;
    const bool exists = row < map.rows;
    const int64_t offset = (map.row + map.token(row)) * call.query_stride +
                           static_cast<int64_t>(map.head_of(row)) * Shape::kHeadDim;
    const uint16_t* source = static_cast<const uint16_t*>(call.query) + (exists ? offset : 0);
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i) {
      const LanePlace place = lane_place(Shape::kKeyBytes, 4, 4 * Shape::kElement * i);
      const int d = (place.first + t * place.stride) / Shape::kElement;
      query[r][i] = exists ? *reinterpret_cast<const Word2*>(source + d) : Word2{{0, 0}};
    }
  }
}

// Brings rows of Query into the range of float16. Returns for row g what scores must be multiplied
// by for that.
template <class Query, int kParts>
QK_DEVICE float convert_row(Word2 (&row)[kParts]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * kParts; ++i) {
    const uint32_t pair = row[i / 2].word[i % 2];
    largest = fmaxf(largest, fmaxf(fabsf(low_half<Query>(pair)), fabsf(high_half<Query>(pair))));
  }
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
  const float up = range_factor(largest);
#pragma unroll
  for (int i = 0; i < 2 * kParts; ++i) {
    uint32_t& pair = row[i / 2].word[i % 2];
    pair = pack2<Half>(low_half<Query>(pair) * up, high_half<Query>(pair) * up);
  }
  return as_float((254u << 23) - as_bits(up));  // 1 / up
}

// What scores of rows 2t and 2t + 1 are multiplied by.
template <class Shape>
QK_DEVICE void convert_query(const AttentionCall& call, float scale, int t,
                             Word2 (&query)[Shape::kRowTiles][Shape::kParts],
                             float (&factor)[Shape::kRowTiles][2]) {
  using Math = typename MathOf<typename Shape::Cache>::type;
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) {
    float range = 1.0f;
    if constexpr (!kIsBFloat16<Math>) {  // else Query is what is multiplied
      range = call.type == FloatType::kBFloat16 ? convert_row<BFloat16>(query[r])
                                                : convert_row<Half>(query[r]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[r][i] = scale * __shfl_sync(kAllLanes, range, 4 * (2 * t + i));
    }
  }
}

// The converted queries, and what scores of rows 2t and 2t + 1 are multiplied by: in registers, or
// [kRowTiles, kParts, 32 lanes] and [kRows] in shared memory.
template <class Shape, bool kShared = Shape::kSharedQuery>
struct QueryOperands {
  Word2 word[Shape::kRowTiles][Shape::kParts];
  float factor[Shape::kRowTiles][2];
  QK_DEVICE Word2 at(int r, int i) const { return word[r][i]; }
  QK_DEVICE float factor_at(int r, int i) const { return factor[r][i]; }
};
template <class Shape>
struct QueryOperands<Shape, true> {
  const Word2* word;    // the lane's
  const float* factor;  // of row 2t
  QK_DEVICE Word2 at(int r, int i) const { return word[(r * Shape::kParts + i) * kWarp]; }
  QK_DEVICE float factor_at(int r, int i) const { return factor[8 * r + i]; }
};

// What a lane holds of the keys and values of one step.
template <class Shape>
struct StepKeys {
  uint32_t word[Shape::kKeyTiles][2][Shape::kKeyWords];  // keys g and g + 8 of each 16
};
template <class Shape>
struct StepValues {
  uint32_t word[Shape::kKeyTiles][4][Shape::kValueWords];  // of 2t, 2t + 1, 2t + 8, 2t + 9
};

template <class Shape>
QK_DEVICE void load_keys(const uint8_t* keys, int32_t slot_bytes, const int32_t* slots, int g,
                         int t, StepKeys<Shape>& step) {
#pragma unroll
  for (int i = 0; i < 2 * Shape::kKeyTiles; ++i) {
    const uint8_t* key = keys + static_cast<int64_t>(slots[8 * i + g]) * slot_bytes;
    load_lane<Shape::kKeyBytes, 4>(key, t, step.word[i / 2][i % 2]);
  }
}

template <class Shape>
QK_DEVICE void load_values(const uint8_t* values, int32_t slot_bytes, const int32_t* slots, int g,
                           int t, StepValues<Shape>& step) {
#pragma unroll
  for (int i = 0; i < 4 * Shape::kKeyTiles; ++i) {
    const int64_t slot = slots[8 * (i / 2) + 2 * t + i % 2];
    const uint8_t* value = values + slot * slot_bytes;
    load_lane<Shape::kValueBytes, 8>(value, g, step.word[i / 4][i % 4]);
  }
}

// scores[key tile][row tile]: keys g and g + 8, rows 2t and 2t + 1.
template <class Shape>
QK_DEVICE void multiply_keys(const StepKeys<Shape>& keys, const QueryOperands<Shape>& query,
                             float (&scores)[Shape::kKeyTiles][Shape::kRowTiles][4]) {
  using Math = typename MathOf<typename Shape::Cache>::type;
#pragma unroll
  for (int tile = 0; tile < Shape::kKeyTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i) {
      const auto& [low, high] = keys.word[tile];
      uint32_t a[4];
      if constexpr (Shape::kCodes) {
        using Codes = DecodeAny<typename Shape::Cache>;
        const Word2 first = Codes::quad(low[i]), second = Codes::quad(high[i]);
        a[0] = first.word[0];
        a[1] = second.word[0];
        a[2] = first.word[1];
        a[3] = second.word[1];
      } else {
        a[0] = low[2 * i];
        a[1] = high[2 * i];
        a[2] = low[2 * i + 1];
        a[3] = high[2 * i + 1];
      }
#pragma unroll
      for (int r = 0; r < Shape::kRowTiles; ++r) {
        multiply_tile<Math>(scores[tile][r], a, query.at(r, i).word);
      }
    }
  }
}

// V^T of two parts (32 of d) as left operands, from word pairs of the four values.
template <class Shape>
QK_DEVICE void value_operand(const uint32_t (&word)[4][Shape::kValueWords], int part,
                             uint32_t (&a)[4]) {
  if constexpr (Shape::kCodes) {
    // Codes of two keys, side by side: d, d + 1.
    const uint32_t choice = part % 2 == 0 ? 0x5140 : 0x7362;
    const uint32_t low = choose_bytes(word[0][part / 2], word[1][part / 2], choice);
    const uint32_t high = choose_bytes(word[2][part / 2], word[3][part / 2], choice);
    using Codes = DecodeAny<typename Shape::Cache>;
    const Word2 first = Codes::quad(low), second = Codes::quad(high);
    a[0] = first.word[0];
    a[1] = first.word[1];
    a[2] = second.word[0];
    a[3] = second.word[1];
  } else {
    a[0] = choose_bytes(word[0][part], word[1][part], 0x5410);
    a[1] = choose_bytes(word[0][part], word[1][part], 0x7632);
    a[2] = choose_bytes(word[2][part], word[3][part], 0x5410);
    a[3] = choose_bytes(word[2][part], word[3][part], 0x7632);
  }
}

// out[part][row tile]: d of lane_place(2 * part) and the next, rows 2t and 2t + 1.
template <class Shape>
QK_DEVICE void multiply_values(const StepValues<Shape>& values,
                               const uint32_t (&weights)[Shape::kKeyTiles][Shape::kRowTiles][2],
                               float (&out)[Shape::kParts][Shape::kRowTiles][4]) {
  using Math = typename MathOf<typename Shape::Cache>::type;
#pragma unroll
  for (int tile = 0; tile < Shape::kKeyTiles; ++tile) {
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      uint32_t a[4];
      value_operand<Shape>(values.word[tile], part, a);
#pragma unroll
      for (int r = 0; r < Shape::kRowTiles; ++r) {
        multiply_tile<Math>(out[part][r], a, weights[tile][r]);
      }
    }
  }
}

// One warp's softmax over its keys. Index 0 and 1 of a row tile: rows 2t and 2t + 1.
template <class Shape>
struct RunningSums {
  float reference[Shape::kRowTiles][2];
  float total[Shape::kRowTiles][2];  // of this lane's keys
  float out[Shape::kParts][Shape::kRowTiles][4];
};

template <class Shape>
QK_DEVICE void clear(RunningSums<Shape>& sums) {
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums.reference[r][i] = kNoScore;
      sums.total[r][i] = 0.0f;
    }
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.out[part][r][i] = 0.0f;
    }
  }
}

// Moves the reference of rows that have a score far above it to their highest score.
template <class Shape>
QK_DEVICE void raise_references(const float (&scores)[Shape::kKeyTiles][Shape::kRowTiles][4],
                                RunningSums<Shape>& sums) {
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float highest = kNoScore;
#pragma unroll
      for (int tile = 0; tile < Shape::kKeyTiles; ++tile) {
        highest = fmaxf(highest, fmaxf(scores[tile][r][i], scores[tile][r][i + 2]));
      }
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, step));
      }
      float& reference = sums.reference[r][i];
      const float next = highest > reference + kSlack ? highest : reference;
      const float factor = exp2_flush(reference - next);
      reference = next;
      sums.total[r][i] *= factor;
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        sums.out[part][r][i] *= factor;
        sums.out[part][r][i + 2] *= factor;
      }
    }
  }
}

// Scores become weights; their sums are kept, and P^T is returned as right operands.
template <class Shape>
QK_DEVICE void weigh(float (&scores)[Shape::kKeyTiles][Shape::kRowTiles][4],
                     RunningSums<Shape>& sums,
                     uint32_t (&weights)[Shape::kKeyTiles][Shape::kRowTiles][2]) {
  using Math = typename MathOf<typename Shape::Cache>::type;
  bool above = false;
#pragma unroll
  for (int tile = 0; tile < Shape::kKeyTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        above = above || scores[tile][r][i] > sums.reference[r][i % 2] + kSlack;
      }
    }
  }
  if (__any_sync(kAllLanes, above)) raise_references<Shape>(scores, sums);
#pragma unroll
  for (int tile = 0; tile < Shape::kKeyTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = exp2_flush(scores[tile][r][i] - sums.reference[r][i % 2]);
        sums.total[r][i % 2] += p[i];
      }
      weights[tile][r][0] = transpose_tile(pack2<Math>(p[0], p[1]));
      weights[tile][r][1] = transpose_tile(pack2<Math>(p[2], p[3]));
    }
  }
}

// The steps of one warp in a chunk, and the keys and values of the next of them.
template <class Shape>
struct ChunkWork {
  const uint8_t* keys;  // of the KV head, slot 0
  const uint8_t* values;
  int32_t slot_bytes;
  const int32_t* slots;  // of the chunk's keys, in shared memory
  int chunk;
  int step, last;  // [step, last), every kWarps-th
  StepKeys<Shape> step_keys;
  StepValues<Shape> step_values;

  QK_DEVICE void load_keys(int g, int t) {
    cuda::load_keys<Shape>(keys, slot_bytes, slots + step * Shape::kStepKeys, g, t, step_keys);
  }
  QK_DEVICE void load_values(int g, int t) {
    cuda::load_values<Shape>(values, slot_bytes, slots + step * Shape::kStepKeys, g, t,
                             step_values);
  }
  // Takes up a chunk, of which `any` is in sight of any row, and loads its first step.
  QK_DEVICE void begin(int next_chunk, Sight any, int warp, int g, int t) {
    chunk = next_chunk;
    const int first_key = chunk * Shape::kChunk;
    const int first = max(any.begin - first_key, 0) / Shape::kStepKeys;
    const int end = min(any.end - first_key, Shape::kChunk);
    step = first + (warp - first % Shape::kWarps + Shape::kWarps) % Shape::kWarps;
    last = (end + Shape::kStepKeys - 1) / Shape::kStepKeys;
    if (step >= last) return;
    load_keys(g, t);
    load_values(g, t);
  }
};

// Takes the weight of what a row does not see.
template <class Shape>
QK_DEVICE void hide(const AttentionCall& call, const RowMap& map, int first_key, int g, int t,
                    float (&scores)[Shape::kKeyTiles][Shape::kRowTiles][4]) {
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Sight sight = sight_of(call, map.position + map.token(8 * r + 2 * t + i % 2));
#pragma unroll
      for (int tile = 0; tile < Shape::kKeyTiles; ++tile) {
        const int key = first_key + 16 * tile + g + i / 2 * 8;
        if (key < sight.begin || key >= sight.end) scores[tile][r][i] = kHidden;
      }
    }
  }
}

template <class Shape>
QK_DEVICE void attend_chunk(ChunkWork<Shape>& work, const AttentionCall& call,
                            const BlockPlace& place, int g, int t,
                            const QueryOperands<Shape>& query, RunningSums<Shape>& sums) {
  while (work.step < work.last) {
    // Keeps the compiler from reading all of the shared query before the loop.
    if constexpr (Shape::kSharedQuery) __syncwarp();
    float scores[Shape::kKeyTiles][Shape::kRowTiles][4] = {};
    multiply_keys<Shape>(work.step_keys, query, scores);
    const int first_key = work.chunk * Shape::kChunk + work.step * Shape::kStepKeys;
    work.step += Shape::kWarps;
    const bool more = work.step < work.last;
    if (more) work.load_keys(g, t);
#pragma unroll
    for (int tile = 0; tile < Shape::kKeyTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][r][i] *= query.factor_at(r, i % 2);
      }
    }
    if (call.cap != 0.0f) {
#pragma unroll
      for (int tile = 0; tile < Shape::kKeyTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[tile][r][i] = capped(call, scores[tile][r][i]);
        }
      }
    }
    if (first_key < place.all.begin || first_key + Shape::kStepKeys > place.all.end) {
      hide<Shape>(call, place.map, first_key, g, t, scores);
    }
    uint32_t weights[Shape::kKeyTiles][Shape::kRowTiles][2];
    weigh<Shape>(scores, sums, weights);
    multiply_values<Shape>(work.step_values, weights, sums.out);
    if (more) work.load_values(g, t);
  }
}

}  // namespace quantkit::cuda
