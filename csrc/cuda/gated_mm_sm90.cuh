// scaled_gated_mm on CUTLASS 3.x, sm_90a: scaled_mm by a weight of gate rows, then as many up rows,
// with act(gate) * up in the epilogue.
//
// That needs a gate row and its up row in one block. The weight stays as it is: for TMA its rows
// are three dimensions, (8, 2, N / 16) with strides (K, K * N / 2, 8 * K), of which a box takes
// eight rows of gate, the same eight of up, and the next eights. So a tile in shared memory has
// rows in turns of eight, the only order that serves both operand orders: see GatedStore.
#pragma once

// CUTLASS captures `this` in lambdas in the way that C++20 deprecates.
#pragma nv_diag_suppress 2908

#include "collectives_sm90.cuh"
#include "gated_epilogue_sm90.cuh"

namespace quantkit::cuda {

template <class Tile, class Cluster, class MainloopSchedule, class EpilogueSchedule, bool kSwap>
struct GatedCollectives {
  using Plain = ScaledMmCollectives<cutlass::arch::Sm90, Tile, Cluster, MainloopSchedule,
                                    EpilogueSchedule, kSwap>;
  static constexpr bool kSwapped = kSwap;
  using TileShape = Tile;
  using Code = typename Plain::Code;
  using Out = typename Plain::Out;
  using Tree = GatedTree<Tile, kSwap>;

  // The layout of the D that is none gives fragments their order; see GatedStore::kToUp.
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      cutlass::layout::RowMajor, Plain::kOutAlignment, void, cutlass::layout::RowMajor,
      Plain::kOutAlignment, EpilogueSchedule, typename Tree::Callbacks>::CollectiveOp;

  // The tile as the main loop has it: where the weight is, in turns.
  template <class Size>
  using Turns = cute::Shape<cute::_8, cute::_2, cute::Int<cute::size(Size{}) / 16>>;
  using Rows = decltype(cute::get<0>(Tile{}));
  using Columns = decltype(cute::get<1>(Tile{}));
  using TurnedTile = cute::Shape<cute::conditional_t<kSwap, Turns<Rows>, Rows>,
                                 cute::conditional_t<kSwap, Columns, Turns<Columns>>,
                                 decltype(cute::get<2>(Tile{}))>;
  using WeightStride = TurnsOfEight<int64_t>;
  using Stacked = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Code,
      cute::conditional_t<kSwap, WeightStride, cutlass::layout::RowMajor>, Plain::kCodeAlignment,
      Code, cute::conditional_t<kSwap, cutlass::layout::ColumnMajor, WeightStride>,
      Plain::kCodeAlignment, float, TurnedTile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;

  // The main loop alone knows that the weight's rows are three dimensions.
  struct Mainloop : Stacked {
    using TileShape = Tile;

    template <class Shape>
    CUTLASS_HOST_DEVICE static constexpr auto nested(const Shape& shape) {
      auto [rows, columns, k, batches] = cute::append<4>(shape, 1);
      const auto turns = cute::make_shape(cute::_8{}, cute::_2{}, (kSwap ? rows : columns) / 16);
      if constexpr (kSwap) {
        return cute::make_shape(turns, columns, k, batches);
      } else {
        return cute::make_shape(rows, turns, k, batches);
      }
    }
    template <class Shape>
    static constexpr typename Stacked::Params to_underlying_arguments(
        const Shape& shape, const typename Stacked::Arguments& arguments, void* workspace) {
      return Stacked::to_underlying_arguments(nested(shape), arguments, workspace);
    }
    template <class Shape>
    static bool can_implement(const Shape& shape, const typename Stacked::Arguments& arguments) {
      return Stacked::can_implement(nested(shape), arguments);
    }
    template <class Shape>
    CUTLASS_DEVICE auto load_init(const Shape& shape,
                                  const typename Stacked::Params& params) const {
      auto [a, b] = Stacked::load_init(nested(shape), params);
      return cute::make_tuple(flat_tiles(a), flat_tiles(b));
    }

    // Tiles (rows, K, number of tile, ..) with the number as one mode, which others count in.
    template <class Engine, class Layout>
    CUTLASS_DEVICE static auto flat_tiles(const cute::Tensor<Engine, Layout>& tiles) {
      const auto layout = tiles.layout();
      return cute::make_tensor(
          tiles.data(), cute::make_layout(cute::get<0>(layout), cute::get<1>(layout),
                                          cute::coalesce(cute::get<2>(layout)),
                                          cute::get<3>(layout), cute::get<4>(layout)));
    }
  };

  static void set_scales(typename Mainloop::Arguments&, const ScaledMmProblem&) {}
};

}  // namespace quantkit::cuda
