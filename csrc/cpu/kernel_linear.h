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
  using Codes = typename Isa::template Codes<Format>;

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
        __builtin_prefetch(w[r] + column + kR * row_bytes);
        codes[r] = Codes::load(w[r] + column);
      }
      add(codes, x);
      x += kM * Isa::kColumns;
    }
    if (column < count) {
      QK_UNROLL for (int r = 0; r < kR; ++r) {
        codes[r] = Codes::load_some(w[r] + column, static_cast<int>(count - column));
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
  block.add_columns(w, task.weight.columns, task.x, task.weight.columns);
  QK_UNROLL for (int r = 0; r < kR; ++r) {
    QK_UNROLL for (int m = 0; m < kM; ++m) {
      out[r * kM + m] = block.sum[r][m].sum() * Dot::Codes::kFactor * scale[r][0];
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
    QK_UNROLL for (int r = 0; r < kR; ++r) start[r] = w[r] + begin;
    block.clear();
    x = block.add_columns(start, count, x, weight.columns);
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      const Lanes factor = Lanes::broadcast(scale[r][group]);
      QK_UNROLL for (int m = 0; m < kM; ++m) {
        total[r][m] = Lanes::fma(block.sum[r][m], factor, total[r][m]);
      }
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int m = 0; m < kM; ++m) out[r * kM + m] = total[r][m].sum() * Dot::Codes::kFactor;
  }
  return block.peak.special();
}

// out[r * kM + m] = sum over k of weight[row + r, k] * x[m, k], scaled; `valid` rows of kR exist.
using DotRows = void (*)(const LinearTask&, int64_t row, int valid, float* out);

template <class Isa, class Format, int kR, int kM>
__attribute__((noinline)) void dot_rows(const LinearTask& task, int64_t row, int valid,
                                        float* out) {
  const WeightMatrix& weight = task.weight;
  const uint8_t* w[kR];
  const float* scale[kR];
  QK_UNROLL for (int r = 0; r < kR; ++r) {  // rows beyond the end repeat the last one
    const int64_t source = row + at_most(r, valid - 1);
    w[r] = weight.codes + source * weight.columns;
    scale[r] = weight.scale + source * weight.groups;
  }
  const bool special = weight.groups == 1 ? dot_one_group<Isa, Format, kR, kM>(task, w, scale, out)
                                          : dot_groups<Isa, Format, kR, kM>(task, w, scale, out);
  if (!special) return;
  for (int r = 0; r < valid; ++r) {
    if (!has_special<Format>(w[r], weight.columns)) continue;
    for (int m = 0; m < task.batch; ++m) {
      out[r * kM + m] = dot_by_table<Isa, Format>(task, row + r, m);
    }
  }
}

struct DotKernel {
  DotRows run;
  int rows;   // weight rows a call
  int batch;  // rows of x a call, padding included
};

template <class Isa, class Format, int kM = 1>
DotKernel choose_batch(int batch) {
  if constexpr (kM < Isa::kMaxBatch) {
    if (batch > kM) return choose_batch<Isa, Format, 2 * kM>(batch);
  }
  return {dot_rows<Isa, Format, Isa::weight_rows(kM), kM>, Isa::weight_rows(kM), kM};
}

template <class Isa>
DotKernel choose_kernel(const LinearTask& task) {
  switch (task.weight.format) {
    case WeightFormat::kE4M3: return choose_batch<Isa, E4M3>(task.batch);
    case WeightFormat::kE5M2: return choose_batch<Isa, E5M2>(task.batch);
    case WeightFormat::kE3M4: return choose_batch<Isa, E3M4>(task.batch);
  }
  return {};
}

inline float bias_of(const LinearTask& task, int64_t row) {
  return task.bias == nullptr ? 0.0f : load_float(task.bias, task.bias_type, row);
}

template <class Isa>
void linear(const LinearTask& task, int64_t begin, int64_t end) {
  const DotKernel kernel = choose_kernel<Isa>(task);
  float sum[kRowsPerUnit * Isa::kMaxBatch];
  for (int64_t row = begin; row < end; row += kernel.rows) {
    const int valid = static_cast<int>(at_most(kernel.rows, end - row));
    kernel.run(task, row, valid, sum);
    for (int r = 0; r < valid; ++r) {
      const float bias = bias_of(task, row + r);
      for (int m = 0; m < task.batch; ++m) {
        const float value = sum[r * kernel.batch + m] + bias;
        store_float(value, task.out, task.out_type, m * task.features + row + r);
      }
    }
  }
}

// Rows [0, features) of the weight are gates, rows [features, 2 * features) are ups.
template <class Isa>
void gated_linear(const LinearTask& task, int64_t begin, int64_t end) {
  const DotKernel kernel = choose_kernel<Isa>(task);
  float gate[kRowsPerUnit * Isa::kMaxBatch];
  float up[kRowsPerUnit * Isa::kMaxBatch];
  for (int64_t row = begin; row < end; row += kernel.rows) {
    const int valid = static_cast<int>(at_most(kernel.rows, end - row));
    kernel.run(task, row, valid, gate);
    kernel.run(task, task.features + row, valid, up);
    for (int r = 0; r < valid; ++r) {
      const float gate_bias = bias_of(task, row + r);
      const float up_bias = bias_of(task, task.features + row + r);
      for (int m = 0; m < task.batch; ++m) {
        const int i = r * kernel.batch + m;
        const float value = activate(gate[i] + gate_bias, task.activation) * (up[i] + up_bias);
        store_float(value, task.out, task.out_type, m * task.features + row + r);
      }
    }
  }
}

}  // namespace
}  // namespace quantkit
