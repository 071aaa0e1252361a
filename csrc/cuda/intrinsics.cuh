// What the kernels need beyond plain C++: loads, 8-bit conversions, warp reductions, the matrix
// instruction. Everything that is PTX lives here and nowhere else, so that tests/cuda_emulator can
// replace this one header and run the kernels on a CPU.
#pragma once

#include <cstdint>

#include "../cpu/float16.h"
#include "../cpu/formats.h"

namespace quantkit::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr int kWarp = 32;

// 16 bytes in registers.
struct alignas(16) Word4 {
  uint32_t word[4];
};
struct alignas(8) Word2 {
  uint32_t word[2];
};

}  // namespace quantkit::cuda

#ifdef QK_EMULATOR
#include "cuda_emulator.h"
#else

#define QK_DEVICE __device__ __forceinline__
// Shared memory whose size is an argument of the launch; one such array a kernel.
#define QK_DYNAMIC_SHARED(type, name)                           \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  type* name = reinterpret_cast<type*>(name##_bytes)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define QK_CONVERTS_E4M3  // the processor has instructions for it
#endif

namespace quantkit::cuda {

// Loads of data that is read once per kernel: through the read-only path, not kept in L1. A lane's
// 16 bytes bring its whole cache line to L2: what the next chunk reads (a tenth faster on an H200).
QK_DEVICE Word4 load_once16(const void* address) {
  Word4 w;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
               : "l"(address));
  return w;
}
QK_DEVICE Word2 load_once8(const void* address) {
  Word2 w;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(w.word[0]), "=r"(w.word[1])
               : "l"(address));
  return w;
}
QK_DEVICE uint32_t load_once4(const void* address) {
  uint32_t w;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w) : "l"(address));
  return w;
}

// Brings the sector at an address to L2, and waits for nothing.
QK_DEVICE void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The same for what an earlier kernel of the stream wrote, which may still run when this one begins
// (launch_overlapped.h): the read-only path is for memory that nobody writes while a kernel lives.
QK_DEVICE Word4 load_written16(const void* address) {
  Word4 w;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
               : "l"(address));
  return w;
}
QK_DEVICE Word2 load_written8(const void* address) {
  Word2 w;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(w.word[0]), "=r"(w.word[1])
               : "l"(address));
  return w;
}
QK_DEVICE uint32_t load_written4(const void* address) {
  uint32_t w;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(w) : "l"(address));
  return w;
}

QK_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
QK_DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }

// One 16-bit float to float32 and back (to nearest even).
QK_DEVICE float widen(Half value) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
  return out;
}
template <class T>
QK_DEVICE T narrow(float value);
template <>
QK_DEVICE float narrow<float>(float value) {
  return value;
}
template <>
QK_DEVICE BFloat16 narrow<BFloat16>(float value) {
  BFloat16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
}
template <>
QK_DEVICE Half narrow<Half>(float value) {
  Half out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
}

// Two floats to two 16-bit floats in one register, `low` in the low half.
template <class T>
QK_DEVICE uint32_t pack2(float low, float high);
template <>
QK_DEVICE uint32_t pack2<BFloat16>(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
template <>
QK_DEVICE uint32_t pack2<Half>(float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// Four bytes chosen from eight: __byte_perm.
QK_DEVICE uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

// Bytes 2 * half and 2 * half + 1, each widened to 16 bits with its sign.
template <int kHalf>
QK_DEVICE uint32_t widen_bytes(uint32_t bytes) {
  constexpr uint32_t kSelector = kHalf == 0 ? 0x9180 : 0xB3A2;  // 8 + i: the sign of byte i
  uint32_t out;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(out) : "r"(bytes), "n"(kSelector));
  return out;
}

#ifdef QK_CONVERTS_E4M3
QK_DEVICE uint32_t decode_pair_e4m3(uint16_t codes) {
  uint32_t out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(codes));
  return out;
}
// Four codes; taking the upper two in the same block spares the shift.
QK_DEVICE Word2 decode_quad_e4m3(uint32_t codes) {
  Word2 out;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(out.word[0]), "=r"(out.word[1])
      : "r"(codes));
  return out;
}
QK_DEVICE uint16_t encode_pair_e4m3(float low, float high) {
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
#endif

// A kernel launched to overlap the one before it (launch_overlapped.h) starts while that
// one still runs. It may load what no kernel writes, such as weights, but must call this before it
// reads or writes anything else; every block must. Elsewhere it does nothing.
QK_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The condition always holds; without one, the compiler moves loads from above to below.
  asm volatile(
      "{.reg .pred p; .reg .u32 blocks; mov.u32 blocks, %nctaid.x; setp.ne.u32 p, blocks, 0;\n"
      "@p griddepcontrol.wait;}" ::: "memory");
#endif
}
// Lets such a kernel start once all blocks have come here.
QK_DEVICE void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The 8 x 8 matrix whose lane 4 * g + t holds row g, columns 2t, 2t+1 in 16 bits each, transposed:
// the lane gets column g, rows 2t, 2t+1.
QK_DEVICE uint32_t transpose_tile(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// 2^x within two units in the last place, exact at 0; what is below 2^-126 becomes zero.
QK_DEVICE float exp2_flush(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// 1 / x within one unit in the last place; what is below 2^-126 counts as zero.
QK_DEVICE float reciprocal_flush(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// c[16 x 8] += a[16 x 16] * b[16 x 8], float32 sums. Lane = 4 * g + t holds, in pairs of T,
//   a[0]: row g,     columns 2t, 2t+1      a[2]: row g,     columns 2t+8, 2t+9
//   a[1]: row g + 8, columns 2t, 2t+1      a[3]: row g + 8, columns 2t+8, 2t+9
//   b[0]: rows 2t, 2t+1 of column g        b[1]: rows 2t+8, 2t+9 of column g
//   c[0], c[1]: row g, columns 2t, 2t+1    c[2], c[3]: row g + 8, the same columns
template <class T>
QK_DEVICE void multiply_tile(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kIsBFloat16<T>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace quantkit::cuda

#endif  // QK_EMULATOR

// From here on plain C++ over what is above: the same code under the emulator.
namespace quantkit::cuda {

QK_DEVICE float widen(float value) { return value; }
QK_DEVICE float widen(BFloat16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }
template <class T>
QK_DEVICE float low_half(uint32_t pair) {
  return widen(T{static_cast<uint16_t>(pair & 0xFFFF)});
}
template <class T>
QK_DEVICE float high_half(uint32_t pair) {
  return widen(T{static_cast<uint16_t>(pair >> 16)});
}

// Two codes (the low 16 bits) to two float16 holding `value / kFactor`; finite codes only. Where the
// processor converts, the factor is 1; elsewhere bits move, as in ../cpu/formats.h.
template <class Format>
struct Decode {
  static constexpr float kFactor = Format::kHalfFactor;  // multiply the sum by this
  QK_DEVICE static uint32_t pair(uint32_t codes) {
    return move_bits(choose_bytes(codes, 0, 0x1404));  // [0, c0, 0, c1] as halves c << 8
  }
  // Four codes to two pairs.
  QK_DEVICE static Word2 quad(uint32_t codes) {
    return {{pair(codes), move_bits(choose_bytes(codes, 0, 0x3424))}};
  }

 private:
  QK_DEVICE static uint32_t move_bits(uint32_t spread) {
    if constexpr (Format::kHalfShift == 0) return spread;
    const uint32_t sign = spread & 0x80008000u;
    return sign | ((spread & 0x7F007F00u) >> Format::kHalfShift);
  }
};
#ifdef QK_CONVERTS_E4M3
template <>
struct Decode<E4M3> {
  static constexpr float kFactor = 1.0f;
  QK_DEVICE static uint32_t pair(uint32_t codes) {
    return decode_pair_e4m3(static_cast<uint16_t>(codes));
  }
  QK_DEVICE static Word2 quad(uint32_t codes) { return decode_quad_e4m3(codes); }
};
#endif

// The same for codes that may be NaN or infinity, and stay so: where they become magnitudes at the
// top of float16's last but one exponent range, bits that are added move them into the last.
template <class Format>
struct DecodeAny {
  static constexpr float kFactor = Format::kHalfFactor;
  static_assert(Format::kFirstSpecial != kNoSpecial, "Decode does all of it");

  QK_DEVICE static uint32_t pair(uint32_t codes) { return move_bits(widen_bytes<0>(codes)); }
  QK_DEVICE static Word2 quad(uint32_t codes) {
    return {{pair(codes), move_bits(widen_bytes<1>(codes))}};
  }

 private:
  QK_DEVICE static uint32_t twice(uint32_t half) { return half << 16 | half; }

  // Codes with their signs above. What is shifted out of the low half is masked off in the high.
  QK_DEVICE static uint32_t move_bits(uint32_t spread) {
    constexpr uint32_t kShift = 8 - Format::kHalfShift;
    constexpr uint32_t kMagnitude = Format::kHalfMask & 0x7FFF;
    constexpr uint32_t kCarry = (0x80u - Format::kFirstSpecial) << kShift;  // 0x7F: 1
    constexpr uint32_t kNext = 0x80u << kShift;  // the bit that a special magnitude carries into
    const uint32_t moved = spread << kShift;
    const uint32_t special = ((moved & twice(kMagnitude)) + twice(kCarry)) & twice(kNext);
    // All exponent bits from there to the highest.
    return special * ((0x8000u - kNext) / kNext) + (moved & twice(Format::kHalfMask));
  }
};
#ifdef QK_CONVERTS_E4M3
template <>
struct DecodeAny<E4M3> : Decode<E4M3> {};
#endif

// The code nearest to a float, ties to even, saturating at the format's largest number; NaN gives
// the format's, as quantkit/numerics.py encodes it.
template <class Format>
QK_DEVICE uint32_t encode_one(float value) {
  constexpr uint32_t kDropped = 23 - (7 - Format::kExponentBits);  // bits of float32's mantissa
  constexpr uint32_t kBias = (127u - ((1u << (Format::kExponentBits - 1)) - 1)) << 23;
  constexpr uint32_t kMost = Format::kFirstSpecial - 1;
  constexpr uint32_t kLeastNormal = (0x80u >> Format::kExponentBits << kDropped) + kBias;
  // A number whose neighbours are as far away as subnormal codes are: an addition rounds to them.
  constexpr uint32_t kMagic = kLeastNormal + (kDropped << 23);
  constexpr uint32_t kNan = Format::kExponentBits == 4 ? 0x7F : 0x78;
  const uint32_t bits = as_bits(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t code;
  if (magnitude > 0x7F800000) {
    code = kNan;
  } else if (magnitude >= (kMost << kDropped) + kBias) {
    code = kMost;
  } else if (magnitude < kLeastNormal) {
    code = as_bits(as_float(magnitude) + as_float(kMagic)) - kMagic;
  } else {
    code = (magnitude + ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1) - kBias) >>
           kDropped;
    code = code > kMost ? kMost : code;
  }
  return sign | code;
}

// Two floats to two codes, `low` in the low byte.
template <class Format>
QK_DEVICE uint32_t encode_pair(float low, float high) {
  return encode_one<Format>(low) | encode_one<Format>(high) << 8;
}
#ifdef QK_CONVERTS_E4M3
template <>
QK_DEVICE uint32_t encode_pair<E4M3>(float low, float high) {
  return encode_pair_e4m3(low, high);
}
#endif

QK_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
QK_DEVICE float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

}  // namespace quantkit::cuda
