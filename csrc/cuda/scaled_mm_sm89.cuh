// scaled_mm as a CUTLASS 2.x GEMM, for sm_89: cp.async pipeline, mma.m16n8k32, and the epilogue of
// epilogue.cuh in a tree of 2.x visitors. Blocks are assigned to tiles plainly, without stream-K,
// whose sums depend on the order in which blocks finish.
//
// OpMultiplyAddFastAccum adds up in the instruction's accumulator: staged float32 sums spill.
#pragma once

// CUTLASS captures `this` in lambdas in the way that C++20 deprecates.
#pragma nv_diag_suppress 2908

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>

#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>  // needs what is above

#include "epilogue.cuh"
#include "scaled_mm_problem.h"

namespace quantkit::cuda {

// The last node but one: `finish` on what its four children fetched.
struct FinishVisitor {
  using Arguments = FinishArguments;
  using Params = Arguments;
  struct SharedStorage {};

  template <class Shape>
  static constexpr Params to_underlying_arguments(const Shape&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class Shape>
  static size_t get_workspace_size(const Shape&, const Arguments&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE FinishVisitor() {}
  CUTLASS_HOST_DEVICE FinishVisitor(const Params& params, const SharedStorage&) : params(&params) {}

  const Params* params = nullptr;

  struct Callbacks : cutlass::epilogue::threadblock::detail::EmptyCallbacks {
    const Params* params = nullptr;

    template <int kCount>
    using Floats = cutlass::Array<float, kCount>;

    template <int kCount>
    CUTLASS_DEVICE cutlass::Array<cutlass::bfloat16_t, kCount> visit(
        int, int, int, int, const Floats<kCount>&, const Floats<kCount>& sums,
        const Floats<kCount>& weight_scales, const Floats<kCount>& a_scales,
        const Floats<kCount>& biases) {
      uint32_t pairs[kCount / 2];
      finish<kCount>(sums.data(), weight_scales.data(), a_scales.data(), biases.data(), *params,
                     pairs);
      cutlass::Array<cutlass::bfloat16_t, kCount> out;
      uint32_t* words = reinterpret_cast<uint32_t*>(out.data());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount / 2; ++i) words[i] = pairs[i];
      return out;
    }
  };

  template <class Shape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord, int, Shape) {
    Callbacks callbacks;
    callbacks.params = params;
    return callbacks;
  }
};

template <class Tile, class WarpTile, int kStages>
struct ScaledMmSm89 {
  using Code = cutlass::float_e4m3_t;
  using Out = cutlass::bfloat16_t;  // or float16, see round_all
  static constexpr int kCodeAlignment = 16;
  static constexpr int kOutAlignment = 8;
  static constexpr int kEpilogueStages = 1;

  using ThreadMap =
      cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, WarpTile, Out, kOutAlignment,
                                                             kEpilogueStages>;
  using PerChannel = cutlass::epilogue::threadblock::VisitorRowBroadcast<
      ThreadMap, float, cute::Stride<cute::_0, cute::_1, cute::_0>>;
  using PerToken = cutlass::epilogue::threadblock::VisitorColBroadcast<
      ThreadMap, float, cute::Stride<int64_t, cute::_0, cute::_0>>;  // stride 1 or 0
  using Store =
      cutlass::epilogue::threadblock::VisitorAuxStore<ThreadMap, Out,
                                                      cutlass::FloatRoundStyle::round_to_nearest,
                                                      cute::Stride<int64_t, cute::_1, cute::_0>>;
  using Finished =
      cutlass::epilogue::threadblock::Sm80EVT<FinishVisitor,
                                              cutlass::epilogue::threadblock::VisitorAccFetch,
                                              PerChannel, PerToken, PerChannel>;
  using Tree = cutlass::epilogue::threadblock::Sm80EVT<Store, Finished>;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      Code, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kCodeAlignment, Code,
      cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, kCodeAlignment, Out,
      cutlass::layout::RowMajor, kOutAlignment, float, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm89, Tile, WarpTile, cutlass::gemm::GemmShape<16, 8, 32>, Tree,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>, kStages,
      cutlass::arch::OpMultiplyAddFastAccum, kEpilogueStages>::GemmKernel;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Arguments = typename Gemm::Arguments;

  static typename Tree::Arguments tree_arguments(const ScaledMmProblem& problem) {
    typename PerToken::Arguments per_token;
    per_token.ptr_col = problem.a_scale;
    cute::get<0>(per_token.dCol) = problem.a_scale_per_row ? 1 : 0;
    typename PerChannel::Arguments weight_scale;
    weight_scale.ptr_row = problem.weight_scale;
    typename PerChannel::Arguments bias;
    bias.ptr_row = problem.bias;
    typename Store::Arguments store;
    store.ptr_aux = static_cast<Out*>(problem.out);
    cute::get<0>(store.dAux) = problem.n;
    const FinishArguments finish{problem.activation, problem.half_out};
    return {{{}, weight_scale, per_token, bias, finish}, store};
  }

  static Arguments arguments(const ScaledMmProblem& problem) {
    const cutlass::gemm::GemmCoord shape(static_cast<int>(problem.m), static_cast<int>(problem.n),
                                         static_cast<int>(problem.k));
    return Arguments(cutlass::gemm::GemmUniversalMode::kGemm, shape, 1, tree_arguments(problem),
                     problem.a, problem.weight, nullptr, nullptr, 0, 0, 0, 0, problem.k, problem.k,
                     problem.n, problem.n);
  }

  static size_t workspace_size(const ScaledMmProblem& problem) {
    return Gemm::get_workspace_size(arguments(problem));
  }

  static const char* run(const ScaledMmProblem& problem, void* workspace, cudaStream_t stream) {
    const Arguments given = arguments(problem);
    cutlass::Status status = Gemm::can_implement(given);
    if (status == cutlass::Status::kSuccess) {
      Gemm gemm;
      status = gemm(given, workspace, stream);
    }
    return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
  }

  static ScaledMmKernel kernel() { return {workspace_size, run}; }
};

}  // namespace quantkit::cuda
