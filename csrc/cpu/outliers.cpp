#include "outliers.h"

#include <algorithm>

#include "float16.h"

namespace quantkit {
namespace {

// Rows that a thread takes at a time.
constexpr int64_t kRowsAtOnce = 16;

template <class T>
void gather(const T* x, int64_t rows, int64_t columns, const OutlierMatrix& outliers, float* out) {
  for (int64_t row = 0; row < rows; ++row, x += columns) {
    for (int64_t i = 0; i < outliers.count; ++i) *out++ = to_float(x[outliers.columns[i]]);
  }
}

}  // namespace

Buffer gather_outliers(const Rows& x, int64_t columns, const OutlierMatrix& outliers, Team& team) {
  if (outliers.count == 0) return nullptr;
  Buffer gathered = aligned_buffer(x.batch * outliers.count);
  team.for_each((x.batch + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t unit, int64_t) {
    const int64_t first = unit * kRowsAtOnce;
    const int64_t rows = std::min(kRowsAtOnce, x.batch - first);
    const auto* data = static_cast<const char*>(x.data) + first * columns * bytes_of(x.type);
    float* out = gathered.get() + first * outliers.count;
    switch (x.type) {
      case FloatType::kFloat32:
        return gather(reinterpret_cast<const float*>(data), rows, columns, outliers, out);
      case FloatType::kBFloat16:
        return gather(reinterpret_cast<const BFloat16*>(data), rows, columns, outliers, out);
      case FloatType::kFloat16:
        return gather(reinterpret_cast<const Half*>(data), rows, columns, outliers, out);
    }
  });
  return gathered;
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
