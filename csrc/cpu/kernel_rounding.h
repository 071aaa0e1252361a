// Numbers rounded to an 8-bit format and back, where calibration tries what a format would do.
// Part of kernel_template.h; include only that.
#pragma once

#include "kernel_common.h"

namespace quantkit {
namespace {

constexpr int64_t kRoundedAtOnce = 512;

// The number of the format nearest to a value, ties to even; beyond the largest it saturates, NaN
// stays NaN, and so does the sign of zero. As numerics.round_to_format.
inline float on_grid(float value, const RoundingGrid& grid) {
  float clamped = value > grid.largest ? grid.largest : value;
  clamped = clamped < -grid.largest ? -grid.largest : clamped;
  // The power of two at or below it; below the smallest normal number the step is fixed.
  const float power = bits_float(float_bits(clamped) & 0x7F800000);
  // Adding a number of which the last bit is worth one step rounds to whole steps.
  const float step = (power < grid.least_power ? grid.least_power : power) * grid.shift;
  const float nearest = (clamped + step) - step;
  return bits_float(float_bits(nearest) | (float_bits(value) & 0x80000000));
}

// Reads `count` numbers as floats, and up to a whole vector of zeros after them.
template <class Isa, class T>
inline void read_floats(const T* source, int64_t count, float* out) {
  using Lanes = typename Isa::Lanes;
  for (int64_t i = 0; i < count; i += Isa::kLanes) {
    load_lanes<Lanes, Isa::kLanes>(source + i, count - i).store(out + i);
  }
}

template <class Isa, class T>
inline void write_floats(const float* values, int64_t count, T* out) {
  using Lanes = typename Isa::Lanes;
  for (int64_t i = 0; i < count; i += Isa::kLanes) {
    store_lanes<Lanes, Isa::kLanes>(Lanes::load(values + i), out + i, count - i);
  }
}

// The largest |x| of a row, NaN if there is one: as integers, magnitudes are in order.
inline float largest_of(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = float_bits(x[i]) & 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return bits_float(largest);
}

template <class T>
inline float largest_of(const T* x, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = x[i].bits & 0x7FFF;
    largest = bits > largest ? bits : largest;
  }
  return to_float(T{largest});
}

// As numerics.amax_to_scale.
inline float scale_for(float largest, float top) {
  if (largest == 0.0f) return 1.0f;
  const float scale = largest / top;
  if ((float_bits(scale) & 0x7F800000) == 0x7F800000) return scale;
  const float normal = scale < 0x1p-126f ? 0x1p-126f : scale;
  return bits_float((float_bits(normal) + 0xFFFF) & 0xFFFF0000);
}

template <class Isa, class T>
void round_rows_typed(const RoundTask& task, int64_t begin, int64_t end) {
  alignas(64) float values[kRoundedAtOnce];
  const RoundingGrid grid = task.grid;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(task.x) + row * task.columns;
    T* out = static_cast<T*>(task.out) + row * task.columns;
    const float scale = task.scale == nullptr
                            ? scale_for(largest_of(x, task.columns), grid.largest)
                            : task.scale[row * task.scale_stride];
    for (int64_t start = 0; start < task.columns; start += kRoundedAtOnce) {
      const int64_t count = at_most(kRoundedAtOnce, task.columns - start);
      read_floats<Isa>(x + start, count, values);
      for (int64_t i = 0; i < count; ++i) values[i] = on_grid(values[i] / scale, grid) * scale;
      write_floats<Isa>(values, count, out + start);
    }
  }
}

template <class Isa>
void round_rows(const RoundTask& task, int64_t begin, int64_t end) {
  switch (task.type) {
    case FloatType::kFloat32: return round_rows_typed<Isa, float>(task, begin, end);
    case FloatType::kBFloat16: return round_rows_typed<Isa, BFloat16>(task, begin, end);
    case FloatType::kFloat16: return round_rows_typed<Isa, Half>(task, begin, end);
  }
}

// What a row costs with a scale: float32 within a run of columns, float64 over the runs.
template <class Isa>
double weighted_error(const ScaleErrorsTask& task, const float* weight, float scale) {
  using Lanes = typename Isa::Lanes;
  alignas(64) float values[kRoundedAtOnce];
  const RoundingGrid grid = task.grid;
  double total = 0.0;
  for (int64_t start = 0; start < task.columns; start += kRoundedAtOnce) {
    const int64_t count = at_most(kRoundedAtOnce, task.columns - start);
    for (int64_t i = 0; i < count; ++i) {
      const float value = weight[start + i];
      const float error = on_grid(value / scale, grid) * scale - value;
      values[i] = error * error * task.importance[start + i];
    }
    for (int64_t i = count; i % Isa::kLanes != 0; ++i) values[i] = 0.0f;
    Lanes sums = Lanes::zero();
    for (int64_t i = 0; i < count; i += Isa::kLanes) {
      sums = Lanes::add(sums, Lanes::load(values + i));
    }
    total += static_cast<double>(sums.sum());
  }
  return total;
}

template <class Isa>
void scale_errors(const ScaleErrorsTask& task, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* weight = task.weight + row * task.columns;
    for (int64_t i = 0; i < task.candidates; ++i) {
      const float scale = task.scales[i * task.scales_stride + (task.scales_stride > 1 ? row : 0)];
      task.errors[i * task.rows + row] = weighted_error<Isa>(task, weight, scale);
    }
  }
}

inline float as_bfloat16(float value) {
  BFloat16 stored;
  from_float(value, &stored);
  return to_float(stored);
}

// A run of `count` rows (columns of a weight matrix, up to kRoundedAtOnce of them) through the block.
template <class Isa>
void feed_back_some(const FeedbackTask& task, int64_t first, int64_t count) {
  alignas(64) float aim[kRoundedAtOnce];
  const RoundingGrid grid = task.grid;
  for (int64_t k = 0; k < task.columns; ++k) {
    const int64_t at = k * task.rows + first;
    for (int64_t i = 0; i < count; ++i) aim[i] = task.aims[at + i];
    for (int64_t j = 0; j < k; ++j) {
      const float share = task.factor[k * task.columns + j];
      const float* error = task.error + j * task.rows + first;
      for (int64_t i = 0; i < count; ++i) aim[i] += share * error[i];
    }
    const float* __restrict target = task.target + at;
    const float* __restrict scale =
        task.scales + (task.has_one_scale ? 0 : k * task.rows) + first;
    float* __restrict steps = task.steps + at;
    float* __restrict errors = task.error + at;
    float* __restrict residual = task.residual + at;
    const bool is_exact = k >= task.first_exact;
    for (int64_t i = 0; i < count; ++i) {
      const float nearest = is_exact ? as_bfloat16(aim[i]) : on_grid(aim[i] / scale[i], grid);
      const float step = target[i] == 0.0f ? 0.0f : nearest;
      const float value = step * scale[i];
      steps[i] = step;
      errors[i] = target[i] - value;
      residual[i] = aim[i] - value;
    }
  }
}

// On rows of the weight, columns of the transposed one, [begin, end).
template <class Isa>
void feed_back(const FeedbackTask& task, int64_t begin, int64_t end) {
  constexpr int64_t kRun = 64;  // whose errors of a whole block stay in L1
  for (int64_t first = begin; first < end; first += kRun) {
    feed_back_some<Isa>(task, first, at_most(kRun, end - first));
  }
}

}  // namespace
}  // namespace quantkit
