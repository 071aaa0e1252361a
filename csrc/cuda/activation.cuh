// The activations of gated layers and of epilogues, in float32.
//
// exp, erf and tanh are the library's, not the fast ones: an activation is computed once for each
// few thousand products, so accuracy costs nothing.
#pragma once

#include "../types.h"
#include "intrinsics.cuh"

namespace quantkit::cuda {

template <Activation kKind>
QK_DEVICE float activate(float x) {
  if constexpr (kKind == Activation::kSilu) {
    return x / (1.0f + expf(-x));
  } else if constexpr (kKind == Activation::kGelu) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  } else if constexpr (kKind == Activation::kGeluTanh) {
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  } else {
    return x < 0.0f ? 0.0f : x;  // NaN passes through
  }
}

QK_DEVICE float activate(Activation kind, float x) {
  switch (kind) {
    case Activation::kSilu: return activate<Activation::kSilu>(x);
    case Activation::kGelu: return activate<Activation::kGelu>(x);
    case Activation::kGeluTanh: return activate<Activation::kGeluTanh>(x);
    case Activation::kRelu: return activate<Activation::kRelu>(x);
  }
  return x;
}

// The same with the kind as a number; those that are none of the above change nothing.
QK_DEVICE float activate(int kind, float x) { return activate(static_cast<Activation>(kind), x); }

}  // namespace quantkit::cuda
