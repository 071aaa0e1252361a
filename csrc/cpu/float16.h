// Scalar float16 and bfloat16: bits to float32 and back, rounding to nearest even.
// Plain C++ for every compiler and processor; the vector kernels use instructions instead and must
// agree bit for bit (NaN payloads aside).
#pragma once

#include <cstdint>
#include <cstring>

namespace quantkit {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <class T>
inline constexpr bool kIsBFloat16 = false;
template <>
inline constexpr bool kIsBFloat16<BFloat16> = true;

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  return bits_float(static_cast<uint32_t>(value.bits) << 16);
}

inline float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1F;
  const uint32_t mantissa = value.bits & 0x3FF;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
    return bits_float(sign | float_bits(static_cast<float>(mantissa) * 0x1p-24f));
  }
  const uint32_t wide = exponent == 0x1F ? 0xFF : exponent + 112;
  return bits_float(sign | (wide << 23) | (mantissa << 13));
}

inline void from_float(float value, float* out) { *out = value; }

inline void from_float(float value, BFloat16* out) {
  const uint32_t bits = float_bits(value);
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;  // rounding could carry a NaN into infinity
  out->bits = nan ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float value, Half* out) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t half;
  if (magnitude > 0x7F800000) {
    half = 0x7E00;
  } else if (magnitude >= 0x477FF000) {  // 65520 is the tie that goes to infinity
    half = 0x7C00;
  } else if (magnitude < 0x38800000) {
    // Below 2^-14 the step is 2^-24, which is the step of float32 in [0.5, 1): let an add round.
    half = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  } else {
    half = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

}  // namespace quantkit
