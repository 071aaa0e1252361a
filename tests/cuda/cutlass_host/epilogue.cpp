// Runs the epilogue trees of the sm_90 scaled_mm kernels on the CPU, thread by thread, with
// CUTLASS's own partitions, and compares every element of a block of output with the formula.
// Without nvcc, CUTLASS's device functions are plain functions: the code that is run is the
// kernels' own, up to the copy to shared memory and the TMA store, which only move the block.
//
// Prints one line a tile and case, exits with 1 where an element is wrong or missing.

#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "collectives_sm90.cuh"

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

// One block, at tile coordinates (m_coord, n_coord) of the matrix the kernel computes. What each
// thread would store goes to `out`, [rows, columns] of that matrix; returns how many elements.
template <class Gemm, bool kSwap>
long run_block(const ScaledMmProblem& problem, int m_coord, int n_coord, std::vector<int>& written,
               std::vector<uint16_t>& out) {
  using Collective = typename Gemm::Epilogue;
  using Tree = typename Gemm::Tree;
  using Callbacks = typename Tree::Callbacks;
  using TiledMma = typename Gemm::Mainloop::TiledMma;
  using Tile = typename Gemm::TileShape;
  using EpilogueTile = typename Collective::EpilogueTile;
  using Element = typename Collective::ElementD;
  using CopyR2S = typename Collective::CopyOpR2S;
  using CopyAtomC = typename Collective::CopyAtomC;
  constexpr int kFragment = Collective::DispatchPolicy::FragmentSize;

  const int rows = static_cast<int>(kSwap ? problem.n : problem.m);
  const int columns = static_cast<int>(kSwap ? problem.m : problem.n);
  const auto shape = make_shape(rows, columns, static_cast<int>(problem.k), 1);
  const auto params = Callbacks::to_underlying_arguments(shape, Tree::arguments(problem), nullptr);
  auto shared = std::make_unique<typename Callbacks::SharedStorage>();
  std::memset(static_cast<void*>(shared.get()), 0xFF, sizeof(*shared));  // NaN until written
  Callbacks tree(params, *shared);

  TiledMma tiled_mma;
  const auto coordinates = make_coord(m_coord, n_coord, 0, 0);
  const auto crd = make_identity_tensor(make_shape(rows, columns));
  const auto cD_mn = local_tile(crd, take<0, 2>(Tile{}), make_coord(m_coord, n_coord));
  TiledCopy tiled_copy_C_atom = make_tiled_copy_C_atom(CopyAtomC{}, tiled_mma);
  TiledCopy tiled_r2s = make_tiled_copy_S(Copy_Atom<CopyR2S, Element>{}, tiled_copy_C_atom);
  const int threads = size(tiled_mma);

  long count = 0;
  // All threads first fill shared memory, then, past what would be the barrier, compute.
  for (int pass = 0; pass < 2; ++pass) {
    for (int thread = 0; thread < threads; ++thread) {
      auto thread_mma = tiled_mma.get_slice(thread);
      auto thread_r2s = tiled_r2s.get_slice(thread);
      // The sums, at the coordinates where the matrix instruction leaves them.
      Tensor where = thread_mma.partition_C(cD_mn);
      Tensor accumulators = partition_fragment_C(tiled_mma, take<0, 2>(Tile{}));
      for (int i = 0; i < size(accumulators); ++i) {
        const auto at = where(i);
        accumulators(i) = kSwap ? sum_at(get<1>(at), get<0>(at)) : sum_at(get<0>(at), get<1>(at));
      }
      Tensor rAcc = thread_r2s.retile_S(accumulators);
      Tensor rAcc_frg = recast<cutlass::Array<float, kFragment>>(rAcc);

      Tensor crd_mn = thread_r2s.partition_S(flat_divide(cD_mn, EpilogueTile{}));
      Tensor cD = make_coord_tensor(cD_mn.layout());
      Tensor tRS_cD = make_coord_tensor(crd_mn.layout());
      auto residue_cD = make_coord(rows, columns) - cD_mn(_0{});
      auto residue_tRS_cD = make_coord(rows, columns) - crd_mn(_0{});
      auto layout = make_layout(take<0, 3>(crd_mn.shape()));
      Tensor tRS_rC = make_tensor<Element>(layout);
      Tensor rD = make_tensor<Element>(layout);
      Tensor rD_frg = recast<cutlass::Array<Element, kFragment>>(rD);

      auto args = cutlass::epilogue::fusion::detail::ConsumerStoreArgs(
          shape, Tile{}, coordinates, tiled_mma, EpilogueTile{}, tiled_r2s, cD, residue_cD, tRS_cD,
          residue_tRS_cD, tRS_rC, thread);
      auto callbacks = tree.template get_consumer_store_callbacks<true>(args);
      callbacks.begin();
      if (pass == 0) continue;

      constexpr int kMmaM = size<0>(Tile{}) / decltype(size<1>(rAcc))::value;
      constexpr int kMmaN = size<1>(Tile{}) / decltype(size<2>(rAcc))::value;
      constexpr int kEpiM = size<0>(EpilogueTile{});
      constexpr int kEpiN = size<1>(EpilogueTile{});
      static_assert(kEpiM == kMmaM && kMmaN % kEpiN == 0, "the branch of store() repeated here");
      for (int epi_n = 0; epi_n < size<4>(crd_mn); ++epi_n) {
        for (int epi_m = 0; epi_m < size<3>(crd_mn); ++epi_m) {
          callbacks.begin_loop(epi_m, epi_n);
          callbacks.previsit(epi_m, epi_n, 0, false);
          const int mma_n = epi_n * kEpiN / kMmaN;
          Tensor acc_mn = rAcc_frg(_, epi_m, mma_n);
          const int first = epi_n % (kMmaN / kEpiN) * static_cast<int>(size(rD_frg));
          for (int v = 0; v < size(rD_frg); ++v) {
            rD_frg(v) = callbacks.visit(acc_mn(first + v), v, epi_m, epi_n);
          }
          callbacks.end_loop(epi_m, epi_n);
          for (int i = 0; i < size(rD); ++i) {
            const auto at = crd_mn(_, _, _, epi_m, epi_n)(i);
            const int row = get<0>(at), column = get<1>(at);
            if (row >= rows || column >= columns) continue;  // TMA does not write these
            const size_t index = static_cast<size_t>(row) * columns + column;
            out[index] = rD(i).raw();
            ++written[index];
            ++count;
          }
        }
      }
    }
  }
  return count;
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
    for (int j = 0; j * tile_n < columns; ++j) run_block<Gemm, kSwap>(p, i, j, written, out);
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
