// scaled_mm with a scale for each block of 128 x 128 weights and each 128 columns of a row of a, on
// sm_90a. Scales that change along K are no epilogue: CUTLASS's main loop for them adds the tensor
// core's sums, every 128 columns of K, times both scales to float32 registers. The epilogue is that
// of scaled_mm, its scales being 1.
#pragma once

// CUTLASS captures `this` in lambdas in the way that C++20 deprecates.
#pragma nv_diag_suppress 2908

#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

template <class Tile>
struct BlockEpilogueTree : EpilogueTree<Tile, false> {
  using Plain = EpilogueTree<Tile, false>;

  static typename Plain::Arguments arguments(const ScaledMmProblem& problem) {
    ScaledMmProblem unscaled = problem;
    unscaled.a_scale = nullptr;
    unscaled.weight_scale = nullptr;
    unscaled.a_scale_per_row = false;
    typename Plain::Arguments arguments = Plain::arguments(unscaled);
    cute::get<1>(arguments).null_default = 1.0f;
    cute::get<2>(arguments).null_default = 1.0f;
    return arguments;
  }
};

// Scales in memory: of weights as a checkpoint has them, [N / 128, K / 128], K adjacent; of a
// [K / 128, M rounded up to 4], M adjacent, because TMA loads them, whole 16 bytes at a time.
template <class Tile, class Cluster, class MainloopSchedule, class EpilogueSchedule>
struct BlockScaledCollectives {
  using Plain = ScaledMmCollectives<cutlass::arch::Sm90, Tile, Cluster,
                                    cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                                    EpilogueSchedule, false>;
  static constexpr bool kSwapped = false;
  using TileShape = Tile;
  using Code = typename Plain::Code;
  using Out = typename Plain::Out;
  using Tree = BlockEpilogueTree<Tile>;
  using Epilogue = typename Plain::Epilogue;

  using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 128, 128, cute::GMMA::Major::MN,
                                                           cute::GMMA::Major::K>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Code,
      cute::tuple<cutlass::layout::RowMajor, decltype(Scales::deduce_layoutSFA())>,
      Plain::kCodeAlignment, Code,
      cute::tuple<cutlass::layout::ColumnMajor, decltype(Scales::deduce_layoutSFB())>,
      Plain::kCodeAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;

  static void set_scales(typename Mainloop::Arguments& mainloop, const ScaledMmProblem& problem) {
    const auto shape =
        cute::make_shape(static_cast<int>((problem.m + 3) / 4 * 4), static_cast<int>(problem.n),
                         static_cast<int>(problem.k), 1);
    mainloop.ptr_SFA = problem.a_scale;
    mainloop.layout_SFA = Scales::tile_atom_to_shape_SFA(shape);
    mainloop.ptr_SFB = problem.weight_scale;
    mainloop.layout_SFB = Scales::tile_atom_to_shape_SFB(shape);
  }
};

}  // namespace quantkit::cuda
