// Choosing one token a row: the largest score, or the largest after adding Gumbel noise, which is a
// function of the row's key and the token id: that of quantkit/runtime/noise.py.
//
// What is likely enough is found without sorting: bit by bit, the largest probability whose tokens,
// with those above it, reach the wanted mass.
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

constexpr int kNucleusThreads = 1024;
constexpr int kNucleusKept = 4096;       // probabilities that a block keeps in shared memory
constexpr uint32_t kTwo = 0x40000000u;   // bits of 2.0f, above every probability
constexpr int kMassBits = 62;            // a mass of 1 is 2^62

// Sums of probabilities are of integers, so that their order is nothing: in units of 2^-62 these are
// exact from 2^-38 on, and cut off at one unit below.
QK_DEVICE uint64_t mass_of(uint32_t bits) {
  return static_cast<uint64_t>(as_float(bits) * 0x1p62f);
}

// The masses, and the numbers, of what is at least one of three thresholds.
struct Tail {
  uint64_t mass[3];
  int count[3];
};

// Adds up what the threads of a block have; everybody gets the result.
QK_DEVICE Tail block_total(Tail mine) {
  __shared__ Tail warps[kNucleusThreads / kWarp];
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      mine.mass[i] += __shfl_xor_sync(kAllLanes, mine.mass[i], step);
      mine.count[i] += __shfl_xor_sync(kAllLanes, mine.count[i], step);
    }
  }
  __syncthreads();  // the last total has been read
  if (lane == 0) warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  Tail total{};
  for (int warp = 0; warp < kNucleusThreads / kWarp; ++warp) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      total.mass[i] += warps[warp].mass[i];
      total.count[i] += warps[warp].count[i];
    }
  }
  return total;
}

// The bound of a row, a block each: the largest probability such that its tokens and likelier ones
// have a mass of `target` (2^62 is 1), or 0 if all together have not.
//
// Of floats that are not negative, the larger has the larger bits. Two bits a pass, from the top:
// [low, high) holds the bound. As soon as few probabilities are in there, they are kept in shared
// memory, and the row is read no more.
__global__ void __launch_bounds__(kNucleusThreads)
    find_nucleus(const float* __restrict__ probabilities, float* __restrict__ bounds,
                 int64_t columns, uint64_t target) {
  __shared__ uint32_t kept[kNucleusKept];
  __shared__ int kept_count;
  start_next_kernel();
  wait_for_previous_kernel();
  const float* row = probabilities + blockIdx.x * columns;
  uint32_t low = 0, high = kTwo;
  int from_low = INT32_MAX, from_high = 0;  // how many are at least `low`, or `high`
  uint64_t over = 0;                        // the mass from `high` on, and what is not kept
  uint64_t mass_from_high = 0;
  bool is_kept = false;
  int number = 0;
  for (int shift = 28; shift >= 0; shift -= 2) {
    const uint32_t step = 1u << shift;
    Tail mine{};
    const auto add = [&](uint32_t bits) {
      const uint64_t mass = mass_of(bits);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const bool inside = bits >= low + (i + 1) * step;
        mine.mass[i] += inside ? mass : 0;
        mine.count[i] += inside;
      }
    };
    if (is_kept) {
      for (int i = threadIdx.x; i < number; i += kNucleusThreads) add(kept[i]);
    } else {
      for (int64_t i = threadIdx.x; i < columns; i += kNucleusThreads) {
        const uint32_t bits = as_bits(row[i]);
        if (bits < kTwo) add(bits);
      }
    }
    const Tail total = block_total(mine);
    int quarter = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint64_t mass = over + total.mass[i];
      if (mass >= target) {
        quarter = i + 1;
        from_low = total.count[i];
      } else if (quarter == i) {  // the first that does not reach it
        from_high = total.count[i];
        mass_from_high = mass;
      }
    }
    low += quarter * step;
    high = low + step;
    if (is_kept || from_low - from_high > kNucleusKept || shift == 0) continue;
    if (threadIdx.x == 0) kept_count = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < columns; i += kNucleusThreads) {
      const uint32_t bits = as_bits(row[i]);
      // In any order: sums of integers do not depend on it.
      if (bits >= low && bits < high) kept[atomicAdd(&kept_count, 1)] = bits;
    }
    __syncthreads();
    number = kept_count;
    over = mass_from_high;
    is_kept = true;
  }
  if (threadIdx.x == 0) bounds[blockIdx.x] = as_float(low);
}

inline unsigned choice_parts(int64_t columns) {
  return static_cast<unsigned>((columns + kPartColumns - 1) / kPartColumns);
}

}  // namespace quantkit::cuda
