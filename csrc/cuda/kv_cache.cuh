// Into the paged KV cache and out of it: append new keys and values, alone or with what comes before
// (norm of heads, rotary embedding), and gather a sequence's values.
//
// Numbers are handled in chunks of 8, by the functions of rows.cuh, so that steps done together give
// the same bits as one after another. A cache is [blocks, block_size, kv_heads, head_dim].
#pragma once

#include "cache_side.cuh"
#include "rows.cuh"

namespace quantkit::cuda {

constexpr int kAppendThreads = 256;
constexpr int kHeadWarps = 4;           // heads of a block of append_rotated
constexpr int kMostHeadDim = 512;       // of append_rotated
constexpr int kGatherThreads = 256;
constexpr int kGatherUnits = 2;         // that a thread loads at once

template <class T>
struct AppendCall {
  const T* key;  // [tokens, kv_heads, head_dim], heads side by side
  const T* value;
  int64_t key_stride;  // elements from token to token
  int64_t value_stride;
  CacheSide keys, values;
  const int64_t* slots;  // [tokens]
  int64_t slot_count;    // of the cache
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  bool aligned;  // chunks are whole and at multiples of 16 bytes, in the cache of theirs
};

// Stores up to 8 elements of a head; nothing if there is no such slot.
template <class Cache, class T>
QK_DEVICE void store_cached(const CacheSide& side, int64_t index, int64_t head, int64_t left,
                            bool aligned, const Chunk<T>& chunk) {
  if constexpr (sizeof(Cache) == 1) {
    store_codes<Cache>(side.cache + index, left, aligned, chunk,
                       side.scale[head * side.scale_stride]);
  } else {
    float values[kChunk];
    unpack(chunk, values);
    store_chunk(reinterpret_cast<Cache*>(side.cache) + index, left, aligned, pack<Cache>(values));
  }
}

// gridDim = (tokens * blocks of a token, 2: keys and values).
template <class Cache, class T>
__global__ void __launch_bounds__(kAppendThreads)
    append(const AppendCall<T> call, unsigned blocks_per_token) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int chunks = static_cast<int>((call.head_dim + kChunk - 1) / kChunk);
  const int64_t token = blockIdx.x / blocks_per_token;
  const unsigned unit = blockIdx.x % blocks_per_token * blockDim.x + threadIdx.x;
  const int64_t head = unit / chunks, column = static_cast<int64_t>(unit % chunks) * kChunk;
  if (head >= call.heads) return;
  const int64_t slot = call.slots[token];
  if (slot < 0 || slot >= call.slot_count) return;
  const bool is_value = blockIdx.y == 1;
  const int64_t left = call.head_dim - column;
  const T* row = (is_value ? call.value : call.key) +
                 token * (is_value ? call.value_stride : call.key_stride) + head * call.head_dim +
                 column;
  const int64_t index = (slot * call.heads + head) * call.head_dim + column;
  store_cached<Cache>(choose(is_value, call.keys, call.values), index, head, left, call.aligned,
                      load_chunk(row, left, call.aligned));
}

template <class T>
struct RotatedCall {
  const T* qkv;         // [tokens, heads + 2 * kv_heads, head_dim]
  const void* q_norm;   // [head_dim] of T or float, or null for no norm
  const void* k_norm;   // the same
  const T* cosine;      // [tokens, rotary_dim], or null for no rotation
  const T* sine;        // the same
  T* query;             // [tokens, heads, head_dim]
  CacheSide keys, values;
  const int64_t* slots;  // [tokens]
  int64_t slot_count;
  int64_t tokens;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;  // of a head, its first elements turn
  float eps;
  bool wide_q_norm, wide_k_norm;  // of float, where T has 16 bits
  bool aligned;
};

// A norm's weight for the chunks of a lane, as it lies in memory: of T, or of float.
template <class T, int kChunks>
struct HeadWeight {
  Chunk<T> narrow[kChunks];
  Chunk<float> wide[kChunks];
  bool is_wide;

  QK_DEVICE void load(const void* from, int lane, int64_t head_dim, bool aligned) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int64_t column = (lane + kWarp * i) * kChunk, left = head_dim - column;
      narrow[i] = {};
      wide[i] = {};
      if (left <= 0) continue;
      if (is_wide) {
        wide[i] = load_chunk(static_cast<const float*>(from) + column, left, aligned);
      } else {
        narrow[i] = load_chunk(static_cast<const T*>(from) + column, left, aligned);
      }
    }
  }

  // x times the factor and the weight, rounded as process_rows rounds it.
  QK_DEVICE void apply(int i, float factor, float (&values)[kChunk]) const {
    float weights[kChunk];
    if (is_wide) {
      unpack(wide[i], weights);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        values[k] = normalized<T, float>(values[k], factor, weights[k]);
      }
    } else {
      unpack(narrow[i], weights);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        values[k] = normalized<T, T>(values[k], factor, weights[k]);
      }
    }
  }
};

// Up to kChunks * 32 chunks of one head, chunk lane + 32 * i in a lane.
template <class T, int kChunks>
struct HeadRow {
  Chunk<T> chunks[kChunks];
  int lane;
  int64_t head_dim;
  bool aligned;

  QK_DEVICE int64_t column(int i) const { return (lane + kWarp * i) * kChunk; }

  QK_DEVICE void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      chunks[i] = {};
      const int64_t left = head_dim - column(i);
      if (left > 0) chunks[i] = load_chunk(from + column(i), left, aligned);
    }
  }

  // As process_rows of rows.cuh does it: what one of its warps has is chunk i of all lanes here.
  QK_DEVICE void normalize(const HeadWeight<T, kChunks>& weight, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) squares += warp_sum(add_squares(chunks[i], 0.0f));
    const float factor = norm_factor(squares, head_dim, eps);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float values[kChunk];
      unpack(chunks[i], values);
      weight.apply(i, factor, values);
      chunks[i] = pack<T>(values);
    }
  }

  // The first cosine.head_dim elements. `exchange` has room for the head: partners are half of
  // these apart.
  QK_DEVICE void rotate(const HeadRow& cosine, const HeadRow& sine, float* exchange) {
    const int turned = static_cast<int>(cosine.head_dim), half = turned / 2;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float values[kChunk];
      unpack(chunks[i], values);
      if (column(i) < head_dim) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) exchange[column(i) + k] = values[k];
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float values[kChunk], cosines[kChunk], sines[kChunk];
      unpack(chunks[i], values);
      unpack(cosine.chunks[i], cosines);
      unpack(sine.chunks[i], sines);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const int d = static_cast<int>(column(i)) + k;
        if (d >= turned) continue;
        const bool first = d < half;
        values[k] = rotated<T>(values[k], cosines[k], exchange[first ? d + half : d - half],
                               first ? -sines[k] : sines[k]);
      }
      chunks[i] = pack<T>(values);
    }
  }
};

// A warp for each head of a token: queries, then keys, then values.
template <class Cache, class T, int kChunks>
__global__ void __launch_bounds__(kHeadWarps * kWarp) append_rotated(const RotatedCall<T> call) {
  __shared__ __align__(16) float exchange[kHeadWarps][kChunks * kWarp * kChunk];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t all_heads = call.heads + 2 * call.kv_heads;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kHeadWarps + warp;
  const int64_t token = number / all_heads, head = number % all_heads;
  start_next_kernel();
  if (token >= call.tokens) return;
  const bool is_query = head < call.heads, is_value = head >= call.heads + call.kv_heads;
  const void* norm = is_query ? call.q_norm : is_value ? nullptr : call.k_norm;
  HeadRow<T, kChunks> row{{}, lane, call.head_dim, call.aligned};
  HeadRow<T, kChunks> cosine{{}, lane, call.rotary_dim, call.aligned}, sine = cosine;
  HeadWeight<T, kChunks> weight;
  weight.is_wide = is_query ? call.wide_q_norm : call.wide_k_norm;
  // Before waiting: no kernel writes weights.
  if (norm != nullptr) weight.load(norm, lane, call.head_dim, call.aligned);
  wait_for_previous_kernel();
  const bool turns = !is_value && call.cosine != nullptr;
  if (turns) {
    cosine.load(call.cosine + token * call.rotary_dim);
    sine.load(call.sine + token * call.rotary_dim);
  }
  row.load(call.qkv + number * call.head_dim);
  if (norm != nullptr) row.normalize(weight, call.eps);
  if (turns) row.rotate(cosine, sine, exchange[warp]);

  if (is_query) {
    T* out = call.query + (token * call.heads + head) * call.head_dim;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int64_t left = call.head_dim - row.column(i);
      if (left > 0) store_chunk(out + row.column(i), left, call.aligned, row.chunks[i]);
    }
    return;
  }
  const int64_t slot = call.slots[token];
  if (slot < 0 || slot >= call.slot_count) return;
  const int64_t kv_head = (head - call.heads) % call.kv_heads;
  const int64_t index = (slot * call.kv_heads + kv_head) * call.head_dim;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int64_t left = call.head_dim - row.column(i);
    if (left > 0) {
      store_cached<Cache>(choose(is_value, call.keys, call.values), index + row.column(i), kv_head, left, call.aligned,
                          row.chunks[i]);
    }
  }
}

struct GatherCall {
  const uint8_t* cache;
  const float* scale;    // null for plain values
  const int32_t* blocks;  // of the sequence
  void* out;              // [length, kv_heads, head_dim]
  int64_t scale_stride;
  int64_t length;
  int64_t heads;
  int64_t head_dim;
  int64_t block_size;
};

// kUnit adjacent elements of one head, as loaded.
template <class Cache, int kUnit>
struct StoredUnit {
  static constexpr int kWords = (kUnit * static_cast<int>(sizeof(Cache)) + 3) / 4;
  uint32_t words[kWords];

  QK_DEVICE void load(const uint8_t* cache, int64_t element) {
    const uint8_t* from = cache + element * sizeof(Cache);
    if constexpr (kUnit > 1) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const Word4 loaded = load_written16(from + 4 * i);
#pragma unroll
        for (int k = 0; k < 4; ++k) words[i + k] = loaded.word[k];
      }
    } else if constexpr (sizeof(Cache) == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(from);
    } else if constexpr (sizeof(Cache) == 2) {
      words[0] = *reinterpret_cast<const uint16_t*>(from);
    } else {
      words[0] = *from;
    }
  }
  QK_DEVICE float value(int i) const {
    if constexpr (sizeof(Cache) == 4) {
      return as_float(words[i]);
    } else if constexpr (sizeof(Cache) == 2) {
      const uint32_t pair = words[i / 2];
      return i % 2 == 0 ? low_half<Cache>(pair) : high_half<Cache>(pair);
    } else {
      const uint32_t pair = DecodeAny<Cache>::pair(words[i / 4] >> (i / 2 % 2 * 16));
      return (i % 2 == 0 ? low_half<Half>(pair) : high_half<Half>(pair)) *
             DecodeAny<Cache>::kFactor;
    }
  }
};

// A thread has kGatherUnits units of kUnit elements; gridDim.x covers all.
template <class Cache, class T, int kUnit>
__global__ void __launch_bounds__(kGatherThreads) gather(const GatherCall call) {
  start_next_kernel();
  wait_for_previous_kernel();
  const uint32_t row = static_cast<uint32_t>(call.heads * call.head_dim / kUnit);  // units a token
  const uint32_t count = static_cast<uint32_t>(call.length) * row;
  const uint32_t first = blockIdx.x * (kGatherUnits * kGatherThreads) + threadIdx.x;
  StoredUnit<Cache, kUnit> units[kGatherUnits];
  float scales[kGatherUnits];
#pragma unroll
  for (int u = 0; u < kGatherUnits; ++u) {
    const uint32_t number = first + u * kGatherThreads;
    if (number >= count) break;
    const uint32_t token = number / row, place = number % row;
    const uint32_t block = token / static_cast<uint32_t>(call.block_size);
    const int64_t slot = (static_cast<int64_t>(call.blocks[block]) - block) * call.block_size + token;
    units[u].load(call.cache, (slot * row + place) * kUnit);
    const uint32_t head = place * kUnit / static_cast<uint32_t>(call.head_dim);
    scales[u] = call.scale == nullptr ? 1.0f : call.scale[head * call.scale_stride];
  }
#pragma unroll
  for (int u = 0; u < kGatherUnits; ++u) {
    const uint32_t number = first + u * kGatherThreads;
    if (number >= count) break;
    T* out = static_cast<T*>(call.out) + static_cast<int64_t>(number) * kUnit;
    if constexpr (kUnit == 1) {
      *out = narrow<T>(units[u].value(0) * scales[u]);
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; i += kChunk) {
        float values[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) values[k] = units[u].value(i + k) * scales[u];
        store_chunk(out + i, kChunk, true, pack<T>(values));
      }
    }
  }
}

// start(kernel, grid, threads, arguments...) launches.
template <class Cache, class T, class Start>
void start_append(const AppendCall<T>& call, const Start& start) {
  const int64_t units = call.heads * ((call.head_dim + kChunk - 1) / kChunk);
  const int64_t threads = units < kAppendThreads ? (units + kWarp - 1) / kWarp * kWarp : kAppendThreads;
  const unsigned blocks = static_cast<unsigned>((units + threads - 1) / threads);
  void (*kernel)(AppendCall<T>, unsigned) = &append<Cache, T>;
  start(kernel, dim3(static_cast<unsigned>(call.tokens) * blocks, 2), static_cast<int>(threads),
        call, blocks);
}

template <class Cache, class T, class Start>
void start_append_rotated(const RotatedCall<T>& call, const Start& start) {
  const int64_t rows = call.tokens * (call.heads + 2 * call.kv_heads);
  void (*kernel)(RotatedCall<T>) = call.head_dim <= kWarp * kChunk ? &append_rotated<Cache, T, 1>
                                                                  : &append_rotated<Cache, T, 2>;
  start(kernel, dim3(static_cast<unsigned>((rows + kHeadWarps - 1) / kHeadWarps)),
        kHeadWarps * kWarp, call);
}

template <class Cache, class T, class Start>
void start_gather(const GatherCall& call, const Start& start) {
  const bool wide = call.head_dim % 16 == 0 && is_aligned(call.cache) && is_aligned(call.out);
  const int64_t elements = call.length * call.heads * call.head_dim;
  const int64_t block = (wide ? 16 : 1) * kGatherUnits * kGatherThreads;
  void (*kernel)(GatherCall) = wide ? &gather<Cache, T, 16> : &gather<Cache, T, 1>;
  start(kernel, dim3(static_cast<unsigned>((elements + block - 1) / block)), kGatherThreads, call);
}

}  // namespace quantkit::cuda
