// AVX-512 BF16: the AVX-512 kernels, but for second moments, where pairs of bfloat16 numbers are
// multiplied at once. The products and sums are those of float32, except that the processor takes
// subnormal numbers for zeros.

#include <cstdint>
#include <cstring>

#include "float16.h"
#include "formats.h"
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 10)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "kernel_template.h"
// After the template that it fills.
#include "isa_avx512.h"

namespace quantkit {
namespace {

// Two tokens a cell: a lane adds the products of both.
struct PairCells {
  using Lanes = Avx512::Lanes;
  static constexpr int64_t kTokens = 2;

  static Lanes add_products(Lanes a, Lanes b, Lanes sums) {
    return {_mm512_dpbf16_ps(sums.v, reinterpret_cast<__m512bh>(a.v),
                             reinterpret_cast<__m512bh>(b.v))};
  }
};

KernelSet with_pairs(KernelSet set) {
  set.gram = &kGramKernels<Avx512, PairCells>;
  return set;
}

}  // namespace

const KernelSet* avx512bf16_kernels() {
  static const KernelSet set = with_pairs(*avx512_kernels());
  return &set;
}

}  // namespace quantkit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace quantkit {
const KernelSet* avx512bf16_kernels() { return nullptr; }
}  // namespace quantkit

#endif
