// Which kernel of weight_linear.cuh serves a call, and with how many blocks. Neither torch nor the
// CUDA runtime, so that the emulator takes the same decisions: `launch(kernel, grid, threads,
// call)` does the rest.
#pragma once

#include "weight_linear.cuh"

namespace quantkit::cuda {

// Up to so many output features, blocks of 16 warps fill a GPU: two on each of 132 multiprocessors.
constexpr int64_t kNarrow = 2 * 132 * kTileRows;

inline bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// Whether weight_linear can do it; weight_linear_any does what it cannot.
inline bool fits_weight_linear(const LinearCall& call) {
  const bool power_of_two = (call.group_size & (call.group_size - 1)) == 0;
  const bool groups_fit =
      call.groups == 1 || (power_of_two && call.group_size >= kChunk && call.group_size < 1 << 30);
  return call.columns > 0 && call.columns % kLaneCodes == 0 && call.columns < 1 << 26 &&
         groups_fit && call.features <= int64_t{65535} * kTileRows && is_aligned(call.x) &&
         is_aligned(call.codes);
}

template <class Format, class T, class Shape, bool kGated, bool kGrouped, class Launch>
void launch_shape(const LinearCall& call, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>((call.tokens + Shape::kTokens - 1) / Shape::kTokens),
                  static_cast<unsigned>((call.features + Shape::kFeatures - 1) / Shape::kFeatures));
  launch(weight_linear<Format, T, Shape, kGated, kGrouped>, grid, Shape::kThreads, call);
}

// The shape for up to 8 tokens.
template <int kSplits, bool kGated, bool kGrouped>
using FewTokens = LinearShape<1, 1, kSplits, kSplits == 16 || (kGated && kGrouped) ? 2 : 4, 2,
                              kSplits == 4 ? 4 : kSplits == 16 || kGrouped ? 2 : 3>;

// kSplits, the parts that K is split into, is that of the layer: a token's result must not depend on
// how many there are. More rows a block mean fewer readers of x, whose bytes weigh 2 * tokens / rows
// of the weights'; but few blocks cannot fill a GPU. Gated features have two rows.
// Chosen by measurement on an H200, at the sizes of Llama 3 8B.
template <class Format, class T, int kSplits, bool kGated, bool kGrouped, class Launch>
void launch_by_tokens(const LinearCall& call, const Launch& launch) {
  constexpr bool kWide = kSplits == 16;  // with the registers of 16 warps
  constexpr int kRowTiles = kGated || kWide ? 1 : 2;
  if (call.tokens <= 8) {
    launch_shape<Format, T, FewTokens<kSplits, kGated, kGrouped>, kGated, kGrouped>(call, launch);
  } else if (call.tokens <= 16) {
    constexpr int kBlocks = kWide ? 1 : kSplits == 4 ? 4 : 2;
    using Shape = LinearShape<kRowTiles, 2, kSplits, 2, kGrouped || kWide ? 1 : 2, kBlocks>;
    launch_shape<Format, T, Shape, kGated, kGrouped>(call, launch);
  } else {
    constexpr int kBlocks = kSplits == 4 ? 2 : 1;
    using Shape = LinearShape<kRowTiles, 4, kSplits, kWide ? 2 : 4, 1, kBlocks>;
    launch_shape<Format, T, Shape, kGated, kGrouped>(call, launch);
  }
}

template <class Format, class T, bool kGated, bool kGrouped, class Launch>
void launch_by_width(const LinearCall& call, const Launch& launch) {
  if constexpr (kGated) {
    launch_by_tokens<Format, T, 4, true, kGrouped>(call, launch);
  } else if constexpr (kGrouped) {
    launch_by_tokens<Format, T, 8, false, true>(call, launch);
  } else if (call.features <= kNarrow) {
    launch_by_tokens<Format, T, 16, false, false>(call, launch);
  } else {
    launch_by_tokens<Format, T, 8, false, false>(call, launch);
  }
}

template <class Format, class T, bool kGated, class Launch>
void launch_by_shape(const LinearCall& call, const Launch& launch) {
  if (!fits_weight_linear(call)) {
    const int64_t blocks = (call.features + 3) / 4;  // of 4 warps, or of fewer that do more
    const dim3 grid(static_cast<unsigned>(call.tokens),
                    static_cast<unsigned>(blocks < 65535 ? blocks : 65535));
    launch(weight_linear_any<Format, T, kGated>, grid, 4 * kWarp, call);
  } else if (call.groups > 1) {
    launch_by_width<Format, T, kGated, true>(call, launch);
  } else {
    launch_by_width<Format, T, kGated, false>(call, launch);
  }
}

template <class Format, class T, class Launch>
void dispatch_weight_linear(const LinearCall& call, bool gated, const Launch& launch) {
  if (call.tokens == 0 || call.features == 0) return;
  if (gated) {
    launch_by_shape<Format, T, true>(call, launch);
  } else {
    launch_by_shape<Format, T, false>(call, launch);
  }
}

}  // namespace quantkit::cuda
