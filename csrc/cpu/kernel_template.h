// The kernels, written once over an instruction set `Isa` and compiled once per instruction set.
//
// Include this only from kernels_<isa>.cpp, after that file's target pragma: everything here is in
// an unnamed namespace, and calls no standard library template, so that no code built for a wide
// instruction set can be merged by the linker into a narrow one.
//
// Isa provides
//   kLanes, kColumns      floats in a vector; weights decoded at a time (kColumns = parts * kLanes)
//   kMaxBatch             most rows of x whose sums fit in registers
//   weight_rows(batch)    weight rows taken at a time with that many rows of x; divides
//   kRowsPerUnit Lanes                 a vector of floats: load and store (aligned), from and to
//   (any float type,
//                         any alignment), arithmetic, exp, sum, highest, sums
//   Codes<Format>         kColumns decoded weights: load, load_some, part(i) in float32 times
//                         1 / kFactor; Peak to notice codes from kFirstSpecial on
//   Cells<T>              kColumns floats of type T, in the column order of Codes: load, part(i)
//   slot(column)          where in part(0), part(1).. a column is
//   dequantize<Format>    kColumns codes to values in natural order
//
// Order of summation. For one output the sum runs over groups of columns, chunks of kColumns and
// parts, into one vector accumulator with fma; the lanes are added last. Batch and blocking appear
// nowhere in that order: row i of the result is the same bits whatever other rows are computed.
#pragma once

#include "kernel_attention.h"
#include "kernel_choice.h"
#include "kernel_dequantize.h"
#include "kernel_gram.h"
#include "kernel_linear.h"
#include "kernel_outliers.h"
#include "kernel_pack.h"
#include "kernel_rounding.h"
#include "kernel_rows.h"

namespace quantkit {
namespace {

template <class Isa>
constexpr KernelSet kKernels{
    .enter = nullptr,
    .leave = nullptr,
    .tiles = nullptr,
    .pass_rows = pass_rows<Isa>,
    .packed_size = packed_size<Isa>,
    .pack = pack<Isa>,
    .linear = linear<Isa, choose_kernel<Isa>>,
    .gated_linear = gated_linear<Isa, choose_kernel<Isa>>,
    .add_outliers = add_outliers<Isa>,
    .add_gated_outliers = add_gated_outliers<Isa>,
    .dequantize = dequantize<Isa>,
    .rms_norm = rms_norm<Isa>,
    .gate = gate<Isa>,
    .rotary = rotary<Isa>,
    .append = append<Isa>,
    .choose = choose_tokens,
    .draw = draw_tokens<Isa>,
    .round_rows = round_rows<Isa>,
    .scale_errors = scale_errors<Isa>,
    .feed_back = feed_back<Isa>,
    .gram = &kGramKernels<Isa, FloatCells<Isa>>,
    .tile_rows = attention_tile_rows,
    .query_size = attention_query_size<Isa>,
    .partial_size = attention_partial_size<Isa>,
    .scratch_size = attention_scratch_size<Isa>,
    .pack_queries = pack_queries<Isa>,
    .attend = attend<Isa>,
    .fold = attention_fold<Isa>,
    .finish = attention_finish<Isa>,
};

}  // namespace
}  // namespace quantkit
