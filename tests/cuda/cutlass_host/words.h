// CUDA's built-ins that CUTLASS's device code names, for g++; included before everything else. The
// epilogues call none of them: they only let the headers compile.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdlib>

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

inline void __syncthreads() { std::abort(); }
inline void __syncwarp(unsigned = 0) { std::abort(); }
inline void __threadfence() { std::abort(); }
inline unsigned __byte_perm(unsigned, unsigned, unsigned) { std::abort(); }
inline int __dp4a(int, int, int) { std::abort(); }
template <class T>
T __shfl_sync(unsigned, T, int, int = 32) {
  std::abort();
}
template <class T>
T __shfl_xor_sync(unsigned, T, int, int = 32) {
  std::abort();
}
template <class T>
T __shfl_up_sync(unsigned, T, unsigned, int = 32) {
  std::abort();
}
template <class T>
T __shfl_down_sync(unsigned, T, unsigned, int = 32) {
  std::abort();
}
inline __half2 __hfma2(__half2, __half2, __half2) { std::abort(); }
