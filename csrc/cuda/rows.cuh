// What is done to rows of activations between the products: RMS norm with or without adding a
// residual, activation and product of a gated layer, quantization to E4M3, rotary embedding.
//
// A thread handles 8 adjacent elements, a chunk, at a time and keeps them, rounded to T as every
// step rounds them, until its row is done; only rows of more than 16384 elements are read twice.
// Which thread sums what depends on the number of columns alone, so a row's bits are the same
// whatever else is in the call, whether steps are fused or not, and for unaligned rows too.
#pragma once

#include "activation.cuh"
#include "intrinsics.cuh"
#include "rotary.cuh"

namespace quantkit::cuda {

constexpr int kChunk = 8;
constexpr int kRowThreads = 512;
constexpr int kShortRows = 8;  // rows of at most a warp's chunks that share a block
constexpr int kShortThreads = kShortRows * kWarp;
constexpr int kMapThreads = 256;

// Where the elements of a row come from.
enum class RowSource {
  kValues,  // x
  kSum,     // x + delta, which is also stored
  kGated,   // activation(first half of x's row) * second half
};

template <class T>
struct RowCall {
  const T* x;          // [rows, columns], with kGated [rows, 2 * columns]
  const T* delta;      // [rows, columns]
  T* sum;              // [rows, columns]
  const void* weight;  // [columns], of the norm: of T or float
  T* out;              // [rows, columns], unless quantized to
  uint8_t* codes;      // [rows, columns] and
  float* scales;       // [rows], made of each row's largest element; or [1], a copy of
  const float* scale;  // [1] or null
  int64_t rows;
  int64_t columns;
  float eps;
  Activation activation;
  bool aligned;  // every chunk is whole and at a multiple of 16 bytes (8 of codes)
};

// 8 elements of T as they lie in memory.
template <class T>
struct Chunk {
  Word4 words[sizeof(T) / 2];
};

template <class T>
QK_DEVICE T element(const Chunk<T>& chunk, int i) {
  if constexpr (sizeof(T) == 4) {
    return as_float(chunk.words[i / 4].word[i % 4]);
  } else {
    return T{static_cast<uint16_t>(chunk.words[0].word[i / 2] >> (16 * (i % 2)))};
  }
}

template <class T>
QK_DEVICE void unpack(const Chunk<T>& chunk, float (&values)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) values[i] = widen(element(chunk, i));
}

template <class T>
QK_DEVICE Chunk<T> pack(const float (&values)[kChunk]) {
  Chunk<T> chunk;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk.words[i / 4].word[i % 4] = as_bits(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; i += 2) {
      chunk.words[0].word[i / 2] = pack2<T>(values[i], values[i + 1]);
    }
  }
  return chunk;
}

// The first `left` of 8 elements, the others zero. Plain loads: another kernel may have written x
// after this one began.
template <class T>
QK_DEVICE Chunk<T> load_chunk(const T* from, int64_t left, bool aligned) {
  if (aligned) return *reinterpret_cast<const Chunk<T>*>(from);
  float values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) values[i] = i < left ? widen(from[i]) : 0.0f;
  return pack<T>(values);
}

template <class T>
QK_DEVICE void store_chunk(T* to, int64_t left, bool aligned, const Chunk<T>& chunk) {
  if (aligned) {
    *reinterpret_cast<Chunk<T>*>(to) = chunk;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < left) to[i] = element(chunk, i);
  }
}

template <class Format, class T>
QK_DEVICE void store_codes(uint8_t* to, int64_t left, bool aligned, const Chunk<T>& chunk,
                           float scale) {
  float values[kChunk];
  unpack(chunk, values);
  Word2 codes = {};
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    const uint32_t pair = encode_pair<Format>(values[i] / scale, values[i + 1] / scale);
    codes.word[i / 4] |= pair << (8 * (i % 4));
  }
  if (aligned) {
    *reinterpret_cast<Word2*>(to) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < left) to[i] = static_cast<uint8_t>(codes.word[i / 4] >> (8 * (i % 4)));
  }
}

// The scale for a row of that largest magnitude, as numerics.amax_to_scale: a quotient rounded up
// to bfloat16, at least 2^-126, and 1 if all is zero. NaN and infinity stay.
QK_DEVICE float scale_for(float amax) {
  if (amax == 0.0f) return 1.0f;
  const float exact = amax / 448.0f;
  const float scale = exact < 0x1p-126f ? 0x1p-126f : exact;
  const uint32_t bits = as_bits(scale);
  return bits < 0x7F800000u ? as_float((bits + 0xFFFFu) & 0xFFFF0000u) : scale;
}

// What a row is multiplied by, and one element of the norm: rounded before its weight, but where
// the weight alone is float32.
QK_DEVICE float norm_factor(float squares, int64_t columns, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(columns) + eps);
}
template <class T, class Weight>
QK_DEVICE float normalized(float x, float factor, float weight) {
  if constexpr (sizeof(Weight) > sizeof(T)) return x * factor * weight;
  return widen(narrow<T>(x * factor)) * weight;
}

template <class T>
QK_DEVICE float add_squares(const Chunk<T>& chunk, float sum) {
  float values[kChunk];
  unpack(chunk, values);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) sum = fmaf(values[i], values[i], sum);
  return sum;
}

// The largest magnitude as bits, which order as their numbers do, NaN above all.
template <class T>
QK_DEVICE uint32_t add_magnitudes(const Chunk<T>& chunk, uint32_t most) {
  float values[kChunk];
  unpack(chunk, values);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) most = max(most, as_bits(values[i]) & 0x7FFFFFFFu);
  return most;
}

QK_DEVICE uint32_t warp_most(uint32_t value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// Over all threads of a row: a warp, or the whole block. Everybody gets the result.
template <bool kShort>
QK_DEVICE float row_sum(float value) {
  value = warp_sum(value);
  if constexpr (kShort) return value;
  __shared__ float parts[kRowThreads / kWarp];
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x) / kWarp ? parts[lane] : 0.0f);
}
template <bool kShort>
QK_DEVICE uint32_t row_most(uint32_t value) {
  value = warp_most(value);
  if constexpr (kShort) return value;
  __shared__ uint32_t parts[kRowThreads / kWarp];
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_most(lane < static_cast<int>(blockDim.x) / kWarp ? parts[lane] : 0u);
}

template <Activation kKind, class T>
QK_DEVICE Chunk<T> gate_chunk(const Chunk<T>& gate, const Chunk<T>& up) {
  float gates[kChunk], ups[kChunk];
  unpack(gate, gates);
  unpack(up, ups);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) gates[i] = activate<kKind>(gates[i]) * ups[i];
  return pack<T>(gates);
}

// One branch for 8 elements.
template <class T>
QK_DEVICE Chunk<T> gate_chunk(Activation kind, const Chunk<T>& gate, const Chunk<T>& up) {
  switch (kind) {
    case Activation::kSilu: return gate_chunk<Activation::kSilu>(gate, up);
    case Activation::kGelu: return gate_chunk<Activation::kGelu>(gate, up);
    case Activation::kGeluTanh: return gate_chunk<Activation::kGeluTanh>(gate, up);
    default: return gate_chunk<Activation::kRelu>(gate, up);
  }
}

// A chunk of the source. Where rows are read twice, sums are stored the first time only.
template <RowSource kSource, class T>
QK_DEVICE Chunk<T> read_chunk(const RowCall<T>& call, int64_t row, int64_t column, bool aligned,
                              bool store_sum) {
  const int64_t left = call.columns - column;
  if constexpr (kSource == RowSource::kGated) {
    const T* gate = call.x + row * 2 * call.columns + column;
    return gate_chunk(call.activation, load_chunk(gate, left, aligned),
                      load_chunk(gate + call.columns, left, aligned));
  }
  const int64_t offset = row * call.columns + column;
  const Chunk<T> x = load_chunk(call.x + offset, left, aligned);
  if constexpr (kSource == RowSource::kValues) return x;
  float values[kChunk], deltas[kChunk];
  unpack(x, values);
  unpack(load_chunk(call.delta + offset, left, aligned), deltas);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) values[i] += deltas[i];
  const Chunk<T> sum = pack<T>(values);
  if (store_sum) store_chunk(call.sum + offset, left, aligned, sum);
  return sum;
}

// Norm, quantization, or both, for rows of up to kChunks * kChunk * threads elements; kChunks = 0
// for any, which are read again for every step. A row has a block; with kShort a warp, one of
// kShortRows in the block, and needs no barriers. The norm's weight is of Weight.
template <class T, class Weight, RowSource kSource, bool kNorm, bool kCodes, int kChunks,
          bool kShort>
__global__ void __launch_bounds__(kShort ? kShortThreads : kRowThreads)
    process_rows(const RowCall<T> call) {
  constexpr bool kKeep = kChunks > 0;
  constexpr int kKept = kKeep ? kChunks : 1;
  const bool aligned = (kKeep && !kShort) || call.aligned;
  const int thread = kShort ? threadIdx.x % kWarp : threadIdx.x;
  const int64_t row = kShort ? static_cast<int64_t>(blockIdx.x) * kShortRows + threadIdx.x / kWarp
                             : static_cast<int64_t>(blockIdx.x);
  const int64_t width = static_cast<int64_t>(kShort ? kWarp : blockDim.x) * kChunk;  // of a pass
  const int64_t first = static_cast<int64_t>(thread) * kChunk;
  const int passes = kKeep ? kChunks : static_cast<int>((call.columns + width - 1) / width);
  const Weight* const weight = static_cast<const Weight*>(call.weight);
  Chunk<T> kept[kKept] = {};
  Chunk<Weight> weights[kKept] = {};

  start_next_kernel();
  if (kShort && row >= call.rows) return;
  if constexpr (kNorm && kKeep) {  // before waiting: no kernel writes weights
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int64_t column = first + i * width;
      if (column < call.columns) {
        weights[i] = load_chunk(weight + column, call.columns - column, aligned);
      }
    }
  }
  wait_for_previous_kernel();

  if constexpr (kKeep) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int64_t column = first + i * width;
      if (column < call.columns) kept[i] = read_chunk<kSource>(call, row, column, aligned, true);
    }
  }
  float factor = 1.0f;
  if constexpr (kNorm) {
    float squares = 0.0f;
    if constexpr (kKeep) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) squares = add_squares(kept[i], squares);
    } else {
      for (int64_t column = first; column < call.columns; column += width) {
        squares = add_squares(read_chunk<kSource>(call, row, column, aligned, true), squares);
      }
    }
    factor = norm_factor(row_sum<kShort>(squares), call.columns, call.eps);
  }
  // A chunk as it is stored or quantized.
  const auto finish = [&](int i) {
    const int64_t column = first + i * width;
    Chunk<T> chunk =
        kKeep ? kept[kKeep ? i : 0] : read_chunk<kSource>(call, row, column, aligned, false);
    if constexpr (kNorm) {
      float values[kChunk], factors[kChunk];
      unpack(chunk, values);
      unpack(kKeep ? weights[kKeep ? i : 0]
                   : load_chunk(weight + column, call.columns - column, aligned),
             factors);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        values[k] = normalized<T, Weight>(values[k], factor, factors[k]);
      }
      chunk = pack<T>(values);
    }
    return chunk;
  };
  float scale = 1.0f;
  if constexpr (kCodes) {
    if (call.scale != nullptr) {
      scale = *call.scale;
      if (row == 0 && thread == 0) *call.scales = scale;
    } else {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < passes; ++i) {
        if (first + i * width < call.columns) most = add_magnitudes(finish(i), most);
      }
      scale = scale_for(as_float(row_most<kShort>(most)));
      if (thread == 0) call.scales[row] = scale;
    }
  }
#pragma unroll
  for (int i = 0; i < passes; ++i) {
    const int64_t column = first + i * width;
    if (column >= call.columns) break;
    const int64_t offset = row * call.columns + column;
    const int64_t left = call.columns - column;
    if constexpr (kCodes) {
      store_codes<E4M3>(call.codes + offset, left, aligned, finish(i), scale);
    } else {
      store_chunk(call.out + offset, left, aligned, finish(i));
    }
  }
}

// What needs no more than one element at a time: a product of a gated layer, or quantization with
// a scale that is known. gridDim.x = rows * blocks of a row.
template <class T, RowSource kSource, bool kCodes>
__global__ void __launch_bounds__(kMapThreads)
    map_rows(const RowCall<T> call, unsigned blocks_per_row) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x / blocks_per_row;
  const int64_t block = blockIdx.x % blocks_per_row;
  const int64_t column = (block * kMapThreads + threadIdx.x) * kChunk;
  if (column >= call.columns) return;
  const Chunk<T> chunk = read_chunk<kSource>(call, row, column, call.aligned, false);
  const int64_t offset = row * call.columns + column;
  const int64_t left = call.columns - column;
  if constexpr (kCodes) {
    const float scale = *call.scale;
    if (blockIdx.x == 0 && threadIdx.x == 0) *call.scales = scale;
    store_codes<E4M3>(call.codes + offset, left, call.aligned, chunk, scale);
  } else {
    store_chunk(call.out + offset, left, call.aligned, chunk);
  }
}

template <class T>
struct RotaryCall {
  const T* x;       // [tokens, heads, head_dim], tokens x_stride elements apart
  const T* cosine;  // [tokens, rotary_dim]
  const T* sine;    // [tokens, rotary_dim]
  T* out;           // [tokens, heads, head_dim]
  int64_t x_stride;
  int64_t heads;
  int64_t head_dim;
  int64_t rotary_dim;  // of a head, its first elements; the others are copied
  bool aligned;        // chunks of both halves of what turns, and of the rest, are whole and at
                       // multiples of 16 bytes
};

// A token a block; a thread turns 8 pairs at a time, or copies 8 elements.
template <class T>
__global__ void __launch_bounds__(kMapThreads) rotate(const RotaryCall<T> call) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int64_t token = blockIdx.x;
  const int64_t half = call.rotary_dim / 2;
  const int turned = static_cast<int>((half + kChunk - 1) / kChunk);  // chunks of a half
  const int chunks =
      turned + static_cast<int>((call.head_dim - call.rotary_dim + kChunk - 1) / kChunk);
  const T* const x_row = call.x + token * call.x_stride;
  T* const out_row = call.out + token * call.heads * call.head_dim;
  const T* const cosine = call.cosine + token * call.rotary_dim;
  const T* const sine = call.sine + token * call.rotary_dim;
  const int units = static_cast<int>(call.heads) * chunks;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const int64_t head = unit / chunks * call.head_dim;
    if (unit % chunks >= turned) {
      const int64_t column = call.rotary_dim + (unit % chunks - turned) * kChunk;
      const int64_t left = call.head_dim - column;
      store_chunk(out_row + head + column, left, call.aligned,
                  load_chunk(x_row + head + column, left, call.aligned));
      continue;
    }
    const int64_t low = unit % chunks * kChunk;
    const int64_t left = half - low;
    const int64_t offset = head + low;
    const auto load = [&](const T* from, float (&values)[kChunk]) {
      unpack(load_chunk(from, left, call.aligned), values);
    };
    float a[kChunk], b[kChunk], cosine_a[kChunk], cosine_b[kChunk], sine_a[kChunk], sine_b[kChunk];
    load(x_row + offset, a);
    load(x_row + offset + half, b);
    load(cosine + low, cosine_a);
    load(cosine + low + half, cosine_b);
    load(sine + low, sine_a);
    load(sine + low + half, sine_b);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float first = rotated<T>(a[i], cosine_a[i], b[i], -sine_a[i]);
      b[i] = rotated<T>(b[i], cosine_b[i], a[i], sine_b[i]);
      a[i] = first;
    }
    store_chunk(out_row + offset, left, call.aligned, pack<T>(a));
    store_chunk(out_row + offset + half, left, call.aligned, pack<T>(b));
  }
}

// How rows of so many columns are cut up.
struct RowPlan {
  int chunks;   // that a thread keeps; 0: more than can be kept
  int threads;  // of a block
  int rows;     // of a block
};

inline RowPlan plan_rows(int64_t columns) {
  const int64_t chunks = (columns + kChunk - 1) / kChunk;
  if (chunks <= kWarp) return {1, kShortThreads, kShortRows};
  for (int kept = 1; kept <= 4; kept *= 2) {
    if (chunks > kept * kRowThreads) continue;
    const int64_t threads = (chunks + kept - 1) / kept;
    return {kept, static_cast<int>((threads + kWarp - 1) / kWarp * kWarp), 1};
  }
  return {0, kRowThreads, 1};
}

// Picks the kernel of process_rows for a call; start(kernel, blocks, threads, call) launches it.
template <RowSource kSource, bool kNorm, bool kCodes, class Weight, class T, class Start>
void start_process_rows(const RowCall<T>& call, const Start& start) {
  const RowPlan plan = plan_rows(call.columns);
  const unsigned blocks = static_cast<unsigned>((call.rows + plan.rows - 1) / plan.rows);
  const auto go = [&](void (*kernel)(RowCall<T>)) { start(kernel, blocks, plan.threads, call); };
  if (plan.rows > 1) return go(&process_rows<T, Weight, kSource, kNorm, kCodes, 1, true>);
  if constexpr (sizeof(T) == 2) {
    switch (call.aligned ? plan.chunks : 0) {
      case 1: return go(&process_rows<T, Weight, kSource, kNorm, kCodes, 1, false>);
      case 2: return go(&process_rows<T, Weight, kSource, kNorm, kCodes, 2, false>);
      case 4: return go(&process_rows<T, Weight, kSource, kNorm, kCodes, 4, false>);
      default: break;
    }
  }
  go(&process_rows<T, Weight, kSource, kNorm, kCodes, 0, false>);
}

// start(kernel, blocks, threads, call, blocks of a row) launches map_rows.
template <RowSource kSource, bool kCodes, class T, class Start>
void start_map_rows(const RowCall<T>& call, const Start& start) {
  constexpr int64_t kColumns = kMapThreads * kChunk;
  const unsigned blocks = static_cast<unsigned>((call.columns + kColumns - 1) / kColumns);
  void (*kernel)(RowCall<T>, unsigned) = &map_rows<T, kSource, kCodes>;
  start(kernel, static_cast<unsigned>(call.rows) * blocks, kMapThreads, call, blocks);
}

template <class T, class Start>
void start_rotate(const RotaryCall<T>& call, int64_t tokens, const Start& start) {
  const int64_t units = call.heads * ((call.rotary_dim / 2 + kChunk - 1) / kChunk +
                                      (call.head_dim - call.rotary_dim + kChunk - 1) / kChunk);
  const int64_t warps = (units + kWarp - 1) / kWarp;
  void (*kernel)(RotaryCall<T>) = &rotate<T>;
  start(kernel, static_cast<unsigned>(tokens),
        static_cast<int>(warps * kWarp < kMapThreads ? warps * kWarp : kMapThreads), call);
}

inline bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

template <class T>
bool is_aligned(const RowCall<T>& call) {
  return call.columns % kChunk == 0 && is_aligned(call.x) && is_aligned(call.delta) &&
         is_aligned(call.sum) && is_aligned(call.weight) && is_aligned(call.out) &&
         is_aligned(call.codes);
}

template <class T>
bool is_aligned(const RotaryCall<T>& call) {
  return call.rotary_dim % (2 * kChunk) == 0 && call.head_dim % kChunk == 0 &&
         call.x_stride % kChunk == 0 && is_aligned(call.x) &&
         is_aligned(call.cosine) && is_aligned(call.sine) && is_aligned(call.out);
}

}  // namespace quantkit::cuda
