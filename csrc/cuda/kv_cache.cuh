// Into the paged KV cache and out of it: append new keys and values, alone or with what comes
// before (norm of heads, rotary embedding), and gather a sequence's values.
//
// Numbers are handled in chunks of 8, by the functions of rows.cuh, so that steps done together
// give the same bits as one after another. A cache is [blocks, block_size, kv_heads, head_dim].
#pragma once

#include "rows.cuh"

namespace quantkit::cuda {

constexpr int kAppendThreads = 256;
constexpr int kHeadThreads = 512;  // of append_rotated, at most
constexpr int kMostHeadDim = 512;
constexpr int kGatherThreads = 256;
constexpr int kGatherUnits = 2;  // that a thread loads at once

// One of the two halves of a cache: keys or values. Types of caches are told apart at run time: it
// is the same branch for all threads, and there are fewer kernels.
struct CacheSide {
  uint8_t* cache;
  const float* scale;    // null for plain values
  int64_t scale_stride;  // 0: one for all heads
};

// One of two, by its members: choosing between addresses would put both into local memory.
QK_DEVICE CacheSide choose(bool second, const CacheSide& a, const CacheSide& b) {
  return {second ? b.cache : a.cache, second ? b.scale : a.scale,
          second ? b.scale_stride : a.scale_stride};
}

template <class T>
struct AppendCall {
  const T* key;  // [tokens, kv_heads, head_dim], heads side by side
  const T* value;
  int64_t key_stride;  // elements from token to token
  int64_t value_stride;
  CacheSide keys, values;
  WeightFormat type;     // of the cache
  const int64_t* slots;  // [tokens]
  int64_t slot_count;    // of the cache
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  bool aligned;  // chunks are whole and at multiples of 16 bytes, in the cache of theirs
};

// Stores up to 8 elements of a head.
template <class T>
QK_DEVICE void store_cached(const CacheSide& side, WeightFormat type, int64_t index, int64_t head,
                            int64_t left, bool aligned, const Chunk<T>& chunk) {
  const auto store_values = [&](auto stored) {
    using Cache = decltype(stored);
    float values[kChunk];
    unpack(chunk, values);
    store_chunk(reinterpret_cast<Cache*>(side.cache) + index, left, aligned, pack<Cache>(values));
  };
  switch (type) {
    case WeightFormat::kFloat32: return store_values(float{});
    case WeightFormat::kBFloat16: return store_values(BFloat16{});
    case WeightFormat::kFloat16: return store_values(Half{});
    default:
      store_codes(side.cache + index, left, aligned, chunk, side.scale[head * side.scale_stride]);
  }
}

// gridDim = (tokens * blocks of a token, 2: keys and values).
template <class T>
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
  store_cached(choose(is_value, call.keys, call.values), call.type, index, head, left, call.aligned,
               load_chunk(row, left, call.aligned));
}

template <class T>
struct RotatedCall {
  const T* qkv;     // [tokens, heads + 2 * kv_heads, head_dim]
  const T* q_norm;  // [head_dim], or null for no norm; k_norm the same
  const T* k_norm;
  const T* cosine;  // [tokens, head_dim], or null for no rotation; sine the same
  const T* sine;
  T* query;  // [tokens, heads, head_dim]
  CacheSide keys, values;
  WeightFormat type;     // of the cache
  const int64_t* slots;  // [tokens]
  int64_t slot_count;
  int64_t tokens;
  int32_t heads;
  int32_t kv_heads;
  int32_t all_heads;  // heads + 2 * kv_heads
  int32_t head_dim;
  float eps;
  bool aligned;
};

// A head of up to 8 * kLanes * kChunks elements in kLanes lanes: lane l has chunks l + kLanes * i.
template <class T, int kLanes, int kChunks>
struct HeadRow {
  static constexpr int kWords = static_cast<int>(sizeof(Chunk<T>) / sizeof(uint32_t));
  Chunk<T> chunks[kChunks];

  QK_DEVICE static int column(int lane, int i) { return (lane + kLanes * i) * kChunk; }

  // Zero beyond its end, or if `from` is null.
  QK_DEVICE void load(const T* from, int lane, int head_dim, bool aligned) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      chunks[i] = {};
      const int left = head_dim - column(lane, i);
      if (from != nullptr && left > 0) {
        chunks[i] = load_chunk(from + column(lane, i), left, aligned);
      }
    }
  }

  // By words, in registers.
  QK_DEVICE static HeadRow choose(bool second, const HeadRow& a, const HeadRow& b) {
    HeadRow out;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t first = a.chunks[i].words[w / 4].word[w % 4];
        const uint32_t other = b.chunks[i].words[w / 4].word[w % 4];
        out.chunks[i].words[w / 4].word[w % 4] = second ? other : first;
      }
    }
    return out;
  }

  // With the sums of process_rows of rows.cuh: those lanes that a head does not need add zero
  // there, and of a head with two chunks a lane, each is one of its warps'.
  QK_DEVICE HeadRow normalize(const HeadRow& weight, int head_dim, float eps) const {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float sum = add_squares(chunks[i], 0.0f);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, step);
      }
      squares += sum;
    }
    const float factor = norm_factor(squares, head_dim, eps);
    HeadRow out;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float values[kChunk], weights[kChunk];
      unpack(chunks[i], values);
      unpack(weight.chunks[i], weights);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) values[k] = normalized<T>(values[k], factor, weights[k]);
      out.chunks[i] = pack<T>(values);
    }
    return out;
  }

  // `partner`: for every element the one half a head away.
  QK_DEVICE HeadRow rotate(const HeadRow& partner, const HeadRow& cosine, const HeadRow& sine,
                           int lane, int head_dim) const {
    HeadRow out;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float values[kChunk], partners[kChunk], cosines[kChunk], sines[kChunk];
      unpack(chunks[i], values);
      unpack(partner.chunks[i], partners);
      unpack(cosine.chunks[i], cosines);
      unpack(sine.chunks[i], sines);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const bool first = column(lane, i) + k < head_dim / 2;
        values[k] = rotated<T>(values[k], cosines[k], partners[k], first ? -sines[k] : sines[k]);
      }
      out.chunks[i] = pack<T>(values);
    }
    return out;
  }

  // Half a head is a number of chunks: partners are whole chunks of other lanes.
  QK_DEVICE HeadRow partner_chunks(int lane, int head_dim) const {
    const int half = head_dim / (2 * kChunk);
    HeadRow out;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int mine = lane + kLanes * i;
      const int from = mine < half ? mine + half : mine - half;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          const uint32_t other =
              __shfl_sync(kAllLanes, chunks[k].words[w / 4].word[w % 4], from % kLanes, kLanes);
          if (from / kLanes == k) word = other;
        }
        out.chunks[i].words[w / 4].word[w % 4] = word;
      }
    }
    return out;
  }

  // The same for any head: through shared memory, which is the head's.
  QK_DEVICE HeadRow partner_elements(int lane, int head_dim, float* exchange) const {
    const int half = head_dim / 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float values[kChunk];
      unpack(chunks[i], values);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) exchange[column(lane, i) + k] = values[k];
    }
    __syncwarp();
    HeadRow out;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float values[kChunk];
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const int d = column(lane, i) + k;
        values[k] = d < head_dim ? exchange[d < half ? d + half : d - half] : 0.0f;
      }
      out.chunks[i] = pack<T>(values);
    }
    return out;
  }
};

// Heads that a group of lanes loads before it works on the first: as registers allow.
template <class T, int kChunks>
constexpr int kHeadsAtOnce = sizeof(T) * kChunks > 2 ? 1 : 2;

// A block for each token; its heads (queries, then keys, then values) are dealt out to groups of
// kLanes lanes, which load kHeadsAtOnce before they work on the first. kWhole: head_dim is a
// multiple of 16.
template <class T, int kLanes, int kChunks, bool kWhole>
__global__ void __launch_bounds__(kHeadThreads / kChunks)
    append_rotated(const RotatedCall<T> call) {
  using Row = HeadRow<T, kLanes, kChunks>;
  __shared__ float exchange[kWhole ? 1 : kHeadThreads * kChunk];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int groups = static_cast<int>(blockDim.x) / kLanes;
  const int64_t token = blockIdx.x;
  const int dim = call.head_dim;
  start_next_kernel();
  Row q_weight, k_weight, cosine, sine;
  q_weight.load(call.q_norm, lane, dim, call.aligned);  // before waiting: no kernel writes weights
  k_weight.load(call.k_norm, lane, dim, call.aligned);
  wait_for_previous_kernel();
  const bool norms = call.q_norm != nullptr, turns = call.cosine != nullptr;
  const int64_t slot = call.slots[token];
  cosine.load(turns ? call.cosine + token * dim : nullptr, lane, dim, call.aligned);
  sine.load(turns ? call.sine + token * dim : nullptr, lane, dim, call.aligned);
  const T* token_rows = call.qkv + token * call.all_heads * dim;
  for (int first = group; first - group < call.all_heads;
       first += kHeadsAtOnce<T, kChunks> * groups) {
    Row rows[kHeadsAtOnce<T, kChunks>];
#pragma unroll
    for (int j = 0; j < kHeadsAtOnce<T, kChunks>; ++j) {
      const int head = first + j * groups;
      const T* from =
          head < call.all_heads ? token_rows + static_cast<int64_t>(head) * dim : nullptr;
      rows[j].load(from, lane, dim, call.aligned);
    }
#pragma unroll
    for (int j = 0; j < kHeadsAtOnce<T, kChunks>; ++j) {
      if (first - group + j * groups >= call.all_heads) break;  // for all groups
      const int head = first + j * groups;
      const bool is_query = head < call.heads;
      const bool is_value = head >= call.heads + call.kv_heads;
      Row row = rows[j];
      if (norms) {
        const Row normal = row.normalize(Row::choose(is_query, k_weight, q_weight), dim, call.eps);
        row = Row::choose(is_value, normal, row);
      }
      if (turns) {
        Row partner;
        if constexpr (kWhole) {
          partner = row.partner_chunks(lane, dim);
        } else {
          partner = row.partner_elements(lane, dim, exchange + group * kLanes * kChunks * kChunk);
        }
        row = Row::choose(is_value, row.rotate(partner, cosine, sine, lane, dim), row);
      }
      if (head >= call.all_heads) continue;
      if (!is_query && (slot < 0 || slot >= call.slot_count)) continue;
      const int kv_head = is_value ? head - call.heads - call.kv_heads : head - call.heads;
      const int64_t index =
          is_query ? (token * call.heads + head) * dim : (slot * call.kv_heads + kv_head) * dim;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int column = Row::column(lane, i), left = dim - column;
        if (left <= 0) continue;
        if (is_query) {
          store_chunk(call.query + index + column, left, call.aligned, row.chunks[i]);
        } else {
          store_cached(choose(is_value, call.keys, call.values), call.type, index + column, kv_head,
                       left, call.aligned, row.chunks[i]);
        }
      }
    }
  }
}

struct GatherCall {
  const uint8_t* cache;
  const float* scale;     // null for plain values
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
        const Word4 loaded = load_once16(from + 4 * i);
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
      const uint32_t pair = Decode<E4M3>::pair(words[i / 4] >> (i / 2 % 2 * 16));
      return (i % 2 == 0 ? low_half<Half>(pair) : high_half<Half>(pair)) * Decode<E4M3>::kFactor;
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
    const int64_t slot =
        (static_cast<int64_t>(call.blocks[block]) - block) * call.block_size + token;
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
template <class T, class Start>
void start_append(const AppendCall<T>& call, const Start& start) {
  const int64_t units = call.heads * ((call.head_dim + kChunk - 1) / kChunk);
  const int64_t warps = (units + kWarp - 1) / kWarp;
  const int64_t threads = warps * kWarp < kAppendThreads ? warps * kWarp : kAppendThreads;
  const unsigned blocks = static_cast<unsigned>((units + threads - 1) / threads);
  void (*kernel)(AppendCall<T>, unsigned) = &append<T>;
  start(kernel, dim3(static_cast<unsigned>(call.tokens) * blocks, 2), static_cast<int>(threads),
        call, blocks);
}

template <class T, int kLanes, int kChunks, bool kWhole, class Start>
void start_append_rotated(const RotatedCall<T>& call, const Start& start) {
  constexpr int kAtOnce = kHeadsAtOnce<T, kChunks>;
  const int groups = (call.all_heads + kAtOnce - 1) / kAtOnce;
  const int threads = (groups * kLanes + kWarp - 1) / kWarp * kWarp;
  void (*kernel)(RotatedCall<T>) = &append_rotated<T, kLanes, kChunks, kWhole>;
  start(kernel, dim3(static_cast<unsigned>(call.tokens)),
        threads < kHeadThreads / kChunks ? threads : kHeadThreads / kChunks, call);
}

template <class T, class Start>
void start_append_rotated(const RotatedCall<T>& call, const Start& start) {
  if (call.head_dim % (2 * kChunk) != 0) return start_append_rotated<T, 32, 2, false>(call, start);
  const int chunks = call.head_dim / kChunk;
  if (chunks <= 8) return start_append_rotated<T, 8, 1, true>(call, start);
  if (chunks <= 16) return start_append_rotated<T, 16, 1, true>(call, start);
  if (chunks <= 32) return start_append_rotated<T, 32, 1, true>(call, start);
  start_append_rotated<T, 32, 2, true>(call, start);
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
