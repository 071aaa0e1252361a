// Scratch memory for kernels.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace quantkit {

struct Free {
  void operator()(float* pointer) const { std::free(pointer); }
};
using Buffer = std::unique_ptr<float, Free>;

// `count` floats, uninitialized, aligned to 64 bytes.
inline Buffer aligned_buffer(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
  void* pointer = std::aligned_alloc(64, bytes == 0 ? 64 : bytes);
  if (pointer == nullptr) throw std::bad_alloc();
  return Buffer(static_cast<float*>(pointer));
}

}  // namespace quantkit
