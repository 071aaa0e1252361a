// Weight codes to floats: one product in float32, rounded once.
// Part of kernel_template.h; include only that.
#pragma once

#include "kernel_common.h"

namespace quantkit {
namespace {

template <class Isa, class Format, class T>
void dequantize_rows(const DequantizeTask& task, int64_t begin, int64_t end) {
  const WeightMatrix& weight = task.weight;
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* codes = weight.codes + row * weight.columns;
    T* out = static_cast<T*>(task.out) + row * weight.columns;
    for (int64_t group = 0; group < weight.groups; ++group) {
      const float scale = weight.scale[row * weight.groups + group];
      int64_t column = group * weight.group_size;
      const int64_t stop = at_most(column + weight.group_size, weight.columns);
      for (; column + Isa::kColumns <= stop; column += Isa::kColumns) {
        Isa::template dequantize<Format>(codes + column, scale, out + column);
      }
      for (; column < stop; ++column) {
        from_float(kDecodeTable<Format>.value[codes[column]] * scale, out + column);
      }
    }
  }
}

template <class Isa, class Format>
void dequantize_format(const DequantizeTask& task, int64_t begin, int64_t end) {
  switch (task.out_type) {
    case FloatType::kFloat32: return dequantize_rows<Isa, Format, float>(task, begin, end);
    case FloatType::kBFloat16: return dequantize_rows<Isa, Format, BFloat16>(task, begin, end);
    case FloatType::kFloat16: return dequantize_rows<Isa, Format, Half>(task, begin, end);
  }
}

template <class Isa>
void dequantize(const DequantizeTask& task, int64_t begin, int64_t end) {
  switch (task.weight.format) {
    case WeightFormat::kE4M3: return dequantize_format<Isa, E4M3>(task, begin, end);
    case WeightFormat::kE5M2: return dequantize_format<Isa, E5M2>(task, begin, end);
    case WeightFormat::kE3M4: return dequantize_format<Isa, E3M4>(task, begin, end);
    default: return;  // floats need no decoding; the op refuses them
  }
}

}  // namespace
}  // namespace quantkit
