// Choosing one token a row: the largest score, or the largest after adding Gumbel noise, which is a
// function of the row's key and the token id: that of quantkit/runtime/noise.py.
//
// A row is cut into parts, one block each, and one warp takes the best of their bests. Whatever the
// order, equal scores go to the lowest token id, and a NaN wins over all, as in torch.argmax.
#pragma once

#include "intrinsics.cuh"

namespace quantkit::cuda {

constexpr int kChoiceThreads = 256;
constexpr int kPartColumns = 32 * kChoiceThreads;

struct Choice {
  double score;
  int64_t token;
};

// Standard Gumbel noise -log(-log(u)); u: SplitMix64 started at the key, its number token + 1.
QK_DEVICE double gumbel_noise(int64_t key, int64_t token) {
  uint64_t bits =
      static_cast<uint64_t>(key) + (static_cast<uint64_t>(token) + 1) * 0x9E3779B97F4A7C15u;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  bits ^= bits >> 31;
  const double u = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;  // exactly
  return -log(-log(u));
}

// True if `a` is chosen rather than `b`. A negative token is none.
QK_DEVICE bool wins(const Choice& a, const Choice& b) {
  if (a.token < 0 || b.token < 0) return b.token < 0;
  const bool a_nan = a.score != a.score, b_nan = b.score != b.score;
  if (a_nan != b_nan) return a_nan;
  if (a.score > b.score) return true;
  return (a_nan || a.score == b.score) && a.token < b.token;
}

// Every lane gets the best of all.
QK_DEVICE Choice warp_choice(Choice mine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const Choice other{__shfl_xor_sync(kAllLanes, mine.score, step),
                       __shfl_xor_sync(kAllLanes, mine.token, step)};
    if (wins(other, mine)) mine = other;
  }
  return mine;
}

// gridDim.x = rows * parts; part p of a row takes columns [p, p + 1) * kPartColumns.
template <bool kNoise>
__global__ void __launch_bounds__(kChoiceThreads)
    choose_in_parts(const float* __restrict__ scores, const int64_t* __restrict__ keys,
                    Choice* __restrict__ choices, int64_t columns, unsigned parts) {
  __shared__ double warp_scores[kChoiceThreads / kWarp];
  __shared__ int64_t warp_tokens[kChoiceThreads / kWarp];
  start_next_kernel();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x / parts;
  const int64_t begin = static_cast<int64_t>(blockIdx.x % parts) * kPartColumns;
  const int64_t end = min(begin + kPartColumns, columns);
  const int64_t key = kNoise ? keys[row] : 0;
  Choice best{0.0, -1};
#pragma unroll 4
  for (int64_t column = begin + threadIdx.x; column < end; column += kChoiceThreads) {
    const float score = scores[row * columns + column];
    Choice next{score, column};
    // An excluded token stays at -infinity whatever its noise.
    if (kNoise && score != -INFINITY) next.score = score + gumbel_noise(key, column);
    if (wins(next, best)) best = next;
  }
  best = warp_choice(best);
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) {
    warp_scores[threadIdx.x / kWarp] = best.score;
    warp_tokens[threadIdx.x / kWarp] = best.token;
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const bool present = lane < kChoiceThreads / kWarp;
  best = warp_choice({present ? warp_scores[lane] : 0.0, present ? warp_tokens[lane] : -1});
  if (threadIdx.x == 0) choices[blockIdx.x] = best;
}

// One warp a row: the best of its parts.
__global__ void __launch_bounds__(kWarp)
    choose_of_parts(const Choice* __restrict__ choices, int64_t* __restrict__ tokens,
                    unsigned parts) {
  start_next_kernel();
  wait_for_previous_kernel();
  Choice best{0.0, -1};
  for (unsigned part = threadIdx.x; part < parts; part += kWarp) {
    const Choice next = choices[static_cast<int64_t>(blockIdx.x) * parts + part];
    if (wins(next, best)) best = next;
  }
  best = warp_choice(best);
  if (threadIdx.x == 0) tokens[blockIdx.x] = best.token;
}

inline unsigned choice_parts(int64_t columns) {
  return static_cast<unsigned>((columns + kPartColumns - 1) / kPartColumns);
}

}  // namespace quantkit::cuda
