// Partial results of attention over chunks of keys become one, in ascending order of the chunks.
#pragma once

#include "attention_call.cuh"

namespace quantkit::cuda {

// Two partial results of a row become one.
struct Fold {
  float reference, total;  // of both
  float before, next;      // what the sums of each count
};
QK_DEVICE Fold fold(float reference, float total, float next_reference, float next_total) {
  Fold out;
  out.reference = fmaxf(reference, next_reference);
  out.before = exp2_flush(reference - out.reference);
  out.next = exp2_flush(next_reference - out.reference);
  out.total = fmaf(next_total, out.next, total * out.before);
  return out;
}
QK_DEVICE Float4 folded_sum(const Fold& fold, const Float4& before, const Float4& next) {
  Float4 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.value[i] = fmaf(next.value[i], fold.next, before.value[i] * fold.before);
  }
  return out;
}

// Four adjacent sums of kAhead chunks; of those that are there.
template <int kAhead>
struct PartialSums {
  Float4 of[kAhead];

  QK_DEVICE void load(const float* first, int count, int head_dim) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      of[i] = i < count
                  ? *reinterpret_cast<const Float4*>(first + static_cast<int64_t>(i) * head_dim)
                  : Float4{};
    }
  }
};

// A lane's reference and total of a row's chunk.
struct PartialWeight {
  float reference, total;
};
QK_DEVICE PartialWeight load_weight(const float* weights, int chunk, bool exists) {
  if (!exists) return {kNoScore, 0.0f};
  return {weights[2 * chunk], weights[2 * chunk + 1]};
}

// Folds the partial results of rows that see more than one chunk, a warp each, and stores them. All
// that this costs is the latency of loads that wait for each other, so as few as possible do.
template <int kAhead>
__global__ void __launch_bounds__(kWarp)
    fold_chunks(const AttentionCall call, int chunk_keys, int head_dim) {
  const int lane = static_cast<int>(threadIdx.x);
  const int heads = call.kv_heads * call.group;
  const int64_t index = blockIdx.x;
  const int row = divide(static_cast<int>(blockIdx.x), heads);
  const int kv_head = divide(static_cast<int>(blockIdx.x) - row * heads, call.group);
  const float* weights = call.weights + 2 * index * call.chunks;
  start_next_kernel();
  wait_for_previous_kernel();
  // Mostly what is needed first; where not, nothing depends on it.
  const PartialWeight early = load_weight(weights, lane, lane < call.chunks);
  const float factor = value_factor(call, kv_head);
  Place place;
  if (!find_place(call, row, place)) return;
  const Sight sight = sight_of(call, place.position);
  const int first = sight.begin / chunk_keys, last = (sight.end - 1) / chunk_keys;
  if (first == last) return;
  for (int d = 4 * lane; d - 4 * lane < head_dim; d += 4 * kWarp) {
    const bool exists = d < head_dim;
    const float* sums = call.sums + index * call.chunks * head_dim + d;
    float reference = kNoScore, total = 0.0f;
    Float4 out{};
    for (int chunk = first; chunk <= last; chunk += kWarp) {
      const int count = min(kWarp, last + 1 - chunk);
      const float* chunk_sums = sums + static_cast<int64_t>(chunk) * head_dim;
      PartialSums<kAhead> partial;
      partial.load(chunk_sums, exists ? count : 0, head_dim);
      const PartialWeight mine =
          chunk == 0 && lane < count ? early : load_weight(weights, chunk + lane, lane < count);
      float highest = fmaxf(reference, mine.reference);  // after this lane's chunk
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        highest = fmaxf(highest, __shfl_sync(kAllLanes, highest, max(lane - step, 0)));
      }
      const float left = __shfl_sync(kAllLanes, highest, max(lane - 1, 0));
      const Fold share = fold(lane == 0 ? reference : left, 0.0f, mine.reference, 0.0f);
      for (int i = 0; i < count; i += kAhead) {
        if (i > 0) {
          partial.load(chunk_sums + static_cast<int64_t>(i) * head_dim, exists ? count - i : 0,
                       head_dim);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (i + j >= count) break;
          Fold next;
          next.before = __shfl_sync(kAllLanes, share.before, i + j);
          next.next = __shfl_sync(kAllLanes, share.next, i + j);
          total = fmaf(__shfl_sync(kAllLanes, mine.total, i + j), next.next, total * next.before);
          out = folded_sum(next, out, partial.of[j]);
        }
      }
      reference = __shfl_sync(kAllLanes, highest, count - 1);
    }
    if (exists) store_out(call, index * head_dim + d, out, factor / total);
  }
}

}  // namespace quantkit::cuda
