// Packed x: for each group of columns, for each chunk of kColumns in it, the chunk of every row.
// Chunks at the end of a group are filled with zeros, so kernels need no tail for x.
// Part of kernel_template.h; include only that.
#pragma once

#include "kernel_common.h"

namespace quantkit {
namespace {

template <class Isa>
int64_t packed_size(const PackTask& task) {
  int64_t chunks = 0;
  for (int64_t begin = 0; begin < task.columns; begin += task.group_size) {
    chunks += ceil_div(at_most(task.group_size, task.columns - begin), Isa::kColumns);
  }
  return chunks * Isa::kColumns * padded_batch(task.batch);
}

template <class Isa, class T>
inline void pack_columns(const T* x, int64_t count, float* packed) {
  T padding[Isa::kColumns];
  if (count < Isa::kColumns) {
    __builtin_memset(padding, 0, sizeof(padding));
    if (count > 0) __builtin_memcpy(padding, x, count * sizeof(T));
    x = padding;
  }
  const auto cells = Isa::template Cells<T>::load(x);
  QK_UNROLL for (int part = 0; part < Isa::kColumns / Isa::kLanes; ++part) {
    cells.part(part).store(packed + part * Isa::kLanes);
  }
}

template <class Isa, class T>
void pack_typed(const PackTask& task, float* packed) {
  const T* x = static_cast<const T*>(task.x);
  const int padded = padded_batch(task.batch);
  for (int64_t begin = 0; begin < task.columns; begin += task.group_size) {
    const int64_t end = at_most(begin + task.group_size, task.columns);
    for (int64_t column = begin; column < end; column += Isa::kColumns) {
      for (int m = 0; m < padded; ++m, packed += Isa::kColumns) {
        const int64_t count = m < task.batch ? at_most(end - column, Isa::kColumns) : 0;
        pack_columns<Isa>(x + m * task.columns + column, count, packed);
      }
    }
  }
}

template <class Isa>
void pack(const PackTask& task, float* packed) {
  switch (task.type) {
    case FloatType::kFloat32: return pack_typed<Isa, float>(task, packed);
    case FloatType::kBFloat16: return pack_typed<Isa, BFloat16>(task, packed);
    case FloatType::kFloat16: return pack_typed<Isa, Half>(task, packed);
  }
}

}  // namespace
}  // namespace quantkit
