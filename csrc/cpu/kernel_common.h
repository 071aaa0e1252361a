// What the kernel templates share: floats of three types, stored columns, activations, unrolling.
// Part of kernel_template.h; include only that.
#pragma once

#include "float16.h"
#include "kernels.h"

namespace quantkit {
namespace {

#if defined(__clang__)
#define QK_UNROLL _Pragma("unroll")
#else
#define QK_UNROLL _Pragma("GCC unroll 16")
#endif

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of x that a kernel computes for `batch` of them; the rest is zero padding.
inline int padded_batch(int batch) {
  if (batch <= 4) return batch;
  int padded = 8;
  while (padded < batch) padded *= 2;
  return padded;
}

inline float activate(float value, Activation activation) {
  switch (activation) {
    case Activation::kSilu: return value / (1.0f + __builtin_expf(-value));
    case Activation::kGelu: return 0.5f * value * (1.0f + __builtin_erff(value * 0.70710678f));
    case Activation::kGeluTanh: {
      const float inner = 0.79788456f * (value + 0.044715f * value * value * value);
      return 0.5f * value * (1.0f + __builtin_tanhf(inner));
    }
    case Activation::kRelu: return value < 0.0f ? 0.0f : value;  // NaN passes through
  }
  return value;
}

// exp(x) / 2^n for n = round(x / ln 2), by Cody-Waite reduction and a polynomial (Cephes);
// relative error 2^-23. Below kExpLowest, exp is zero here: 1e-28 beside a 1 in all uses, and
// arithmetic on subnormal numbers takes a hundred times as long as on others.
constexpr float kLog2E = 1.44269504f;
constexpr float kExpLowest = -64.0f;
constexpr float kExpHighest = 89.0f;

inline float exp_or_zero(float x) { return x < kExpLowest ? 0.0f : __builtin_expf(x); }

template <class Lanes>
inline Lanes exp_reduced(Lanes x, Lanes n) {
  const Lanes high = Lanes::fma(n, Lanes::broadcast(-0.693359375f), x);
  const Lanes r = Lanes::fma(n, Lanes::broadcast(2.12194440e-4f), high);
  Lanes p = Lanes::broadcast(1.9875691500e-4f);
  p = Lanes::fma(p, r, Lanes::broadcast(1.3981999507e-3f));
  p = Lanes::fma(p, r, Lanes::broadcast(8.3334519073e-3f));
  p = Lanes::fma(p, r, Lanes::broadcast(4.1665795894e-2f));
  p = Lanes::fma(p, r, Lanes::broadcast(1.6666665459e-1f));
  p = Lanes::fma(p, r, Lanes::broadcast(5.0000001201e-1f));
  return Lanes::fma(Lanes::mul(p, r), r, Lanes::add(r, Lanes::broadcast(1.0f)));
}

// cap * tanh(score / cap) = cap - 2 cap / (exp(2 score / cap) + 1): off by 2^-23 of the cap.
template <class Lanes>
inline Lanes soft_capped(Lanes score, float cap) {
  const Lanes power = Lanes::exp(Lanes::mul(score, Lanes::broadcast(2.0f / cap)));
  const Lanes below = Lanes::div(Lanes::broadcast(-2.0f * cap),
                                 Lanes::add(power, Lanes::broadcast(1.0f)));
  return Lanes::add(Lanes::broadcast(cap), below);
}

// Up to kLanes floats of any type; what is beyond `count` reads as zero.
template <class Lanes, int kLanes, class T>
inline Lanes load_lanes(const T* source, int64_t count) {
  if (count >= kLanes) return Lanes::from(source);
  T padded[kLanes] = {};
  __builtin_memcpy(padded, source, count * sizeof(T));
  return Lanes::from(padded);
}

template <class Lanes, int kLanes, class T>
inline void store_lanes(Lanes lanes, T* target, int64_t count) {
  if (count >= kLanes) return lanes.to(target);
  T padded[kLanes];
  lanes.to(padded);
  __builtin_memcpy(target, padded, count * sizeof(T));
}

// Plain floats, with the interface and the column order of Isa::Codes.
template <class Isa, class T>
struct FloatCodes {
  static constexpr float kFactor = 1.0f;
  typename Isa::template Cells<T> cells;

  static FloatCodes load(const uint8_t* stored) {
    return {Isa::template Cells<T>::load(reinterpret_cast<const T*>(stored))};
  }
  static FloatCodes load_some(const uint8_t* stored, int count) {
    T padded[Isa::kColumns] = {};
    __builtin_memcpy(padded, stored, count * sizeof(T));
    return {Isa::template Cells<T>::load(padded)};
  }
  typename Isa::Lanes part(int index) const { return cells.part(index); }

  struct Peak {
    static Peak none() { return {}; }
    void add(const FloatCodes&) {}
    bool special() const { return false; }
  };
};

// How kColumns stored numbers are read (type) and how wide one is, for formats and for floats.
template <class Isa, class Format>
struct Stored {
  static constexpr bool kIsCode = true;
  static constexpr int64_t kBytes = 1;
  using type = typename Isa::template Codes<Format>;
};
#define QK_STORED_FLOAT(T)                       \
  template <class Isa>                           \
  struct Stored<Isa, T> {                        \
    static constexpr bool kIsCode = false;       \
    static constexpr int64_t kBytes = sizeof(T); \
    using type = FloatCodes<Isa, T>;             \
  }
QK_STORED_FLOAT(float);
QK_STORED_FLOAT(BFloat16);
QK_STORED_FLOAT(Half);
#undef QK_STORED_FLOAT

}  // namespace
}  // namespace quantkit
