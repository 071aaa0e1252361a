// Loads of what an earlier kernel wrote and this one reads once: not kept in L1. With them L2
// fetches 256 adjacent bytes, of which another block is about to read the rest: heads of one key
// lie side by side, and memory is slower the smaller the pieces that are asked of it. PTX that
// intrinsics.cuh could hold; apart from it because few kernels need it.
#pragma once

#include "intrinsics.cuh"

namespace quantkit::cuda {

#ifdef QK_EMULATOR

inline Word4 load_stream16(const void* address) { return load_aligned<Word4>(address); }
inline Word2 load_stream8(const void* address) { return load_aligned<Word2>(address); }
inline uint32_t load_stream4(const void* address) { return load_aligned<uint32_t>(address); }

#else

QK_DEVICE Word4 load_stream16(const void* address) {
  Word4 w;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
               : "l"(address));
  return w;
}
QK_DEVICE Word2 load_stream8(const void* address) {
  Word2 w;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];"
               : "=r"(w.word[0]), "=r"(w.word[1])
               : "l"(address));
  return w;
}
QK_DEVICE uint32_t load_stream4(const void* address) {
  uint32_t w;
  asm volatile("ld.global.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(w) : "l"(address));
  return w;
}

#endif

}  // namespace quantkit::cuda
