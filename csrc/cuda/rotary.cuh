// The rotary embedding of one element; kernels differ in where its partner is.
#pragma once

#include "intrinsics.cuh"

namespace quantkit::cuda {

// x * cosine + partner * sine, every step rounded to T; the first of a pair takes -sine.
template <class T>
QK_DEVICE float rotated(float x, float cosine, float partner, float sine) {
  return widen(narrow<T>(x * cosine)) + widen(narrow<T>(partner * sine));
}

}  // namespace quantkit::cuda
