// The two halves of a scaled_mm kernel on CUTLASS 3.x: its main loop and its epilogue, as types.
// scaled_mm_sm90.cuh makes a kernel of them; tests/cuda runs the epilogue half on the host.
//
// CUTLASS computes D[M', N'] = A[M', K] * B[K, N'] with A row-major and B column-major, which is
// how activations [M, K] and weights [N, K] lie in memory. With few rows of activations the
// operands are swapped: A = weight, B = activations, D = transpose of the output, column-major, so
// that the instruction's 64 rows are filled by weights and its narrow side takes the activations.
//
// No source matrix C: out is only written.
#pragma once

// CUTLASS captures `this` in lambdas in the way that C++20 deprecates.
#pragma nv_diag_suppress 2908

#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/util/packed_stride.hpp>

#include "epilogue_sm90.cuh"

namespace quantkit::cuda {

// Strides of a weight [(8, 2, N / 16), K]: see gated_mm_sm90.cuh.
template <class Int>
using TurnsOfEight = cute::Stride<cute::Stride<Int, Int, Int>, cute::_1, Int>;

// The stride of an operand: `rows` rows of K adjacent codes.
template <class Stride>
Stride operand_stride(Stride stride, int rows, int k) {
  return cutlass::make_cute_packed_stride(stride, cute::make_shape(rows, k, 1));
}

template <class Int>
TurnsOfEight<Int> operand_stride(TurnsOfEight<Int>, int rows, int k) {
  const Int half = static_cast<Int>(rows / 2) * k;
  return {{k, half, 8 * static_cast<Int>(k)}, {}, 0};
}

// `Block` is one block's part of the tile: smaller than it where two SMs share a tile (sm_100).
template <class Arch, class Tile, class Cluster, class MainloopSchedule, class EpilogueSchedule,
          bool kSwap, class Block = Tile>
struct ScaledMmCollectives {
  static constexpr bool kSwapped = kSwap;
  using TileShape = Tile;
  using Code = cutlass::float_e4m3_t;
  using Out = cutlass::bfloat16_t;  // or float16, see round_all
  using OutLayout =
      cute::conditional_t<kSwap, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr int kCodeAlignment = 16;  // elements: 16 bytes
  static constexpr int kOutAlignment = 8;

  using Tree = EpilogueTree<Block, kSwap>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, OutLayout, kOutAlignment,
      Out, OutLayout, kOutAlignment, EpilogueSchedule, typename Tree::Callbacks>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, Code, cutlass::layout::RowMajor, kCodeAlignment, Code,
      cutlass::layout::ColumnMajor, kCodeAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;

  // All scales are the epilogue's; see block_scaled_mm_sm90.cuh for others.
  static void set_scales(typename Mainloop::Arguments&, const ScaledMmProblem&) {}
};

}  // namespace quantkit::cuda
