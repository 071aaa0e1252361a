// Runs the epilogue of scaled_gated_mm on the CPU, thread by thread, and compares what it has stored
// with act(gate) * up. The sums are those of a product by the weight's rows in turns of eight; that
// the main loop multiplies by these is for gated_loads.cu to show.
//
// Prints one line a tile and case, exits with 1 where a result is wrong or missing.

#include <cstdio>
#include <vector>

#include "blocks.h"
#include "gated_mm_sm90.cuh"

namespace {

using namespace cute;
using namespace quantkit::cuda;
using quantkit::Activation;

constexpr int kGuard = 64;               // numbers around the output that must stay as they are
constexpr uint16_t kUntouched = 0xFFFF;  // a NaN that no result is

float sum_at(int m, int n) { return 0.0625f * static_cast<float>((m * 37 + n * 11) % 201 - 100); }

struct Case {
  int m, inner;
  bool per_row, bias, half;
  Activation activation;
};

uint16_t expected(const ScaledMmProblem& p, int m, int column) {
  const auto value = [&](int64_t n) {
    return scale_and_shift(sum_at(m, n), p.weight_scale[n], p.a_scale[p.a_scale_per_row ? m : 0],
                           p.bias == nullptr ? 0.0f : p.bias[n]);
  };
  const float product =
      activate(p.activation, value(column)) * value(p.n / 2 + column);
  uint32_t pairs[1];
  const float both[2] = {product, 0.0f};
  round_all(p.half_out, both, pairs);
  return static_cast<uint16_t>(pairs[0]);
}

template <class Gemm, bool kSwap>
bool run_case(const char* name, const Case& c) {
  const int n = 2 * c.inner;
  std::vector<float> a_scale(c.per_row ? c.m : 1), weight_scale(n), bias(n);
  for (size_t i = 0; i < a_scale.size(); ++i) a_scale[i] = 1.0f + 0.03125f * i;
  for (int i = 0; i < n; ++i) weight_scale[i] = 0.5f + 0.0078125f * i;
  for (int i = 0; i < n; ++i) bias[i] = 3.0f - 0.5f * (i % 13);
  std::vector<uint16_t> out(static_cast<size_t>(c.m) * c.inner + 2 * kGuard, kUntouched);
  ScaledMmProblem p{};
  p.a_scale = a_scale.data();
  p.weight_scale = weight_scale.data();
  p.bias = c.bias ? bias.data() : nullptr;
  p.out = out.data() + kGuard;
  p.m = c.m, p.n = n, p.k = 64;
  p.a_scale_per_row = c.per_row;
  p.half_out = c.half;
  p.activation = static_cast<int>(c.activation);
  p.multiprocessors = 132;

  using Tile = typename Gemm::TileShape;
  const int rows = kSwap ? n : c.m, columns = kSwap ? c.m : n;
  const int tile_m = size<0>(Tile{}), tile_n = size<1>(Tile{});
  const auto turned_sum = [&](int row, int column) {
    return kSwap ? sum_at(column, stacked_row(row, c.inner))
                 : sum_at(row, stacked_row(column, c.inner));
  };
  for (int i = 0; i * tile_m < rows; ++i) {
    for (int j = 0; j * tile_n < columns; ++j) {
      cutlass_host::run_block<Gemm, kSwap>(p, i, j, turned_sum, [](int, int, uint16_t) {});
    }
  }
  long wrong = 0;
  for (int m = 0; m < c.m; ++m) {
    for (int i = 0; i < c.inner; ++i) {
      wrong += out[kGuard + static_cast<size_t>(m) * c.inner + i] != expected(p, m, i);
    }
  }
  for (int i = 0; i < kGuard; ++i) {
    wrong += out[i] != kUntouched || out[out.size() - 1 - i] != kUntouched;
  }
  std::printf("%s m %d inner %d per_row %d bias %d half %d activation %d: %ld wrong\n", name, c.m,
              c.inner, c.per_row, c.bias, c.half, p.activation, wrong);
  return wrong == 0;
}

template <class Gemm, bool kSwap>
bool run_tile(const char* name) {
  using enum Activation;
  bool good = true;
  for (const Case& c :
       {Case{1, 8, true, true, false, kSilu}, Case{1, 40, false, false, true, kSilu},
        Case{7, 32, true, true, true, kGelu}, Case{16, 72, true, false, false, kGeluTanh},
        Case{63, 136, true, true, false, kRelu}, Case{129, 152, true, true, false, kSilu},
        Case{130, 8, false, true, true, kSilu}}) {
    good &= run_case<Gemm, kSwap>(name, c);
  }
  return good;
}

using Fast = cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum;
using Pingpong = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
using Store = cutlass::epilogue::TmaWarpSpecialized;
using Swapped =
    GatedCollectives<Shape<_64, _64, _256>, Shape<_1, _1, _1>, Fast, Store, true>;
using Plain =
    GatedCollectives<Shape<_128, _128, _128>, Shape<_2, _1, _1>, Pingpong, Store, false>;

}  // namespace

int main() {
  bool good = run_tile<Swapped, true>("swap_64x64x256");
  good &= run_tile<Plain, false>("128x128x128");
  return good ? 0 : 1;
}
