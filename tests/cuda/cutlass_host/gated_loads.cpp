// What the main loop of scaled_gated_mm brings into shared memory, worked out on the CPU: CuTe says
// which boxes TMA copies from where to where, and this program copies them as TMA does. Row r of a
// tile must be row stacked_row(r) of the weight: eight rows of gate, the same eight of up, the next.
//
// Also that the tile lies in shared memory as that of scaled_mm does, and that the matrix
// instruction is told the same of it. Prints one line a tile and size, exits with 1 if any is wrong.

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// What a descriptor holds; dimension 0 is the one of adjacent bytes.
struct Box {
  const uint8_t* memory;
  cuuint32_t rank;
  uint64_t sizes[5], strides[5];
  uint32_t shape[5];

  int elements() const { return shape[0] * shape[1] * shape[2] * shape[3] * shape[4]; }
};
std::vector<Box> boxes;

// In place of the driver's: a descriptor is the number of a box.
CUresult cuTensorMapEncodeTiled(CUtensorMap* descriptor, CUtensorMapDataType type, cuuint32_t rank,
                                void* memory, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* shape, const cuuint32_t* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (type != CU_TENSOR_MAP_DATA_TYPE_UINT8 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B || rank > 5) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Box box{static_cast<const uint8_t*>(memory), rank, {1, 1, 1, 1, 1}, {1}, {1, 1, 1, 1, 1}};
  for (cuuint32_t i = 0; i < rank; ++i) {
    box.sizes[i] = sizes[i];
    if (i > 0) box.strides[i] = strides[i - 1];
    box.shape[i] = shape[i];
    const bool whole = i == 0 || box.strides[i] % 16 == 0;
    if (steps[i] != 1 || shape[i] > 256 || !whole) return CUDA_ERROR_INVALID_VALUE;
  }
  const size_t number = boxes.size();
  boxes.push_back(box);
  std::memcpy(static_cast<void*>(descriptor), &number, sizeof number);
  return CUDA_SUCCESS;
}

// CuTe makes descriptors where it takes the compiler for nvcc; what else CUTLASS has only there is
// left out by including it before.
#include <cutlass/arch/wmma.h>
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL
#include "gated_mm_sm90.cuh"

namespace {

using namespace cute;
using namespace quantkit::cuda;

template <class Descriptor>
const Box& box_of(const Descriptor* descriptor) {
  size_t number;
  std::memcpy(&number, static_cast<const void*>(descriptor), sizeof number);
  return boxes.at(number);
}

uint8_t code_at(int64_t n, int64_t k) {
  return static_cast<uint8_t>((n * 2654435761u + k * 40503u + (n * k >> 3)) >> 7);
}

// Copies a box as TMA does: from `first` on to `offset` in shared memory, whose bytes are swizzled in
// groups of 16 within 1024. What is beyond the tensor is zeros.
void copy_box(const Box& box, const int64_t (&first)[5], size_t offset, std::vector<uint8_t>& shared) {
  for (int i = 0; i < box.elements(); ++i, ++offset) {
    size_t left = i;
    uint64_t from = 0;
    bool inside = true;
    for (int d = 0; d < 5; ++d) {
      const int64_t at = first[d] + static_cast<int64_t>(left % box.shape[d]);
      left /= box.shape[d];
      inside = inside && at >= 0 && static_cast<uint64_t>(at) < box.sizes[d];
      from += at * box.strides[d];
    }
    shared.at(offset ^ (offset >> 7 & 7) << 4) = inside ? box.memory[from] : 0;
  }
}

// The weight's side of a collective.
template <class Gated, bool kSwap>
struct Side {
  using Mainloop = typename Gated::Mainloop;
  using Plain = typename Gated::Plain::Mainloop;
  template <class Any>
  static constexpr auto layout_of() {
    if constexpr (kSwap) {
      return typename Any::SmemLayoutA{};
    } else {
      return typename Any::SmemLayoutB{};
    }
  }
  static constexpr auto tile = typename Gated::TileShape{};
  static constexpr int kRows = size<kSwap ? 0 : 1>(tile);
  static constexpr int kDepth = size<2>(tile);
  // Blocks of a cluster that share the tile: each copies a part of it, to all.
  static constexpr int kSharers =
      size<kSwap ? 1 : 0>(typename Mainloop::DispatchPolicy::ClusterShape{});

  // The first and the last stage of shared memory, all bytes of it, tell where every code lies.
  static long misplaced() {
    const auto plain = layout_of<Plain>(), gated = layout_of<Mainloop>();
    constexpr int kStages = size<2>(decltype(gated){});
    long wrong = 0;
    for (const int stage : {0, kStages - 1}) {
      for (int row = 0; row < kRows; ++row) {
        for (int k = 0; k < kDepth; ++k) {
          const int at = stage < size<2>(plain) ? plain(row, k, stage) : -1;
          wrong += gated(row, k, stage) != at;
        }
      }
    }
    return wrong;
  }

  // Where the matrix instruction looks for its operand.
  static long misread() {
    typename Mainloop::TiledMma mma;
    const auto slice = mma.get_slice(0);
    const auto offsets = [&](const auto& layout) {
      const auto whole = make_tensor(counting_iterator<int>{}, get_nonswizzle_portion(layout));
      if constexpr (kSwap) {
        return slice.partition_A(whole);
      } else {
        return slice.partition_B(whole);
      }
    };
    const auto plain = offsets(layout_of<Plain>()), gated = offsets(layout_of<Mainloop>());
    static_assert(size<0>(plain) == size<0>(gated) && size<1>(plain) == size<1>(gated) &&
                  size<2>(plain) == size<2>(gated));
    long wrong = 0;
    for (int i = 0; i < size<0>(gated); ++i) {
      for (int j = 0; j < size<1>(gated); ++j) {
        for (int k = 0; k < size<2>(gated); ++k) wrong += plain(i, j, k, 1) != gated(i, j, k, 1);
      }
    }
    return wrong;
  }
};

template <class Gated, bool kSwap>
bool run_size(const char* name, int inner, int k) {
  using S = Side<Gated, kSwap>;
  using Mainloop = typename S::Mainloop;
  const int n = 2 * inner, m = 24;
  std::vector<uint8_t> weight(static_cast<size_t>(n) * k + 16), other(static_cast<size_t>(m) * k);
  uint8_t* codes = weight.data() + (16 - reinterpret_cast<uintptr_t>(weight.data()) % 16) % 16;
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < k; ++j) codes[static_cast<size_t>(i) * k + j] = code_at(i, j);
  }
  const auto shape = make_shape(kSwap ? n : m, kSwap ? m : n, k, 1);
  const auto* pointer = reinterpret_cast<const typename Gated::Code*>(codes);
  const auto* second = reinterpret_cast<const typename Gated::Code*>(other.data());
  typename Mainloop::Arguments arguments{};
  arguments.ptr_A = kSwap ? pointer : second;
  arguments.dA = operand_stride(typename Mainloop::StrideA{}, get<0>(shape), k);
  arguments.ptr_B = kSwap ? second : pointer;
  arguments.dB = operand_stride(typename Mainloop::StrideB{}, get<1>(shape), k);
  long wrong = !Mainloop::can_implement(shape, arguments);
  const auto params = Mainloop::to_underlying_arguments(shape, arguments, nullptr);
  const auto loads = Mainloop{}.load_init(shape, params);
  const auto tiles = get<kSwap ? 0 : 1>(loads);  // (rows, K, number of tile, of K, batch)
  const auto& tma = [&]() -> const auto& {
    if constexpr (kSwap) {
      return params.tma_load_a;
    } else {
      return params.tma_load_b;
    }
  }();
  const Box& box = box_of(tma.get_tma_descriptor());
  constexpr auto layout = S::template layout_of<Mainloop>();
  wrong += size<2>(tiles) != (n + S::kRows - 1) / S::kRows;

  long copies = 0;
  for (int tile = 0; tile < size<2>(tiles); ++tile) {
    for (int step = 0; step < size<3>(tiles); ++step) {
      std::vector<uint8_t> shared(cosize(layout), 0xEE);
      for (int block = 0; block < S::kSharers; ++block) {
        const auto slice = tma.get_slice(block);
        const auto from = slice.partition_S(tiles(_, _, tile, step, 0));
        // In offsets, without the swizzle that TMA adds.
        const auto to = slice.partition_D(
            make_tensor(counting_iterator<int>{}, get_nonswizzle_portion(layout)));
        constexpr int kCopied = remove_cvref_t<decltype(tma)>::NumValSrc;  // by one instruction
        for (int i = 0; i < size(from); i += kCopied, ++copies) {
          int64_t first[5] = {};
          const auto at = from(i);
          for_each(make_seq<rank(decltype(at){})>{}, [&](auto d) { first[d] = get<d>(at); });
          copy_box(box, first, to(i), shared);
        }
      }
      for (int row = 0; row < S::kRows; ++row) {
        for (int column = 0; column < S::kDepth; ++column) {
          const int number = tile * S::kRows + row, at = step * S::kDepth + column;
          const bool inside = number < n && at < k;
          const uint8_t want = inside ? code_at(stacked_row(number, inner), at) : 0;
          wrong += shared[layout(row, column, 0)] != want;
        }
      }
    }
  }
  const long misplaced = S::misplaced(), misread = S::misread();
  std::printf("%s inner %d k %d: box %u x %u x %u x %u, %ld copies, %ld wrong, %ld misplaced, "
              "%ld misread\n", name, inner, k, box.shape[0], box.shape[1], box.shape[2],
              box.shape[3], copies, wrong, misplaced, misread);
  return wrong + misplaced + misread == 0;
}

template <class Gated, bool kSwap>
bool run_tile(const char* name) {
  bool good = true;
  for (const auto& [inner, k] : {std::pair{8, 16}, {40, 272}, {64, 128}, {72, 1040}, {200, 256}}) {
    good &= run_size<Gated, kSwap>(name, inner, k);
  }
  return good;
}

using Fast = cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum;
using Pingpong = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
using Store = cutlass::epilogue::TmaWarpSpecialized;
using Swapped = GatedCollectives<Shape<_64, _64, _256>, Shape<_1, _1, _1>, Fast, Store, true>;
using Plain = GatedCollectives<Shape<_128, _128, _128>, Shape<_2, _1, _1>, Pingpong, Store, false>;

}  // namespace

int main() {
  bool good = run_tile<Swapped, true>("swap_64x64x256");
  good &= run_tile<Plain, false>("128x128x128");
  return good ? 0 : 1;
}
