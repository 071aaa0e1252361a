// Dot products of weight rows with packed x, and the linear layers made of them.
// Part of kernel_template.h; include only that.
#pragma once

#include "kernel_common.h"

namespace quantkit {
namespace {

// One weight row against one row of x by table, for rows that hold NaN or infinite codes.
template <class Isa, class Format>
float dot_by_table(const LinearTask& task, int64_t row, int m) {
  const WeightMatrix& weight = task.weight;
  const uint8_t* codes = weight.codes + row * weight.columns;
  const int64_t stride = Isa::kColumns * padded_batch(task.batch);
  const float* x = task.x + m * Isa::kColumns;
  float total = 0.0f;
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t begin = group * weight.group_size;
    const int64_t count = at_most(weight.group_size, weight.columns - begin);
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      const float* chunk = x + i / Isa::kColumns * stride;
      const float value = kDecodeTable<Format>.value[codes[begin + i]];
      sum += chunk[Isa::slot(static_cast<int>(i % Isa::kColumns))] * value;
    }
    total += sum * weight.scale[row * weight.groups + group];
    x += ceil_div(count, Isa::kColumns) * stride;
  }
  return total;
}

template <class Format>
bool has_special(const uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if ((codes[i] & 0x7F) >= Format::kFirstSpecial) return true;
  }
  return false;
}

// Sums of kR weight rows by kM rows of x, in registers. kR * kM vectors must fit beside kR decoded
// ones: the loops over them must unroll completely, or the compiler moves the arrays to the stack.
template <class Isa, class Format, int kR, int kM>
struct Block {
  using Lanes = typename Isa::Lanes;
  using Codes = typename Stored<Isa, Format>::type;
  static constexpr int64_t kBytes = Stored<Isa, Format>::kBytes;

  Lanes sum[kR][kM];
  typename Codes::Peak peak;

  static inline __attribute__((always_inline)) Block none() {
    Block block;
    block.clear();
    block.peak = Codes::Peak::none();
    return block;
  }

  inline __attribute__((always_inline)) void clear() {
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      QK_UNROLL for (int m = 0; m < kM; ++m) sum[r][m] = Lanes::zero();
    }
  }

  inline __attribute__((always_inline)) void add(const Codes (&codes)[kR], const float* x) {
    QK_UNROLL for (int r = 0; r < kR; ++r) peak.add(codes[r]);
    QK_UNROLL for (int part = 0; part < Isa::kColumns / Isa::kLanes; ++part) {
      Lanes w[kR];
      QK_UNROLL for (int r = 0; r < kR; ++r) w[r] = codes[r].part(part);
      QK_UNROLL for (int m = 0; m < kM; ++m) {
        const Lanes value = Lanes::load(x + m * Isa::kColumns + part * Isa::kLanes);
        QK_UNROLL for (int r = 0; r < kR; ++r) sum[r][m] = Lanes::fma(w[r], value, sum[r][m]);
      }
    }
  }

  // Adds `count` columns, starting at w[r]; returns where the next group starts in x. Prefetches
  // the same columns of the next kR rows: nearer is too late, and hardware does not follow kR
  // streams.
  inline __attribute__((always_inline)) const float* add_columns(const uint8_t* const (&w)[kR],
                                                                 int64_t count, const float* x,
                                                                 int64_t row_bytes) {
    Codes codes[kR];
    int64_t column = 0;
    for (; column + Isa::kColumns <= count; column += Isa::kColumns) {
      QK_UNROLL for (int r = 0; r < kR; ++r) {
        const uint8_t* stored = w[r] + column * kBytes;
        QK_UNROLL for (int line = 0; line * 64 < Isa::kColumns * kBytes; ++line) {
          __builtin_prefetch(stored + line * 64 + kR * row_bytes);
        }
        codes[r] = Codes::load(stored);
      }
      add(codes, x);
      x += kM * Isa::kColumns;
    }
    if (column < count) {
      QK_UNROLL for (int r = 0; r < kR; ++r) {
        codes[r] = Codes::load_some(w[r] + column * kBytes, static_cast<int>(count - column));
      }
      add(codes, x);
      x += kM * Isa::kColumns;
    }
    return x;
  }
};

// Both return whether a special code was seen; see dot_rows for `out`.

template <class Isa, class Format, int kR, int kM>
inline __attribute__((always_inline)) bool dot_one_group(const LinearTask& task,
                                                         const uint8_t* const (&w)[kR],
                                                         const float* const (&scale)[kR],
                                                         float* out) {
  using Dot = Block<Isa, Format, kR, kM>;
  Dot block = Dot::none();
  block.add_columns(w, task.weight.columns, task.x, task.weight.columns * Dot::kBytes);
  QK_UNROLL for (int r = 0; r < kR; ++r) {
    QK_UNROLL for (int m = 0; m < kM; ++m) {
      out[m * Isa::kLanes + r] = block.sum[r][m].sum() * Dot::Codes::kFactor * scale[r][0];
    }
  }
  return block.peak.special();
}

template <class Isa, class Format, int kR, int kM>
inline __attribute__((always_inline)) bool dot_groups(const LinearTask& task,
                                                      const uint8_t* const (&w)[kR],
                                                      const float* const (&scale)[kR], float* out) {
  using Dot = Block<Isa, Format, kR, kM>;
  using Lanes = typename Isa::Lanes;
  const WeightMatrix& weight = task.weight;
  Dot block = Dot::none();
  Lanes total[kR][kM];  // on the stack, touched once per group
  for (int r = 0; r < kR; ++r) {
    for (int m = 0; m < kM; ++m) total[r][m] = Lanes::zero();
  }
  const float* x = task.x;
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t begin = group * weight.group_size;
    const int64_t count = at_most(weight.group_size, weight.columns - begin);
    const uint8_t* start[kR];
    QK_UNROLL for (int r = 0; r < kR; ++r) start[r] = w[r] + begin * Dot::kBytes;
    block.clear();
    x = block.add_columns(start, count, x, weight.columns * Dot::kBytes);
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      const Lanes factor = Lanes::broadcast(scale[r][group]);
      QK_UNROLL for (int m = 0; m < kM; ++m) {
        total[r][m] = Lanes::fma(block.sum[r][m], factor, total[r][m]);
      }
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int m = 0; m < kM; ++m) {
      out[m * Isa::kLanes + r] = total[r][m].sum() * Dot::Codes::kFactor;
    }
  }
  return block.peak.special();
}

// out[m * kLanes + r] = sum over k of weight[row + r, k] * x[m, k], scaled; `valid` rows exist. What
// is written for other rows, of weight or x, means nothing.
using DotRows = void (*)(const LinearTask&, int64_t row, int valid, float* out);

template <class Isa, class Format, int kR, int kM>
__attribute__((noinline)) void dot_rows(const LinearTask& task, int64_t row, int valid,
                                        float* out) {
  static constexpr float kOne = 1.0f;
  const WeightMatrix& weight = task.weight;
  const uint8_t* w[kR];
  const float* scale[kR];
  QK_UNROLL for (int r = 0; r < kR; ++r) {  // rows beyond the end repeat the last one
    const int64_t source = row + at_most(r, valid - 1);
    w[r] = weight.codes + source * weight.columns * Stored<Isa, Format>::kBytes;
    scale[r] = weight.scale == nullptr ? &kOne : weight.scale + source * weight.groups;
  }
  const bool special = weight.groups == 1 ? dot_one_group<Isa, Format, kR, kM>(task, w, scale, out)
                                          : dot_groups<Isa, Format, kR, kM>(task, w, scale, out);
  if constexpr (Stored<Isa, Format>::kIsCode) {
    if (!special) return;
    for (int r = 0; r < valid; ++r) {
      if (!has_special<Format>(w[r], weight.columns)) continue;
      for (int m = 0; m < task.batch; ++m) {
        out[m * Isa::kLanes + r] = dot_by_table<Isa, Format>(task, row + r, m);
      }
    }
  }
}

struct DotKernel {
  DotRows run;
  int rows;  // weight rows a call, a divisor of kLanes
};

template <class Isa, class Format, int kM = 1>
DotKernel choose_batch(int batch) {
  if constexpr (kM < Isa::kMaxBatch) {
    if (batch > kM) return choose_batch<Isa, Format, kM < 4 ? kM + 1 : 2 * kM>(batch);
  }
  return {dot_rows<Isa, Format, Isa::weight_rows(kM), kM>, Isa::weight_rows(kM)};
}

template <class Isa>
int64_t pass_rows(FloatType, WeightFormat, int64_t batch) {
  return at_most(Isa::kMaxBatch, batch);
}

template <class Isa>
DotKernel choose_kernel(const LinearTask& task) {
  switch (task.weight.format) {
    case WeightFormat::kE4M3: return choose_batch<Isa, E4M3>(task.batch);
    case WeightFormat::kE5M2: return choose_batch<Isa, E5M2>(task.batch);
    case WeightFormat::kE3M4: return choose_batch<Isa, E3M4>(task.batch);
    case WeightFormat::kFloat32: return choose_batch<Isa, float>(task.batch);
    case WeightFormat::kBFloat16: return choose_batch<Isa, BFloat16>(task.batch);
    case WeightFormat::kFloat16: return choose_batch<Isa, Half>(task.batch);
  }
  return {};
}

using Chooser = DotKernel (*)(const LinearTask&);

// sums[m * kLanes + i]: row of x m by weight row `row + i`, for `count` (at most kLanes) rows.
inline void dot_lanes(const DotKernel& kernel, const LinearTask& task, int64_t row, int64_t count,
                      float* sums) {
  for (int64_t i = 0; i < count; i += kernel.rows) {
    kernel.run(task, row + i, static_cast<int>(at_most(kernel.rows, count - i)), sums + i);
  }
}

template <class Isa>
inline typename Isa::Lanes bias_lanes(const LinearTask& task, int64_t row, int64_t count) {
  using Lanes = typename Isa::Lanes;
  if (task.bias == nullptr) return Lanes::zero();
  switch (task.bias_type) {
    case FloatType::kFloat32:
      return load_lanes<Lanes, Isa::kLanes>(static_cast<const float*>(task.bias) + row, count);
    case FloatType::kBFloat16:
      return load_lanes<Lanes, Isa::kLanes>(static_cast<const BFloat16*>(task.bias) + row, count);
    case FloatType::kFloat16:
      return load_lanes<Lanes, Isa::kLanes>(static_cast<const Half*>(task.bias) + row, count);
  }
  return Lanes::zero();
}

template <class Isa>
inline void store_result(const LinearTask& task, typename Isa::Lanes value, int64_t index,
                         int64_t count) {
  using Lanes = typename Isa::Lanes;
  switch (task.out_type) {
    case FloatType::kFloat32:
      return store_lanes<Lanes, Isa::kLanes>(value, static_cast<float*>(task.out) + index, count);
    case FloatType::kBFloat16:
      return store_lanes<Lanes, Isa::kLanes>(value, static_cast<BFloat16*>(task.out) + index,
                                             count);
    case FloatType::kFloat16:
      return store_lanes<Lanes, Isa::kLanes>(value, static_cast<Half*>(task.out) + index, count);
  }
}

template <class Isa>
inline typename Isa::Lanes activate_lanes(typename Isa::Lanes value, Activation activation) {
  using Lanes = typename Isa::Lanes;
  if (activation == Activation::kSilu) {
    const Lanes power = Lanes::exp(Lanes::mul(value, Lanes::broadcast(-1.0f)));
    return Lanes::div(value, Lanes::add(power, Lanes::broadcast(1.0f)));
  }
  float numbers[Isa::kLanes];
  value.to(numbers);
  for (float& number : numbers) number = activate(number, activation);
  return Lanes::from(numbers);
}

template <class Isa, Chooser kChoose>
void linear(const LinearTask& task, int64_t begin, int64_t end) {
  using Lanes = typename Isa::Lanes;
  const DotKernel kernel = kChoose(task);
  alignas(64) float sums[Isa::kLanes * Isa::kMaxBatch];
  for (int64_t row = begin; row < end; row += Isa::kLanes) {
    const int64_t count = at_most(Isa::kLanes, end - row);
    dot_lanes(kernel, task, row, count, sums);
    const Lanes bias = bias_lanes<Isa>(task, row, count);
    for (int m = 0; m < task.batch; ++m) {
      const Lanes value = Lanes::add(Lanes::from(sums + m * Isa::kLanes), bias);
      store_result<Isa>(task, value, m * task.features + row, count);
    }
  }
}

// Rows [0, features) of the weight are gates, rows [features, 2 * features) are ups.
template <class Isa, Chooser kChoose>
void gated_linear(const LinearTask& task, int64_t begin, int64_t end) {
  using Lanes = typename Isa::Lanes;
  const DotKernel kernel = kChoose(task);
  alignas(64) float gates[Isa::kLanes * Isa::kMaxBatch];
  alignas(64) float ups[Isa::kLanes * Isa::kMaxBatch];
  for (int64_t row = begin; row < end; row += Isa::kLanes) {
    const int64_t count = at_most(Isa::kLanes, end - row);
    dot_lanes(kernel, task, row, count, gates);
    dot_lanes(kernel, task, task.features + row, count, ups);
    const Lanes gate_bias = bias_lanes<Isa>(task, row, count);
    const Lanes up_bias = bias_lanes<Isa>(task, task.features + row, count);
    for (int m = 0; m < task.batch; ++m) {
      const Lanes gate = Lanes::add(Lanes::from(gates + m * Isa::kLanes), gate_bias);
      const Lanes up = Lanes::add(Lanes::from(ups + m * Isa::kLanes), up_bias);
      const Lanes value = Lanes::mul(activate_lanes<Isa>(gate, task.activation), up);
      store_result<Isa>(task, value, m * task.features + row, count);
    }
  }
}

}  // namespace
}  // namespace quantkit
