#include "outliers.h"

#include "float16.h"

namespace quantkit {
namespace {

template <class T>
void gather(const PackTask& x, const OutlierMatrix& outliers, int64_t first, int64_t last,
            float* out) {
  out += first * outliers.count;
  for (int64_t row = first; row < last; ++row) {
    const T* source = static_cast<const T*>(x.x) + row * x.columns;
    for (int64_t i = 0; i < outliers.count; ++i) *out++ = to_float(source[outliers.columns[i]]);
  }
}

}  // namespace

void gather_outliers(const PackTask& x, const OutlierMatrix& outliers, int64_t first, int64_t last,
                     float* out) {
  switch (x.type) {
    case FloatType::kFloat32: return gather<float>(x, outliers, first, last, out);
    case FloatType::kBFloat16: return gather<BFloat16>(x, outliers, first, last, out);
    case FloatType::kFloat16: return gather<Half>(x, outliers, first, last, out);
  }
}

LinearTask part_of(const LinearTask& task, int64_t row, int64_t rows, float* sums) {
  LinearTask part = task;
  WeightMatrix& weight = part.weight;
  weight.codes += row * weight.columns * bytes_of(weight.format);
  if (weight.scale != nullptr) weight.scale += row * weight.groups;
  weight.rows = rows;
  if (task.bias != nullptr) {
    part.bias = static_cast<const char*>(task.bias) + row * bytes_of(task.bias_type);
  }
  part.out = sums;
  part.out_type = FloatType::kFloat32;
  part.features = rows;
  part.outliers = {};
  return part;
}

}  // namespace quantkit
