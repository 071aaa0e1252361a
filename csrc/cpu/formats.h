// The three 8-bit formats, as the kernels need them. Definitions: quantkit/numerics.py.
//
// Vector decode: a code's sign, exponent and mantissa, moved into the places of a float16, are the
// float16 of  value * 2^-(15 - bias), exactly, for every finite code including subnormals:
//   ((code & 0x80) << 8) | ((code & 0x7F) << (8 - kHalfShift))
// and kHalfFactor undoes the power of two, at the end of a dot product. Codes whose magnitude is at
// least kFirstSpecial are NaN or infinity in the format but finite in that float16; kernels detect
// them by magnitude. E5M2 has the exponent of float16, so nothing is special there.
#pragma once

#include <cstdint>

namespace quantkit {

// What weights and caches are stored as; the last three are plain floats, without scales.
enum class WeightFormat { kE4M3, kE5M2, kE3M4, kFloat32, kBFloat16, kFloat16 };

constexpr int kNoSpecial = 0x80;

struct E4M3 {
  static constexpr int kExponentBits = 4;
  static constexpr int kHalfShift = 1;
  static constexpr int kHalfMask = 0xBF80;
  static constexpr float kHalfFactor = 256.0f;
  static constexpr int kFirstSpecial = 0x7F;
  static constexpr uint32_t kLargest = 0x43E00000;  // bits of 448
  static constexpr uint32_t kNan = 0x7F;
};

struct E5M2 {
  static constexpr int kExponentBits = 5;
  static constexpr int kHalfShift = 0;
  static constexpr int kHalfMask = 0xFF00;
  static constexpr float kHalfFactor = 1.0f;
  static constexpr int kFirstSpecial = kNoSpecial;
};

struct E3M4 {
  static constexpr int kExponentBits = 3;
  static constexpr int kHalfShift = 2;
  static constexpr int kHalfMask = 0x9FC0;
  static constexpr float kHalfFactor = 4096.0f;
  static constexpr int kFirstSpecial = 0x70;
  static constexpr uint32_t kLargest = 0x41780000;  // bits of 15.5
  static constexpr uint32_t kNan = 0x78;
};

// Values of all 256 codes, from the definition of the format.
template <class Format>
struct DecodeTable {
  float value[256];

  constexpr DecodeTable() : value() {
    constexpr int kMantissaBits = 7 - Format::kExponentBits;
    constexpr int kBias = (1 << (Format::kExponentBits - 1)) - 1;
    constexpr int kTopExponent = (1 << Format::kExponentBits) - 1;
    constexpr bool kIeee = Format::kExponentBits != 4;  // E4M3 spends its top exponent on numbers
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code & 0x7F) >> kMantissaBits;
      const int mantissa = code & ((1 << kMantissaBits) - 1);
      const int significand = exponent == 0 ? mantissa : mantissa + (1 << kMantissaBits);
      float magnitude = static_cast<float>(significand);
      for (int e = (exponent == 0 ? 1 : exponent) - kBias - kMantissaBits; e < 0; ++e) {
        magnitude *= 0.5f;
      }
      for (int e = exponent - kBias - kMantissaBits; e > 0; --e) magnitude *= 2.0f;
      if (kIeee && exponent == kTopExponent) {
        magnitude = mantissa == 0 ? __builtin_inff() : __builtin_nanf("");
      } else if (!kIeee && (code & 0x7F) == 0x7F) {
        magnitude = __builtin_nanf("");
      }
      value[code] = code < 0x80 ? magnitude : -magnitude;
    }
  }
};

template <class Format>
inline constexpr DecodeTable<Format> kDecodeTable{};

// The code nearest to a value, ties to even; beyond the largest it saturates, NaN stays NaN.
// No branches, so that compilers can do many at a time. For E4M3 and E3M4.
template <class Format>
inline uint8_t encode(float value) {
  constexpr int kMantissaBits = 7 - Format::kExponentBits;
  constexpr int kCut = 23 - kMantissaBits;
  constexpr uint32_t kBias = (1 << (Format::kExponentBits - 1)) - 1;
  constexpr uint32_t kFirstNormal = (127 + 1 - kBias) << 23;
  // A float32 of which the last bit is worth one step of the format's subnormal numbers.
  constexpr uint32_t kSteps = (127 + 24 - kBias - kMantissaBits) << 23;
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t clamped = magnitude < Format::kLargest ? magnitude : Format::kLargest;
  // A carry moves into the exponent, as it should; then float32's bias becomes the format's.
  const uint32_t half = (1u << (kCut - 1)) - 1 + ((clamped >> kCut) & 1);
  const uint32_t normal = (clamped + half - ((127 - kBias) << 23)) >> kCut;
  // Below the first normal number the step is fixed: let an add round.
  float shifted, steps;
  __builtin_memcpy(&shifted, &clamped, sizeof(shifted));
  __builtin_memcpy(&steps, &kSteps, sizeof(steps));
  shifted += steps;
  uint32_t subnormal;
  __builtin_memcpy(&subnormal, &shifted, sizeof(subnormal));
  subnormal -= kSteps;
  const uint32_t finite = clamped < kFirstNormal ? subnormal : normal;
  return static_cast<uint8_t>(sign | (magnitude > 0x7F800000 ? Format::kNan : finite));
}

}  // namespace quantkit
