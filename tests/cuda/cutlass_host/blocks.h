// Runs CUTLASS's epilogue over one block of a matrix on the CPU, thread by thread: what
// CollectiveEpilogue::store does, up to the copy to shared memory and the TMA store.
#pragma once

#include <cstring>
#include <memory>

#include "collectives_sm90.cuh"

namespace cutlass_host {

using namespace cute;
using quantkit::cuda::ScaledMmProblem;

// One block, at tile coordinates (m_coord, n_coord) of the matrix that the kernel computes, whose
// sums are `sum_at(row, column)`. `store(row, column, bits)` gets what each thread would store; of an
// epilogue without D it means nothing.
template <class Gemm, bool kSwap, class SumAt, class Store>
void run_block(const ScaledMmProblem& problem, int m_coord, int n_coord, const SumAt& sum_at,
               const Store& store) {
  using Collective = typename Gemm::Epilogue;
  using Tree = typename Gemm::Tree;
  using Callbacks = typename Tree::Callbacks;
  using TiledMma = typename Gemm::Mainloop::TiledMma;
  using Tile = typename Gemm::TileShape;
  using EpilogueTile = typename Collective::EpilogueTile;
  using Element = cutlass::bfloat16_t;
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
        accumulators(i) = sum_at(get<0>(at), get<1>(at));
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
            store(row, column, rD(i).raw());
          }
        }
      }
    }
  }
}

}  // namespace cutlass_host
