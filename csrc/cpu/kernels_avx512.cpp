// AVX-512 (F, BW, VL, DQ) kernels, with float32 accumulation everywhere.
//
// Every header comes before the target pragma: inline code of the standard library must stay built
// for the baseline, because the linker keeps one copy of it for the whole program.

#include <cstdint>
#include <cstring>

#include "float16.h"
#include "formats.h"
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "kernel_template.h"
// After the template that it fills.
#include "isa_avx512.h"

namespace quantkit {

const KernelSet* avx512_kernels() { return &kKernels<Avx512>; }

}  // namespace quantkit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace quantkit {
const KernelSet* avx512_kernels() { return nullptr; }
}  // namespace quantkit

#endif
