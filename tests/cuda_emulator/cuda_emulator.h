// CUDA's words for g++, and csrc/cuda/intrinsics.cuh's PTX as plain C++ with the same bits.
//
// intrinsics.cuh includes this file in place of its PTX when QK_EMULATOR is defined. Numbers: every
// conversion and every product is exact or rounded once, as on the device; expf and its kind are
// the host's, at most a few units in the last place from the device's. See README.md.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "block.h"

#define QK_DEVICE inline
#define QK_DYNAMIC_SHARED(type, name) \
  type* name = reinterpret_cast<type*>(::quantkit::cuda::emulator::state().dynamic_shared)
#ifndef QK_EMULATE_SM80
#define QK_CONVERTS_E4M3
#endif

// Kernels become functions of this file alone: their shared arrays are then checked for overruns.
#define __global__ static
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define QK_PLACE const std::source_location place = std::source_location::current()

// Barriers and votes.

inline void __syncthreads(QK_PLACE) {
  quantkit::cuda::emulator::block_barrier("__syncthreads", 0, place);
}
inline int __syncthreads_or(int predicate, QK_PLACE) {
  return quantkit::cuda::emulator::block_barrier("__syncthreads_or", predicate != 0, place) > 0;
}
inline int __syncthreads_count(int predicate, QK_PLACE) {
  return quantkit::cuda::emulator::block_barrier("__syncthreads_count", predicate != 0, place);
}
inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu, QK_PLACE) {
  char nothing = 0;
  quantkit::cuda::emulator::warp_operation("__syncwarp", mask, nothing, place, [](char**) {});
}
inline unsigned __ballot_sync(uint32_t mask, int predicate, QK_PLACE) {
  unsigned value = predicate != 0;
  quantkit::cuda::emulator::warp_operation("__ballot_sync", mask, value, place,
                                           [](unsigned** values) {
                                             unsigned votes = 0;
                                             for (int lane = 0; lane < 32; ++lane) {
                                               if (values[lane] != nullptr)
                                                 votes |= *values[lane] << lane;
                                             }
                                             for (int lane = 0; lane < 32; ++lane) {
                                               if (values[lane] != nullptr) *values[lane] = votes;
                                             }
                                           });
  return value;
}
inline int __any_sync(uint32_t mask, int predicate, QK_PLACE) {
  return __ballot_sync(mask, predicate, place) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, QK_PLACE) {
  return __ballot_sync(mask, predicate, place) == mask;
}

// Shuffles. `source` gives the lane that a lane reads.

namespace quantkit::cuda::emulator {

template <class T, class Source>
T shuffle(const char* operation, uint32_t mask, T value, const Place& place, Source source) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  struct Payload {
    T value;
    int source;
    T result;
  };
  Payload mine{
      value,
      source(static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) %
             32),
      value};
  warp_operation(operation, mask, mine, place, [operation](Payload** payloads) {
    for (int lane = 0; lane < 32; ++lane) {
      if (payloads[lane] == nullptr) continue;
      const Payload* from = payloads[payloads[lane]->source];
      if (from == nullptr) stop("%s: lane %d reads a lane outside of the mask", operation, lane);
      payloads[lane]->result = from->value;
    }
  });
  return mine.result;
}

}  // namespace quantkit::cuda::emulator

template <class T>
T __shfl_sync(uint32_t mask, T value, int from, int width = 32, QK_PLACE) {
  return quantkit::cuda::emulator::shuffle("__shfl_sync", mask, value, place, [=](int lane) {
    return (lane & ~(width - 1)) | (from & (width - 1));
  });
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32, QK_PLACE) {
  return quantkit::cuda::emulator::shuffle("__shfl_xor_sync", mask, value, place, [=](int lane) {
    const int from = (lane ^ bits) & 31;
    return from > (lane | (width - 1)) ? lane : from;
  });
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned step, int width = 32, QK_PLACE) {
  return quantkit::cuda::emulator::shuffle("__shfl_down_sync", mask, value, place, [=](int lane) {
    const int from = lane + static_cast<int>(step);
    return from > (lane | (width - 1)) ? lane : from;
  });
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned step, int width = 32, QK_PLACE) {
  return quantkit::cuda::emulator::shuffle("__shfl_up_sync", mask, value, place, [=](int lane) {
    const int from = lane - static_cast<int>(step);
    return from < (lane & ~(width - 1)) ? lane : from;
  });
}

// Atomics: one thread runs at a time.

template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  const T old = *address;
  *address = old + value;
  return old;
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  const T old = *address;
  if (value > old) *address = value;
  return old;
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  const T old = *address;
  if (value < old) *address = value;
  return old;
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  const T old = *address;
  *address = value;
  return old;
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __ldg(const T* address) {
  return *address;
}

// Arithmetic.

inline float __uint_as_float(uint32_t bits) { return quantkit::bits_float(bits); }
inline uint32_t __float_as_uint(float value) { return quantkit::float_bits(value); }
inline float __int_as_float(int bits) { return quantkit::bits_float(static_cast<uint32_t>(bits)); }
inline int __float_as_int(float value) { return static_cast<int>(quantkit::float_bits(value)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return expf(a); }
inline float __logf(float a) { return logf(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xFF;
    if (choice & 8) byte = byte & 0x80 ? 0xFF : 0;  // the sign, replicated
    out |= byte << (8 * i);
  }
  return out;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __brev(unsigned bits) {
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out |= (bits >> i & 1) << (31 - i);
  return out;
}

#define QK_MIN_MAX(T)                              \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
QK_MIN_MAX(int)
QK_MIN_MAX(unsigned)
QK_MIN_MAX(long)
QK_MIN_MAX(unsigned long)
QK_MIN_MAX(long long)
QK_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
#undef QK_MIN_MAX

// What intrinsics.cuh has in PTX.

namespace quantkit::cuda {

template <class Word>
Word load_aligned(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(Word) != 0) {
    emulator::stop("a load of %zu bytes from %p, which is not a multiple of it", sizeof(Word),
                   address);
  }
  Word word;
  std::memcpy(&word, address, sizeof(Word));
  return word;
}
inline Word4 load_once16(const void* address) { return load_aligned<Word4>(address); }
inline Word2 load_once8(const void* address) { return load_aligned<Word2>(address); }
inline uint32_t load_once4(const void* address) { return load_aligned<uint32_t>(address); }
inline void prefetch(const void* address) { load_aligned<uint8_t>(address); }

inline Word4 load_written16(const void* address) { return load_aligned<Word4>(address); }
inline Word2 load_written8(const void* address) { return load_aligned<Word2>(address); }
inline uint32_t load_written4(const void* address) { return load_aligned<uint32_t>(address); }

inline float as_float(uint32_t bits) { return bits_float(bits); }
inline uint32_t as_bits(float value) { return float_bits(value); }

inline float widen(Half value) { return to_float(value); }
template <class T>
T narrow(float value) {
  T out;
  from_float(value, &out);
  return out;
}
template <class T>
uint32_t pack2(float low, float high) {
  return narrow<T>(low).bits | static_cast<uint32_t>(narrow<T>(high).bits) << 16;
}

inline uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

template <int kHalf>
uint32_t widen_bytes(uint32_t bytes) {
  return __byte_perm(bytes, 0, kHalf == 0 ? 0x9180 : 0xB3A2);
}

inline uint32_t decode_pair_e4m3(uint16_t codes) {
  return pack2<Half>(kDecodeTable<E4M3>.value[codes & 0xFF], kDecodeTable<E4M3>.value[codes >> 8]);
}
inline Word2 decode_quad_e4m3(uint32_t codes) {
  return {{decode_pair_e4m3(static_cast<uint16_t>(codes)),
           decode_pair_e4m3(static_cast<uint16_t>(codes >> 16))}};
}
inline uint16_t encode_pair_e4m3(float low, float high) {
  return static_cast<uint16_t>(encode<E4M3>(low) | encode<E4M3>(high) << 8);
}

inline void wait_for_previous_kernel() {}
inline void start_next_kernel() {}

inline uint32_t transpose_tile(uint32_t pair,
                               const emulator::Place place = emulator::Place::current()) {
  emulator::warp_operation("movmatrix", 0xFFFFFFFFu, pair, place, [](uint32_t** pairs) {
    uint32_t in[32];
    for (int lane = 0; lane < 32; ++lane) in[lane] = *pairs[lane];
    const auto element = [&](int row, int column) {
      return in[4 * row + column / 2] >> (16 * (column % 2)) & 0xFFFF;
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      *pairs[lane] = element(2 * t, g) | element(2 * t + 1, g) << 16;
    }
  });
  return pair;
}

inline float exp2_flush(float x) {
  const float out = exp2f(x);
  return out < 0x1p-126f ? 0.0f : out;
}

inline float reciprocal_flush(float x) { return fabsf(x) < 0x1p-126f ? HUGE_VALF : 1.0f / x; }

// The sixteen products of one output are exact in float32 (two significands of at most 11 bits);
// they are added to c one by one in the order of k, each sum rounded to float32. The device adds
// them in groups, with bits cut off below the largest: tests must leave room for either.
template <class T>
void multiply_tile(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                   const emulator::Place place = emulator::Place::current()) {
  struct Payload {
    float* c;
    const uint32_t* a;
    const uint32_t* b;
  };
  Payload mine{c, a, b};
  const char* const operation = kIsBFloat16<T> ? "mma bf16" : "mma f16";
  emulator::warp_operation(operation, 0xFFFFFFFFu, mine, place, [](Payload** lanes) {
    float left[16][16], right[16][8];
    const auto half = [](uint32_t pair, int which) {
      return to_float(T{static_cast<uint16_t>(pair >> (16 * which))});
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 8; ++i) {
        left[g + 8 * (i / 2 % 2)][2 * t + 8 * (i / 4) + i % 2] = half(lanes[lane]->a[i / 2], i % 2);
      }
      for (int i = 0; i < 4; ++i)
        right[2 * t + 8 * (i / 2) + i % 2][g] = half(lanes[lane]->b[i / 2], i % 2);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        float sum = lanes[lane]->c[i];
        for (int k = 0; k < 16; ++k) sum += left[g + 8 * (i / 2)][k] * right[k][2 * t + i % 2];
        lanes[lane]->c[i] = sum;
      }
    }
  });
}

}  // namespace quantkit::cuda
