// Runs the epilogue trees of the sm_90 scaled_mm kernels on the CPU, thread by thread, with
// CUTLASS's own partitions, and compares every element of a block of output with the formula.
// Without nvcc, CUTLASS's device functions are plain functions: the code that is run is the
// kernels' own, up to the copy to shared memory and the TMA store, which only move the block.
//
// Prints one line a tile and case, exits with 1 where an element is wrong or missing.

#include <cstdio>
#include <vector>

#include "blocks.h"

namespace {

using namespace cute;
using quantkit::cuda::ScaledMmProblem;

float sum_at(int m, int n) { return 0.25f * static_cast<float>((m * 37 + n * 11) % 201 - 100); }

struct Case {
  int m, n;  // of the whole output
  bool per_row, bias, half;
  int activation;
};

uint16_t expected(const ScaledMmProblem& p, int m, int n) {
  float values[2] = {quantkit::cuda::scale_and_shift(sum_at(m, n), p.weight_scale[n],
                                                     p.a_scale[p.a_scale_per_row ? m : 0],
                                                     p.bias == nullptr ? 0.0f : p.bias[n]),
                     0.0f};
  uint32_t pairs[1];
  quantkit::cuda::activate_all(p.activation, values);
  quantkit::cuda::round_all(p.half_out, values, pairs);
  return static_cast<uint16_t>(pairs[0]);
}

template <class Gemm, bool kSwap>
bool run_case(const char* name, const Case& c) {
  std::vector<float> a_scale(c.per_row ? c.m : 1), weight_scale(c.n), bias(c.n);
  for (size_t i = 0; i < a_scale.size(); ++i) a_scale[i] = 1.0f + 0.03125f * i;
  for (int n = 0; n < c.n; ++n) weight_scale[n] = 0.5f + 0.0078125f * n;
  for (int n = 0; n < c.n; ++n) bias[n] = 3.0f - 0.5f * (n % 13);
  ScaledMmProblem p{};
  p.a_scale = a_scale.data();
  p.weight_scale = weight_scale.data();
  p.bias = c.bias ? bias.data() : nullptr;
  p.m = c.m, p.n = c.n, p.k = 64;
  p.a_scale_per_row = c.per_row;
  p.half_out = c.half;
  p.activation = c.activation;
  p.multiprocessors = 132;

  using Tile = typename Gemm::TileShape;
  const int rows = kSwap ? c.n : c.m, columns = kSwap ? c.m : c.n;
  const int tile_m = size<0>(Tile{}), tile_n = size<1>(Tile{});
  std::vector<int> written(static_cast<size_t>(rows) * columns);
  std::vector<uint16_t> out(written.size());
  for (int i = 0; i * tile_m < rows; ++i) {
    for (int j = 0; j * tile_n < columns; ++j) {
      cutlass_host::run_block<Gemm, kSwap>(
          p, i, j,
          [](int row, int column) { return kSwap ? sum_at(column, row) : sum_at(row, column); },
          [&](int row, int column, uint16_t bits) {
            const size_t index = static_cast<size_t>(row) * columns + column;
            out[index] = bits;
            ++written[index];
          });
    }
  }
  long wrong = 0;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      const size_t index = static_cast<size_t>(row) * columns + column;
      const uint16_t want = kSwap ? expected(p, column, row) : expected(p, row, column);
      wrong += written[index] != 1 || out[index] != want;
    }
  }
  std::printf("%s m %d n %d per_row %d bias %d half %d activation %d: %zu elements, %ld wrong\n",
              name, c.m, c.n, c.per_row, c.bias, c.half, c.activation, written.size(), wrong);
  return wrong == 0;
}

template <class Gemm, bool kSwap>
bool run_tile(const char* name) {
  bool good = true;
  for (const Case& c : {Case{1, 16, true, true, false, -1}, Case{1, 80, false, false, true, 0},
                        Case{7, 64, true, true, true, 1}, Case{16, 144, true, false, false, 2},
                        Case{63, 272, true, true, false, 3}, Case{129, 304, true, true, false, -1},
                        Case{130, 16, false, true, true, -1}}) {
    good &= run_case<Gemm, kSwap>(name, c);
  }
  return good;
}

using cutlass::arch::Sm90;
using One = Shape<_1, _1, _1>;
using Two = Shape<_2, _1, _1>;
using Fast = cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum;
using Pingpong = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
using Store = cutlass::epilogue::TmaWarpSpecialized;
template <class Tile, class Cluster, class Main, class Epilogue, bool kSwap>
using Gemm = quantkit::cuda::ScaledMmCollectives<Sm90, Tile, Cluster, Main, Epilogue, kSwap>;

}  // namespace

int main() {
  bool good = true;
  good &= run_tile<Gemm<Shape<_64, _16, _256>, One, Fast, Store, true>, true>("swap_64x16x256");
  good &= run_tile<Gemm<Shape<_64, _64, _256>, One, Fast, Store, true>, true>("swap_64x64x256");
  good &= run_tile<Gemm<Shape<_64, _128, _128>, Two, Pingpong, Store, false>, false>("64x128x128");
  good &=
      run_tile<Gemm<Shape<_128, _128, _128>, Two, Pingpong, Store, false>, false>("128x128x128");
  return good ? 0 : 1;
}
