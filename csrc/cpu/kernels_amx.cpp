// AMX: the AVX-512 FP16 kernels, but for bfloat16 x, where many rows meet weights, or queries meet
// keys and values, in the matrix unit. See amx_tiles.h for its arithmetic.

#include <cstdint>
#include <cstring>

#include "float16.h"
#include "formats.h"
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                             \
    __attribute__((target("amx-tile,amx-bf16,avx512vbmi,avx512bf16,avx512f,avx512bw,"     \
                          "avx512vl,avx512dq,avx2,fma,f16c"))),                           \
    apply_to = function)
#else
#pragma GCC target( \
    "amx-tile,amx-bf16,avx512vbmi,avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "kernel_template.h"
// After the template that it fills.
#include "bf16_pairs.h"
#include "isa_avx512.h"
// After all three.
#include "amx_tiles.h"
// After the tiles.
#include "amx_linear.h"
// After the chunks of linear layers.
#include "amx_attention_tile.h"
// After the operands.
#include "amx_attention_weights.h"
// After the weights.
#include "amx_attention.h"

namespace quantkit {
namespace {

KernelSet with_tiles(KernelSet set) {
  set.enter = enter_tiles;
  set.leave = leave_tiles;
  set.tiles = &kTileKernels;
  set.tile_rows = amx_tile_rows;
  set.query_size = amx_query_size;
  set.scratch_size = amx_attention_scratch;
  set.pack_queries = amx_pack_queries;
  set.attend = amx_attend;
  set.finish = amx_finish;
  return set;
}

}  // namespace

const KernelSet* amx_kernels() {
  static const KernelSet set = with_tiles(*avx512fp16_kernels());
  return &set;
}

}  // namespace quantkit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace quantkit {
const KernelSet* amx_kernels() { return nullptr; }
}  // namespace quantkit

#endif
