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

// Folds the partial results of rows that see more than one chunk, a warp each, and stores them.
// Loads are many at a time: it is their latency that this kernel costs.
template <int kAhead>
__global__ void __launch_bounds__(kWarp)
    fold_chunks(const AttentionCall call, int chunk_keys, int head_dim) {
  const int lane = static_cast<int>(threadIdx.x);
  const int heads = call.kv_heads * call.group;
  const int64_t index = blockIdx.x;
  const int row = divide(static_cast<int>(blockIdx.x), heads);
  const int kv_head = divide(static_cast<int>(blockIdx.x) - row * heads, call.group);
  start_next_kernel();
  wait_for_previous_kernel();
  Place place;
  if (!find_place(call, row, place)) return;
  const Sight sight = sight_of(call, place.position);
  const int first = sight.begin / chunk_keys, last = (sight.end - 1) / chunk_keys;
  if (first == last) return;
  const float* weights = call.weights + 2 * index * call.chunks;
  const float* partial = call.sums + index * call.chunks * head_dim;
  for (int d = 4 * lane; d - 4 * lane < head_dim; d += 4 * kWarp) {
    const bool exists = d < head_dim;
    float reference = kNoScore, total = 0.0f;
    Float4 out{};
    for (int chunk = first; chunk <= last; chunk += kWarp) {
      const int count = min(kWarp, last + 1 - chunk);
      const bool mine = lane < count;
      const float my_reference = mine ? weights[2 * (chunk + lane)] : kNoScore;
      const float my_total = mine ? weights[2 * (chunk + lane) + 1] : 0.0f;
      float highest = fmaxf(reference, my_reference);  // after this lane's chunk
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        highest = fmaxf(highest, __shfl_sync(kAllLanes, highest, max(lane - step, 0)));
      }
      const float left = __shfl_sync(kAllLanes, highest, max(lane - 1, 0));
      const Fold share = fold(lane == 0 ? reference : left, 0.0f, my_reference, 0.0f);
      for (int i = 0; i < count; i += kAhead) {
        Float4 loaded[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          loaded[j] = exists && i + j < count
                          ? *reinterpret_cast<const Float4*>(partial + (chunk + i + j) * head_dim + d)
                          : Float4{};
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (i + j >= count) break;
          Fold next;
          next.before = __shfl_sync(kAllLanes, share.before, i + j);
          next.next = __shfl_sync(kAllLanes, share.next, i + j);
          total = fmaf(__shfl_sync(kAllLanes, my_total, i + j), next.next, total * next.before);
          out = folded_sum(next, out, loaded[j]);
        }
      }
      reference = __shfl_sync(kAllLanes, highest, count - 1);
    }
    const float factor = value_factor(call, kv_head);
    if (exists) store_out(call, index * head_dim + d, out, factor / total);
  }
}

}  // namespace quantkit::cuda
