// Attention for what attention.cuh does not cover: head dimensions that are no multiple of 16,
// float32, queries and caches of unlike types. Right and simple; several times slower, and it reads
// the cache once for every query head.
#pragma once

#include "attention_call.cuh"

namespace quantkit::cuda {

constexpr int kPlainWarps = kPlainThreads / kWarp;
constexpr int kPlainKeys = 4;  // whose loads are in flight together

template <class Cache>
QK_DEVICE float stored_value(const uint8_t* row, int d) {
  return widen(reinterpret_cast<const Cache*>(row)[d]);
}
template <>
QK_DEVICE float stored_value<E4M3>(const uint8_t* row, int d) {  // 1 / code_factor(call) of it
  return low_half<Half>(DecodeAny<E4M3>::pair(row[d]));
}
template <>
QK_DEVICE float stored_value<E3M4>(const uint8_t* row, int d) {
  return low_half<Half>(DecodeAny<E3M4>::pair(row[d]));
}

QK_DEVICE float load_float(const void* values, FloatType type, int64_t index) {
  switch (type) {
    case FloatType::kBFloat16: return widen(static_cast<const BFloat16*>(values)[index]);
    case FloatType::kFloat16: return widen(static_cast<const Half*>(values)[index]);
    default: return static_cast<const float*>(values)[index];
  }
}
QK_DEVICE void store_float(void* values, FloatType type, int64_t index, float value) {
  switch (type) {
    case FloatType::kBFloat16:
      static_cast<BFloat16*>(values)[index] = narrow<BFloat16>(value);
      break;
    case FloatType::kFloat16: static_cast<Half*>(values)[index] = narrow<Half>(value); break;
    default: static_cast<float*>(values)[index] = value;
  }
}

// A block for each token and head. Warp w takes positions w, w + 4, ... of what the token sees, lane
// l dimensions l, l + 32, ..., of which there are up to 32 * kParts.
template <class Cache, int kParts>
__global__ void __launch_bounds__(kPlainThreads)
    attend_plain(const AttentionCall call, int head_dim) {
  __shared__ float sums[kPlainWarps][kWarp * kParts];
  __shared__ float references[kPlainWarps], totals[kPlainWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int heads = call.kv_heads * call.group;
  const int row = static_cast<int>(blockIdx.x) / heads, head = static_cast<int>(blockIdx.x) % heads;
  const int kv_head = head / call.group;
  start_next_kernel();
  wait_for_previous_kernel();
  Place place;
  if (!find_place(call, row, place)) return;
  const Sight sight = sight_of(call, place.position);
  const int32_t* table = call.tables + place.sequence * call.table_width;
  const int64_t slot_bytes = static_cast<int64_t>(call.kv_heads) * head_dim * sizeof(Cache);
  const int64_t head_bytes = static_cast<int64_t>(kv_head) * head_dim * sizeof(Cache);
  const float factor = call.scale * key_factor(call, kv_head);

  float query[kParts], sum[kParts] = {};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int d = lane + kWarp * i;
    const int64_t index = row * call.query_stride + static_cast<int64_t>(head) * head_dim + d;
    query[i] = d < head_dim ? load_float(call.query, call.type, index) * factor : 0.0f;
  }
  float reference = kNoScore, total = 0.0f;
  for (int first = sight.begin + warp; first < sight.end; first += kPlainWarps * kPlainKeys) {
    const uint8_t* values[kPlainKeys];
    float scores[kPlainKeys];
#pragma unroll
    for (int k = 0; k < kPlainKeys; ++k) {
      const int key = min(first + kPlainWarps * k, sight.end - 1);
      const int64_t slot = slot_of(call, table, key);
      const uint8_t* keys = call.keys + slot * slot_bytes + head_bytes;
      values[k] = call.values + slot * slot_bytes + head_bytes;
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int d = lane + kWarp * i;
        if (d < head_dim) score = fmaf(query[i], stored_value<Cache>(keys, d), score);
      }
      scores[k] = score;
    }
    float highest = reference;
#pragma unroll
    for (int k = 0; k < kPlainKeys; ++k) {
      scores[k] = warp_sum(scores[k]);
      if (call.cap != 0.0f) scores[k] = capped(call, scores[k]);
      if (first + kPlainWarps * k < sight.end) highest = fmaxf(highest, scores[k]);
    }
    const float keep = exp2_flush(reference - highest);
    reference = highest;
    total *= keep;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum[i] *= keep;
#pragma unroll
    for (int k = 0; k < kPlainKeys; ++k) {
      if (first + kPlainWarps * k >= sight.end) break;
      const float weight = exp2_flush(scores[k] - highest);
      total += weight;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int d = lane + kWarp * i;
        if (d < head_dim) sum[i] = fmaf(weight, stored_value<Cache>(values[k], d), sum[i]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kParts; ++i) sums[warp][lane + kWarp * i] = sum[i];
  if (lane == 0) {
    references[warp] = reference;
    totals[warp] = total;
  }
  __syncthreads();
  float highest = references[0];
  for (int w = 1; w < kPlainWarps; ++w) highest = fmaxf(highest, references[w]);
  total = 0.0f;
  float share[kPlainWarps];
  for (int w = 0; w < kPlainWarps; ++w) {
    share[w] = exp2_flush(references[w] - highest);
    total = fmaf(totals[w], share[w], total);
  }
  const float finish = value_factor(call, kv_head) / total;
  for (int d = static_cast<int>(threadIdx.x); d < head_dim; d += kPlainThreads) {
    float all = 0.0f;
    for (int w = 0; w < kPlainWarps; ++w) all = fmaf(sums[w][d], share[w], all);
    store_float(call.out, call.type, static_cast<int64_t>(blockIdx.x) * head_dim + d, all * finish);
  }
}

}  // namespace quantkit::cuda
