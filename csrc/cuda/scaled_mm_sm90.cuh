// scaled_mm as a CUTLASS 3.x GEMM, for sm_90 and later: TMA loads, warp-specialized, one template.
// Each scaled_mm_*_sm*.cu holds one instantiation, because each takes a minute to compile.
#pragma once

// CUTLASS captures `this` in lambdas in the way that C++20 deprecates.
#pragma nv_diag_suppress 2908

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "collectives_sm90.cuh"
#include "scaled_mm_problem.h"

namespace quantkit::cuda {

template <class Collectives>
struct ScaledMmTma {
  using Code = typename Collectives::Code;
  using Out = typename Collectives::Out;
  static constexpr bool kSwap = Collectives::kSwapped;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>,
                                                      typename Collectives::Mainloop,
                                                      typename Collectives::Epilogue, void>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Arguments = typename Gemm::Arguments;

  static Arguments arguments(const ScaledMmProblem& problem) {
    const int m = static_cast<int>(problem.m);
    const int n = static_cast<int>(problem.n);
    const int k = static_cast<int>(problem.k);
    const int rows = kSwap ? n : m;
    const int columns = kSwap ? m : n;

    Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = cute::make_shape(rows, columns, k, 1);
    arguments.mainloop.ptr_A = static_cast<const Code*>(kSwap ? problem.weight : problem.a);
    arguments.mainloop.dA = operand_stride(typename Kernel::StrideA{}, rows, k);
    arguments.mainloop.ptr_B = static_cast<const Code*>(kSwap ? problem.a : problem.weight);
    arguments.mainloop.dB = operand_stride(typename Kernel::StrideB{}, columns, k);
    Collectives::set_scales(arguments.mainloop, problem);
    arguments.epilogue.thread = Collectives::Tree::arguments(problem);
    arguments.epilogue.ptr_D = static_cast<Out*>(problem.out);
    arguments.epilogue.dD = cutlass::make_cute_packed_stride(typename Kernel::StrideD{},
                                                             cute::make_shape(rows, columns, 1));
    arguments.hw_info.device_id = problem.device;
    arguments.hw_info.sm_count = problem.multiprocessors;
    if constexpr (requires { arguments.scheduler.max_swizzle_size; }) {
      arguments.scheduler.max_swizzle_size = problem.band;
    }
    return arguments;
  }

  static size_t workspace_size(const ScaledMmProblem& problem) {
    return Gemm::get_workspace_size(arguments(problem));
  }

  static const char* run(const ScaledMmProblem& problem, void* workspace, cudaStream_t stream) {
    const Arguments given = arguments(problem);
    cutlass::Status status = Gemm::can_implement(given);
    if (status == cutlass::Status::kSuccess) {
      Gemm gemm;
      status = gemm.run(given, workspace, stream);
    }
    return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
  }

  static ScaledMmKernel kernel() { return {workspace_size, run}; }
};

}  // namespace quantkit::cuda
