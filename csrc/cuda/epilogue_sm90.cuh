// The epilogue tree of scaled_mm in CUTLASS 3.x, for sm_90 and later:
//
//   Finish(accumulator, weight_scale, a_scale, bias)
//
// Not swapped, the output is [M, N]: weight_scale and bias run along the row (one value a column),
// a_scale along the column (one value a row). Swapped, the GEMM computes the transpose [N, M], and
// the three change roles. a_scale may be one number: its stride is a bool, 1 or 0, set at run time.
// A bias that is null reads as zeros.
#pragma once

// CUTLASS captures `this` in lambdas in the way that C++20 deprecates.
#pragma nv_diag_suppress 2908

#include <cutlass/array.h>
#include <cutlass/bfloat16.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>

#include "epilogue.cuh"
#include "scaled_mm_problem.h"

namespace quantkit::cuda {

// In the form that Sm90Compute wants: a template over the type of its operands, here Array<float,
// n>.
template <class Values>
struct Finish {
  using Arguments = FinishArguments;

  template <int kCount>
  using Floats = cutlass::Array<float, kCount>;

  template <int kCount>
  CUTLASS_DEVICE cutlass::Array<cutlass::bfloat16_t, kCount> operator()(
      const Floats<kCount>& sums, const Floats<kCount>& weight_scales,
      const Floats<kCount>& a_scales, const Floats<kCount>& biases,
      const FinishArguments& arguments) const {
    uint32_t pairs[kCount / 2];
    finish<kCount>(sums.data(), weight_scales.data(), a_scales.data(), biases.data(), arguments,
                   pairs);
    cutlass::Array<cutlass::bfloat16_t, kCount> out;
    uint32_t* words = reinterpret_cast<uint32_t*>(out.data());
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / 2; ++i) words[i] = pairs[i];
    return out;
  }
};

template <class Tile, bool kSwap>
struct EpilogueTree {
  template <class Stride>
  using AlongRow = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, Stride>;
  template <class Stride>
  using AlongColumn = cutlass::epilogue::fusion::Sm90ColBroadcast<0, Tile, float, float, Stride>;

  using PerChannel =
      cute::conditional_t<kSwap, AlongColumn<cute::Stride<cute::_1, cute::_0, cute::_0>>,
                          AlongRow<cute::Stride<cute::_0, cute::_1, cute::_0>>>;
  using PerToken = cute::conditional_t<kSwap, AlongRow<cute::Stride<cute::_0, bool, cute::_0>>,
                                       AlongColumn<cute::Stride<bool, cute::_0, cute::_0>>>;

  using Callbacks = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<Finish, cutlass::bfloat16_t, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90AccFetch, PerChannel, PerToken, PerChannel>;
  using Arguments = typename Callbacks::Arguments;

  static typename PerToken::Arguments per_token(const ScaledMmProblem& problem) {
    typename PerToken::Arguments arguments;
    if constexpr (kSwap) {
      arguments.ptr_row = problem.a_scale;
      cute::get<1>(arguments.dRow) = problem.a_scale_per_row;
    } else {
      arguments.ptr_col = problem.a_scale;
      cute::get<0>(arguments.dCol) = problem.a_scale_per_row;
    }
    return arguments;
  }

  static typename PerChannel::Arguments per_channel(const float* values) {
    typename PerChannel::Arguments arguments;
    if constexpr (kSwap) {
      arguments.ptr_col = values;
    } else {
      arguments.ptr_row = values;
    }
    return arguments;
  }

  static Arguments arguments(const ScaledMmProblem& problem) {
    return {{},
            per_channel(problem.weight_scale),
            per_token(problem),
            per_channel(problem.bias),
            {problem.activation, problem.half_out}};
  }
};

}  // namespace quantkit::cuda
