// What is done to each token on its own: RMS norm, gating, rotary embedding, appending to the KV
// cache.
// Part of kernel_template.h; include only that.
#pragma once

#include <type_traits>

#include "kernel_common.h"
#include "kernel_linear.h"

namespace quantkit {
namespace {

// The value that a T would hold.
template <class Isa, class T>
inline typename Isa::Lanes rounded(typename Isa::Lanes value) {
  T stored[Isa::kLanes];
  value.to(stored);
  return Isa::Lanes::from(stored);
}

// Returns the sum of squares of x + delta, and stores x + delta if there is a delta.
template <class Isa, class T>
float add_and_square(const NormTask& task, int64_t row) {
  using Lanes = typename Isa::Lanes;
  const T* x = static_cast<const T*>(task.x) + row * task.columns;
  Lanes squares = Lanes::zero();
  for (int64_t column = 0; column < task.columns; column += Isa::kLanes) {
    const int64_t left = task.columns - column;
    Lanes value = load_lanes<Lanes, Isa::kLanes>(x + column, left);
    if (task.delta != nullptr) {
      const T* delta = static_cast<const T*>(task.delta) + row * task.columns + column;
      T* sum = static_cast<T*>(task.sum) + row * task.columns + column;
      value = rounded<Isa, T>(Lanes::add(value, load_lanes<Lanes, Isa::kLanes>(delta, left)));
      store_lanes<Lanes, Isa::kLanes>(value, sum, left);
    }
    squares = Lanes::fma(value, value, squares);
  }
  return squares.sum();
}

template <class Isa, class T, class Weight>
void rms_norm_weighted(const NormTask& task, int64_t begin, int64_t end) {
  using Lanes = typename Isa::Lanes;
  const auto* weight = static_cast<const Weight*>(task.weight);
  for (int64_t row = begin; row < end; ++row) {
    const float mean = add_and_square<Isa, T>(task, row) / static_cast<float>(task.columns);
    if (weight == nullptr) continue;
    const Lanes factor = Lanes::broadcast(1.0f / __builtin_sqrtf(mean + task.eps));
    const void* source = task.delta == nullptr ? task.x : task.sum;
    const T* x = static_cast<const T*>(source) + row * task.columns;
    T* out = static_cast<T*>(task.out) + row * task.columns;
    for (int64_t column = 0; column < task.columns; column += Isa::kLanes) {
      const int64_t left = task.columns - column;
      const Lanes value = load_lanes<Lanes, Isa::kLanes>(x + column, left);
      const Lanes exact = Lanes::mul(value, factor);
      const Lanes normed = std::is_same_v<T, Weight> ? rounded<Isa, T>(exact) : exact;
      const Lanes scale = load_lanes<Lanes, Isa::kLanes>(weight + column, left);
      store_lanes<Lanes, Isa::kLanes>(Lanes::mul(normed, scale), out + column, left);
    }
  }
}

template <class Isa, class T>
void rms_norm_typed(const NormTask& task, int64_t begin, int64_t end) {
  if (task.weight_type == FloatType::kFloat32) {
    return rms_norm_weighted<Isa, T, float>(task, begin, end);
  }
  rms_norm_weighted<Isa, T, T>(task, begin, end);
}

template <class Isa>
void rms_norm(const NormTask& task, int64_t begin, int64_t end) {
  switch (task.type) {
    case FloatType::kFloat32: return rms_norm_typed<Isa, float>(task, begin, end);
    case FloatType::kBFloat16: return rms_norm_typed<Isa, BFloat16>(task, begin, end);
    case FloatType::kFloat16: return rms_norm_typed<Isa, Half>(task, begin, end);
  }
}

template <class Isa, class T>
void gate_typed(const GateTask& task, int64_t begin, int64_t end) {
  using Lanes = typename Isa::Lanes;
  for (int64_t row = begin; row < end; ++row) {
    const T* first = static_cast<const T*>(task.both) + 2 * row * task.features;
    T* out = static_cast<T*>(task.out) + row * task.features;
    for (int64_t column = 0; column < task.features; column += Isa::kLanes) {
      const int64_t left = task.features - column;
      const Lanes x = load_lanes<Lanes, Isa::kLanes>(first + column, left);
      const Lanes up = load_lanes<Lanes, Isa::kLanes>(first + task.features + column, left);
      const Lanes value = Lanes::mul(activate_lanes<Isa>(x, task.activation), up);
      store_lanes<Lanes, Isa::kLanes>(value, out + column, left);
    }
  }
}

template <class Isa>
void gate(const GateTask& task, int64_t begin, int64_t end) {
  switch (task.type) {
    case FloatType::kFloat32: return gate_typed<Isa, float>(task, begin, end);
    case FloatType::kBFloat16: return gate_typed<Isa, BFloat16>(task, begin, end);
    case FloatType::kFloat16: return gate_typed<Isa, Half>(task, begin, end);
  }
}

// The turning features of a head: the pairs (i, i + half). Products and sums are rounded one by one.
template <class Isa, class T>
inline void rotate_head(const T* x, const T* cosine, const T* sine, int64_t half, T* out) {
  using Lanes = typename Isa::Lanes;
  const Lanes minus = Lanes::broadcast(-1.0f);
  for (int64_t i = 0; i < half; i += Isa::kLanes) {
    const int64_t left = half - i;
    const auto load = [&](const T* source) {
      return load_lanes<Lanes, Isa::kLanes>(source + i, left);
    };
    const auto product = [](Lanes a, Lanes b) { return rounded<Isa, T>(Lanes::mul(a, b)); };
    const Lanes a = load(x);
    const Lanes b = load(x + half);
    const Lanes first =
        Lanes::add(product(a, load(cosine)), Lanes::mul(product(b, load(sine)), minus));
    const Lanes second = Lanes::add(product(b, load(cosine + half)), product(a, load(sine + half)));
    store_lanes<Lanes, Isa::kLanes>(first, out + i, left);
    store_lanes<Lanes, Isa::kLanes>(second, out + half + i, left);
  }
}

template <class Isa, class T>
void rotary_typed(const RotaryTask& task, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const T* cosine = static_cast<const T*>(task.cosine) + token * task.turned;
    const T* sine = static_cast<const T*>(task.sine) + token * task.turned;
    for (int64_t head = 0; head < task.heads; ++head) {
      const T* x = static_cast<const T*>(task.x) + token * task.x_stride + head * task.head_dim;
      T* out = static_cast<T*>(task.out) + token * task.out_stride + head * task.head_dim;
      rotate_head<Isa>(x, cosine, sine, task.turned / 2, out);
      if (x != out) {
        __builtin_memcpy(out + task.turned, x + task.turned,
                         (task.head_dim - task.turned) * sizeof(T));
      }
    }
  }
}

template <class Isa>
void rotary(const RotaryTask& task, int64_t begin, int64_t end) {
  switch (task.type) {
    case FloatType::kFloat32: return rotary_typed<Isa, float>(task, begin, end);
    case FloatType::kBFloat16: return rotary_typed<Isa, BFloat16>(task, begin, end);
    case FloatType::kFloat16: return rotary_typed<Isa, Half>(task, begin, end);
  }
}

template <class Isa, class Format, class T>
inline void encode_head(const T* x, int64_t count, float scale, uint8_t* codes) {
  using Lanes = typename Isa::Lanes;
  float quotient[Isa::kLanes];
  for (int64_t i = 0; i < count; i += Isa::kLanes) {
    const Lanes value = load_lanes<Lanes, Isa::kLanes>(x + i, count - i);
    Lanes::div(value, Lanes::broadcast(scale)).to(quotient);
    uint8_t encoded[Isa::kLanes];
    for (int lane = 0; lane < Isa::kLanes; ++lane) encoded[lane] = encode<Format>(quotient[lane]);
    __builtin_memcpy(codes + i, encoded, at_most(Isa::kLanes, count - i));
  }
}

template <class Isa, class T, class Out>
inline void convert_head(const T* x, int64_t count, Out* out) {
  using Lanes = typename Isa::Lanes;
  for (int64_t i = 0; i < count; i += Isa::kLanes) {
    const Lanes value = load_lanes<Lanes, Isa::kLanes>(x + i, count - i);
    store_lanes<Lanes, Isa::kLanes>(value, out + i, count - i);
  }
}

template <class Isa, class T>
void append_typed(const AppendTask& task, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t target = task.slots[token] * task.heads * task.head_dim;
    for (int64_t head = 0; head < task.heads; ++head) {
      const int64_t offset = target + head * task.head_dim;
      const T* x = static_cast<const T*>(task.x) + token * task.x_stride + head * task.head_dim;
      switch (task.cache_type) {
        case WeightFormat::kFloat32:
          convert_head<Isa>(x, task.head_dim, static_cast<float*>(task.cache) + offset);
          break;
        case WeightFormat::kBFloat16:
          convert_head<Isa>(x, task.head_dim, static_cast<BFloat16*>(task.cache) + offset);
          break;
        case WeightFormat::kFloat16:
          convert_head<Isa>(x, task.head_dim, static_cast<Half*>(task.cache) + offset);
          break;
        case WeightFormat::kE3M4:
          encode_head<Isa, E3M4>(x, task.head_dim, task.scale[head * task.scale_stride],
                                 static_cast<uint8_t*>(task.cache) + offset);
          break;
        default:  // E4M3, by the op's checks
          encode_head<Isa, E4M3>(x, task.head_dim, task.scale[head * task.scale_stride],
                                 static_cast<uint8_t*>(task.cache) + offset);
      }
    }
  }
}

template <class Isa>
void append(const AppendTask& task, int64_t begin, int64_t end) {
  switch (task.type) {
    case FloatType::kFloat32: return append_typed<Isa, float>(task, begin, end);
    case FloatType::kBFloat16: return append_typed<Isa, BFloat16>(task, begin, end);
    case FloatType::kFloat16: return append_typed<Isa, Half>(task, begin, end);
  }
}

}  // namespace
}  // namespace quantkit
