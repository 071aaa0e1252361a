// What the scaled_mm kernels of sm_90 and sm_89 hand to CUTLASS for a problem: shapes, strides,
// pointers, which side the scales are on. Host code only; exits with 1 where something is wrong.

#include <cstdio>

#include "block_scaled_mm_sm90.cuh"
#include "gated_mm_sm90.cuh"
#include "scaled_mm_sm89.cuh"
#include "scaled_mm_sm90.cuh"

namespace {

using namespace cute;
using namespace quantkit::cuda;

int wrong = 0;

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      std::printf("line %d: %s does not hold\n", __LINE__, #condition); \
      ++wrong;                                                        \
    }                                                                 \
  } while (0)

template <class Tile, class Cluster, class Mainloop, class Epilogue, bool kSwap>
using Sm90 = ScaledMmTma<
    ScaledMmCollectives<cutlass::arch::Sm90, Tile, Cluster, Mainloop, Epilogue, kSwap>>;
using Swapped = Sm90<Shape<_64, _16, _256>, Shape<_1, _1, _1>,
                     cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum,
                     cutlass::epilogue::TmaWarpSpecialized, true>;
using Pingpong = Sm90<Shape<_128, _128, _128>, Shape<_2, _1, _1>,
                      cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                      cutlass::epilogue::TmaWarpSpecialized, false>;
using Cooperative = Sm90<Shape<_128, _256, _128>, Shape<_2, _1, _1>,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                         cutlass::epilogue::TmaWarpSpecializedCooperative, false>;
using Ada = ScaledMmSm89<cutlass::gemm::GemmShape<16, 64, 128>,
                         cutlass::gemm::GemmShape<16, 64, 64>, 5>;

using Blocks = ScaledMmTma<
    BlockScaledCollectives<Shape<_128, _128, _128>, Shape<_1, _2, _1>,
                           cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise,
                           cutlass::epilogue::TmaWarpSpecializedCooperative>>;

using GatedSwapped =
    ScaledMmTma<GatedCollectives<Shape<_64, _64, _256>, Shape<_1, _1, _1>,
                                 cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum,
                                 cutlass::epilogue::TmaWarpSpecialized, true>>;
using GatedPingpong =
    ScaledMmTma<GatedCollectives<Shape<_128, _128, _128>, Shape<_2, _1, _1>,
                                 cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                                 cutlass::epilogue::TmaWarpSpecialized, false>>;

constexpr int kM = 5, kN = 48, kK = 272;
alignas(16) uint8_t a[kM * kK], weight[kN * kK];
alignas(16) uint16_t out[kM * kN];
alignas(16) float a_scale[kM], weight_scale[kN], bias[kN];

ScaledMmProblem problem(bool per_row, bool with_bias) {
  ScaledMmProblem p{};
  p.a = a, p.a_scale = a_scale, p.weight = weight, p.weight_scale = weight_scale;
  p.bias = with_bias ? bias : nullptr;
  p.out = out;
  p.m = kM, p.n = kN, p.k = kK;
  p.a_scale_per_row = per_row;
  p.half_out = true, p.activation = 2, p.device = 3, p.multiprocessors = 132;
  return p;
}

// Offset of element (i, k) of an operand, or (i, j) of the output, in elements.
template <class Stride>
int64_t offset(const Stride& stride, int i, int j) {
  return crd2idx(make_coord(i, j, 0), make_shape(1 << 20, 1 << 20, 1), stride);
}

template <class Gemm, bool kSwap>
void check_sm90(bool per_row, bool with_bias) {
  const auto given = Gemm::arguments(problem(per_row, with_bias));
  CHECK(given.mode == cutlass::gemm::GemmUniversalMode::kGemm);
  CHECK(given.problem_shape == make_shape(kSwap ? kN : kM, kSwap ? kM : kN, kK, 1));
  const void* left = kSwap ? weight : a;
  const void* right = kSwap ? a : weight;
  CHECK(given.mainloop.ptr_A == left);
  CHECK(given.mainloop.ptr_B == right);
  CHECK(given.epilogue.ptr_D == static_cast<void*>(out));
  CHECK(given.epilogue.ptr_C == nullptr);
  for (const auto [i, k] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{4, 271}}) {
    CHECK(offset(given.mainloop.dA, i, k) == i * kK + k);  // both operands have rows of K
    CHECK(offset(given.mainloop.dB, i, k) == i * kK + k);
  }
  for (const auto [m, n] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{4, 47}}) {
    CHECK(offset(given.epilogue.dD, kSwap ? n : m, kSwap ? m : n) == m * kN + n);
  }
  CHECK(given.hw_info.device_id == 3 && given.hw_info.sm_count == 132);

  // Children of the tree: accumulator, weight_scale, a_scale, bias, and the node itself.
  const auto& thread = given.epilogue.thread;
  const auto& scale = get<1>(thread);
  const auto& token = get<2>(thread);
  const auto& shift = get<3>(thread);
  if constexpr (kSwap) {
    CHECK(scale.ptr_col == weight_scale && shift.ptr_col == (with_bias ? bias : nullptr));
    CHECK(token.ptr_row == a_scale && get<1>(token.dRow) == per_row);
  } else {
    CHECK(scale.ptr_row == weight_scale && shift.ptr_row == (with_bias ? bias : nullptr));
    CHECK(token.ptr_col == a_scale && get<0>(token.dCol) == per_row);
  }
  CHECK(get<4>(thread).activation == 2 && get<4>(thread).half);
  CHECK(Gemm::Gemm::can_implement(given) == cutlass::Status::kSuccess);
  CHECK(Gemm::workspace_size(problem(per_row, with_bias)) == 0);

  // TMA moves rows of whole 16 bytes only.
  ScaledMmProblem odd = problem(per_row, with_bias);
  odd.k = kK - 8;
  CHECK(Gemm::Gemm::can_implement(Gemm::arguments(odd)) != cutlass::Status::kSuccess);
}

// Scales along K: which number of a_scale [K / 128, 8] and weight_scale [N / 128, K / 128] each code
// of a and weight meets.
void check_blocks(bool with_bias) {
  constexpr int kManyN = 272, kManyK = 384;  // two blocks and a part, three groups
  ScaledMmProblem p = problem(false, with_bias);
  p.n = kManyN, p.k = kManyK;
  const auto given = Blocks::arguments(p);
  CHECK(given.problem_shape == make_shape(kM, kManyN, kManyK, 1));
  CHECK(given.mainloop.ptr_A == static_cast<void*>(a));
  CHECK(given.mainloop.ptr_B == static_cast<void*>(weight));
  CHECK(given.mainloop.ptr_SFA == a_scale && given.mainloop.ptr_SFB == weight_scale);
  for (int k = 0; k < kManyK; k += 17) {
    for (int m = 0; m < kM; ++m) {
      CHECK(given.mainloop.layout_SFA(m, k, 0) == k / 128 * 8 + m);
    }
    for (int n = 0; n < kManyN; n += 13) {
      CHECK(given.mainloop.layout_SFB(n, k, 0) == n / 128 * (kManyK / 128) + k / 128);
    }
  }
  const auto& thread = given.epilogue.thread;
  CHECK(get<1>(thread).ptr_row == nullptr && get<1>(thread).null_default == 1.0f);
  CHECK(get<2>(thread).ptr_col == nullptr && get<2>(thread).null_default == 1.0f);
  CHECK(get<3>(thread).ptr_row == (with_bias ? bias : nullptr));
  CHECK(get<3>(thread).null_default == 0.0f);
  CHECK(get<4>(thread).activation == 2 && get<4>(thread).half);
  CHECK(Blocks::Gemm::can_implement(given) == cutlass::Status::kSuccess);
  CHECK(Blocks::workspace_size(p) == 0);
}

// Two halves of the weight, of 24 rows each; the output is as wide as one.
template <class Gemm, bool kSwap>
void check_gated(bool per_row, bool with_bias) {
  const auto given = Gemm::arguments(problem(per_row, with_bias));
  CHECK(given.problem_shape == make_shape(kSwap ? kN : kM, kSwap ? kM : kN, kK, 1));
  const void* left = kSwap ? weight : a;
  const void* right = kSwap ? a : weight;
  CHECK(given.mainloop.ptr_A == left && given.mainloop.ptr_B == right);
  const auto strides = make_tuple(given.mainloop.dA, given.mainloop.dB);
  CHECK(get<0>(get<kSwap ? 1 : 0>(strides)) == kK);
  CHECK(get<0>(get<kSwap ? 0 : 1>(strides)) == make_stride(kK, kN / 2 * kK, 8 * kK));
  const auto& node = given.epilogue.thread.op_1;
  CHECK(node.weight_scale == weight_scale && node.a_scale == a_scale);
  CHECK(node.bias == (with_bias ? bias : nullptr));
  CHECK(node.out == out && node.inner == kN / 2 && node.a_scale_per_row == per_row);
  CHECK(node.finish.activation == 2 && node.finish.half);
  CHECK(Gemm::Gemm::can_implement(given) == cutlass::Status::kSuccess);
  CHECK(Gemm::workspace_size(problem(per_row, with_bias)) == 0);
  ScaledMmProblem odd = problem(per_row, with_bias);
  odd.k = kK - 8;
  CHECK(Gemm::Gemm::can_implement(Gemm::arguments(odd)) != cutlass::Status::kSuccess);
}

void check_sm89(bool per_row, bool with_bias) {
  const auto given = Ada::arguments(problem(per_row, with_bias));
  CHECK(given.problem_size.m() == kM && given.problem_size.n() == kN &&
        given.problem_size.k() == kK);
  CHECK(given.ptr_A == a && given.ptr_B == weight);
  CHECK(given.lda == kK && given.ldb == kK);
  const auto& finished = given.epilogue.op_0;
  CHECK(get<1>(finished).ptr_row == weight_scale);
  CHECK(get<2>(finished).ptr_col == a_scale && get<0>(get<2>(finished).dCol) == per_row);
  CHECK(get<3>(finished).ptr_row == (with_bias ? bias : nullptr));
  CHECK(get<4>(finished).activation == 2 && get<4>(finished).half);
  const auto& store = given.epilogue.op_1;
  CHECK(store.ptr_aux == static_cast<void*>(out) && get<0>(store.dAux) == kN);
}

}  // namespace

int main() {
  for (const bool per_row : {false, true}) {
    for (const bool with_bias : {false, true}) {
      check_sm90<Swapped, true>(per_row, with_bias);
      check_sm90<Pingpong, false>(per_row, with_bias);
      check_sm90<Cooperative, false>(per_row, with_bias);
      check_gated<GatedSwapped, true>(per_row, with_bias);
      check_gated<GatedPingpong, false>(per_row, with_bias);
      check_sm89(per_row, with_bias);
    }
  }
  for (const bool with_bias : {false, true}) check_blocks(with_bias);
  std::printf("%d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}
