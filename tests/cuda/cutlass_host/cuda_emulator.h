// In place of tests/cuda_emulator/cuda_emulator.h where g++ compiles CUTLASS: NVIDIA's headers
// define CUDA's types themselves, so only what intrinsics.cuh has in PTX is here, in plain C++.
#pragma once

#include <cmath>
#include <cstdint>

#define QK_DEVICE inline

inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

namespace quantkit::cuda {

inline float as_float(uint32_t bits) { return bits_float(bits); }
inline uint32_t as_bits(float value) { return float_bits(value); }
inline uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}
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

}  // namespace quantkit::cuda
