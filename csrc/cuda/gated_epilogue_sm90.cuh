// The end of scaled_gated_mm in CUTLASS 3.x: act(gate) * up, half as wide as what was multiplied.
//
// The kernel multiplies by the weight's rows in another order than they lie in: eight of gate, the
// eight of up that belong to them, and so on (gated_mm_sm90.cuh). The matrix instruction leaves
// values eight rows, and values eight columns, apart in one thread, so a thread has both halves
// whether or not the operands are swapped. CUTLASS's epilogues write one number for each sum; so
// this node writes on its own, from registers to memory, and the epilogue around it has no D.
#pragma once

// CUTLASS captures `this` in lambdas in the way that C++20 deprecates.
#pragma nv_diag_suppress 2908

#include <cutlass/array.h>
#include <cutlass/bfloat16.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>

#include "epilogue.cuh"
#include "scaled_mm_problem.h"

namespace quantkit::cuda {

struct GatedArguments {
  const float* a_scale;       // [tokens], or one number
  const float* weight_scale;  // [2 * inner], as the weight lies in memory
  const float* bias;          // [2 * inner], or null
  uint16_t* out;              // [tokens, inner]
  int inner;
  bool a_scale_per_row;
  FinishArguments finish;
};

template <class Tile, bool kSwap>
struct GatedStore {
  // Tokens run along one side of the tile, channels (rows of the weight) along the other.
  static constexpr int kTokenMode = kSwap ? 1 : 0;
  static constexpr int kChannelMode = kSwap ? 0 : 1;
  static constexpr int kTokens = cute::size<kTokenMode>(Tile{});
  static constexpr int kChannels = cute::size<kChannelMode>(Tile{});
  // How far apart gate and up are in a fragment, whose order is two columns, two rows (eight
  // apart), then the columns eight further.
  static constexpr int kToUp = kSwap ? 2 : 4;

  using ElementAux = cutlass::bfloat16_t;  // stands for D's, which is none
  using Arguments = GatedArguments;
  using Params = Arguments;
  struct SharedStorage {
    float weight_scale[kChannels];
    float bias[kChannels];
    float a_scale[kTokens];
  };

  template <class Shape>
  static constexpr Params to_underlying_arguments(const Shape&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class Shape>
  static bool can_implement(const Shape&, const Arguments&) {
    return true;
  }
  template <class Shape>
  static size_t get_workspace_size(const Shape&, const Arguments&) {
    return 0;
  }
  template <class Shape>
  static cutlass::Status initialize_workspace(const Shape&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE GatedStore() {}
  CUTLASS_HOST_DEVICE GatedStore(const Params& params, const SharedStorage& shared)
      : params(&params), shared(const_cast<SharedStorage*>(&shared)) {}

  const Params* params = nullptr;
  SharedStorage* shared = nullptr;

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(
      const cutlass::epilogue::fusion::detail::ProducerLoadArgs<Args...>&) {
    return cutlass::epilogue::fusion::detail::EmptyProducerLoadCallbacks{};
  }

  // `Coordinates` of a thread's sums, from its first: (values, rows, columns, tile rows, columns).
  template <class Coordinates>
  struct Callbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    const Params& params;
    SharedStorage& shared;
    Coordinates coordinates;
    int first_token, first_channel;  // of the tile
    int token, channel;              // of the thread's first sum, in the tile
    int tokens;
    int thread, threads;

    // All scales of the tile, in its order, into shared memory; those beyond it are not used.
    CUTLASS_DEVICE void begin() {
      for (int i = thread; i < kChannels; i += threads) {
        const int row = stacked_row(first_channel + i, params.inner);
        const bool inside = first_channel + i < 2 * params.inner;
        shared.weight_scale[i] = inside ? params.weight_scale[row] : 0.0f;
        shared.bias[i] = inside && params.bias != nullptr ? params.bias[row] : 0.0f;
      }
      for (int i = thread; i < kTokens; i += threads) {
        const int row = params.a_scale_per_row ? first_token + i : 0;
        shared.a_scale[i] = first_token + i < tokens ? params.a_scale[row] : 0.0f;
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    template <class Element, class... Inputs, int kCount>
    CUTLASS_DEVICE cutlass::Array<ElementAux, kCount> visit(
        const cutlass::Array<Element, kCount>& sums, int part, int tile_row, int tile_column,
        const Inputs&...) {
      constexpr int kOuts = kCount / 2;
      const auto where = coordinates(cute::_, cute::_, cute::_, tile_row, tile_column);
      const auto token_of = [&](int i) {
        return token + cute::get<kTokenMode>(where(part * kCount + i));
      };
      const auto channel_of = [&](int i) {
        return channel + cute::get<kChannelMode>(where(part * kCount + i));
      };
      const auto value = [&](int i) {
        return scale_and_shift(sums[i], shared.weight_scale[channel_of(i)],
                               shared.a_scale[token_of(i)], shared.bias[channel_of(i)]);
      };
      float gates[kOuts], ups[kOuts];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOuts; ++i) {
        gates[i] = value(gate_at(i));
        ups[i] = value(gate_at(i) + kToUp);
      }
      uint32_t pairs[kOuts / 2];
      finish_gated<kOuts>(gates, ups, params.finish, pairs);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOuts; i += 2) {
        const int at = gate_at(i);
        store(first_token + token_of(at), first_channel + channel_of(at), pairs[i / 2]);
      }
      return {};
    }

    static constexpr int gate_at(int i) { return i / kToUp * 2 * kToUp + i % kToUp; }

    // Two results: of neighbouring channels of a token, or, swapped, of neighbouring tokens.
    CUTLASS_DEVICE void store(int row, int gate, uint32_t pair) {
      if (row >= tokens || gate >= 2 * params.inner) return;
      uint16_t* out =
          params.out + static_cast<int64_t>(row) * params.inner + stacked_row(gate, params.inner);
      if constexpr (kSwap) {
        *out = static_cast<uint16_t>(pair);
        if (row + 1 < tokens) out[params.inner] = static_cast<uint16_t>(pair >> 16);
      } else {
        *reinterpret_cast<uint32_t*>(out) = pair;
      }
    }
  };

  template <bool kReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      const cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...>& args) {
    using cute::get;
    // What is left of the matrix from the tile's first element, and from the thread's.
    const auto tile_first = args.residue_cD;
    const auto thread_first = args.residue_tCcD;
    const auto shape = args.problem_shape_mnkl;
    return Callbacks<decltype(args.tCcD)>{
        {},
        *params,
        *shared,
        args.tCcD,
        get<kTokenMode>(shape) - get<kTokenMode>(tile_first),
        get<kChannelMode>(shape) - get<kChannelMode>(tile_first),
        get<kTokenMode>(tile_first) - get<kTokenMode>(thread_first),
        get<kChannelMode>(tile_first) - get<kChannelMode>(thread_first),
        get<kTokenMode>(shape),
        args.thread_idx,
        static_cast<int>(cute::size(args.tiled_mma))};
  }
};

template <class Tile, bool kSwap>
struct GatedTree {
  using Callbacks = cutlass::epilogue::fusion::Sm90EVT<GatedStore<Tile, kSwap>,
                                                       cutlass::epilogue::fusion::Sm90AccFetch>;

  static typename Callbacks::Arguments arguments(const ScaledMmProblem& problem) {
    return {{},
            {problem.a_scale,
             problem.weight_scale,
             problem.bias,
             static_cast<uint16_t*>(problem.out),
             static_cast<int>(problem.n / 2),
             problem.a_scale_per_row,
             {problem.activation, problem.half_out}}};
  }
};

}  // namespace quantkit::cuda
