// What outlier columns add to the sums of a linear layer, and the one rounding after that. Their
// weights lie with neighbouring features side by side, so a column is one fma a vector of features.
// Columns are added in ascending order, whatever the batch.
// Part of kernel_template.h; include only that.
#pragma once

#include "kernel_linear.h"

namespace quantkit {
namespace {

// Up to kLanes features, from weight row `row` on, of kM rows of x from `m` on; `sums` holds what
// the other columns gave, `stride` floats from one row of x to the next.
template <class Isa, int kM>
struct OutlierSums {
  using Lanes = typename Isa::Lanes;
  Lanes value[kM];

  static inline __attribute__((always_inline)) OutlierSums of(const LinearTask& task,
                                                              const float* sums, int64_t stride,
                                                              int64_t m, int64_t row,
                                                              int64_t count) {
    const OutlierMatrix& outliers = task.outliers;
    const auto* w = reinterpret_cast<const BFloat16*>(outliers.weight) + row;
    const float* x = task.outlier_x + m * outliers.count;
    OutlierSums out;
    QK_UNROLL for (int i = 0; i < kM; ++i) {
      out.value[i] = load_lanes<Lanes, Isa::kLanes>(sums + (m + i) * stride, count);
    }
    for (int64_t j = 0; j < outliers.count; ++j, w += task.weight.rows) {
      const Lanes weight = load_lanes<Lanes, Isa::kLanes>(w, count);
      QK_UNROLL for (int i = 0; i < kM; ++i) {
        const Lanes factor = Lanes::broadcast(x[i * outliers.count + j]);
        out.value[i] = Lanes::fma(weight, factor, out.value[i]);
      }
    }
    return out;
  }
};

template <class Isa, int kM>
void add_outliers_to(const LinearTask& task, const float* sums, int64_t m, int64_t begin,
                     int64_t end) {
  const int64_t width = end - begin;
  for (int64_t at = 0; at < width; at += Isa::kLanes) {
    const int64_t count = at_most(Isa::kLanes, width - at);
    const auto total = OutlierSums<Isa, kM>::of(task, sums + at, width, m, begin + at, count);
    for (int i = 0; i < kM; ++i) {
      store_result<Isa>(task, total.value[i], (m + i) * task.features + begin + at, count);
    }
  }
}

template <class Isa, int kM>
void add_gated_outliers_to(const LinearTask& task, const float* gates, const float* ups, int64_t m,
                           int64_t begin, int64_t end) {
  using Sums = OutlierSums<Isa, kM>;
  const int64_t width = end - begin;
  for (int64_t at = 0; at < width; at += Isa::kLanes) {
    const int64_t count = at_most(Isa::kLanes, width - at);
    const int64_t row = begin + at;
    const Sums gate = Sums::of(task, gates + at, width, m, row, count);
    const Sums up = Sums::of(task, ups + at, width, m, task.features + row, count);
    for (int i = 0; i < kM; ++i) {
      const auto value =
          Isa::Lanes::mul(activate_lanes<Isa>(gate.value[i], task.activation), up.value[i]);
      store_result<Isa>(task, value, (m + i) * task.features + row, count);
    }
  }
}

template <class Isa>
void add_outliers(const LinearTask& task, const float* sums, int64_t begin, int64_t end) {
  int64_t m = 0;
  for (; m + 4 <= task.batch; m += 4) add_outliers_to<Isa, 4>(task, sums, m, begin, end);
  for (; m < task.batch; ++m) add_outliers_to<Isa, 1>(task, sums, m, begin, end);
}

template <class Isa>
void add_gated_outliers(const LinearTask& task, const float* gates, const float* ups, int64_t begin,
                        int64_t end) {
  int64_t m = 0;
  for (; m + 4 <= task.batch; m += 4) {
    add_gated_outliers_to<Isa, 4>(task, gates, ups, m, begin, end);
  }
  for (; m < task.batch; ++m) add_gated_outliers_to<Isa, 1>(task, gates, ups, m, begin, end);
}

}  // namespace
}  // namespace quantkit
