// Attention over the paged cache, one tile (tokens of one sequence, one KV head) and one partition
// of the keys at a time. Codes are decoded once for all queries of a tile.
//
// Every query attends to exactly the keys it sees; what another query of the tile sees costs it
// nothing but time. Scores: one vector of float32 sums per key, in the order of Codes' parts, then
// its lanes. Softmax: sums per lane, then lanes. Output: keys in ascending order. All of it is
// anchored at the partition's first key, so a query's result does not depend on its tile.
// Part of kernel_template.h; include only that.
#pragma once

#include "kernel_attention_tile.h"

namespace quantkit {
namespace {

constexpr float kNoScore = -3.0e38f;  // below any score, and finite: no NaN from differences

// Scores of one query with the kLanes keys at `keys` in decoded memory.
template <class Isa>
inline typename Isa::Lanes score(const float* query, const float* keys, int64_t padded) {
  using Lanes = typename Isa::Lanes;
  Lanes sums[Isa::kLanes];
  QK_UNROLL for (int key = 0; key < Isa::kLanes; ++key) sums[key] = Lanes::zero();
  for (int64_t i = 0; i < padded; i += Isa::kLanes, keys += kTileKeys * Isa::kLanes) {
    const Lanes part = Lanes::load(query + i);
    QK_UNROLL for (int key = 0; key < Isa::kLanes; ++key) {
      sums[key] = Lanes::fma(part, Lanes::load(keys + key * Isa::kLanes), sums[key]);
    }
  }
  return Lanes::sums(sums);
}

// scores[row, key - first] for all keys of the partition that a row sees, and some more.
template <class Isa, class Format>
void attention_scores(const AttentionTask& task, const AttentionTile& tile, Range partition,
                      const float* query, const Scratch& scratch) {
  using Lanes = typename Isa::Lanes;
  const int64_t padded = padded_dim<Isa>(task);
  const float scale =
      task.k_scale == nullptr ? 1.0f : task.k_scale[tile.kv_head * task.k_scale_stride];
  const Lanes factor =
      Lanes::broadcast(task.softmax_scale * scale * Stored<Isa, Format>::type::kFactor);
  const int64_t seen = seen_by(task, tile, 0).within(partition.begin, partition.end).begin;
  const int64_t first = partition.begin + (seen - partition.begin) / kTileKeys * kTileKeys;
  for (int64_t key = first; key < partition.end; key += kTileKeys) {
    const Range keys{key, at_most(key + kTileKeys, partition.end)};
    decode_keys<Isa, Format>(task, tile, task.keys, keys, scratch.decoded);
    clear_unused<Isa>(keys.end - keys.begin, padded, scratch.decoded);
    for (int64_t row = 0; row < tile.tokens * task.group; ++row) {
      const Range visible = seen_by(task, tile, row / task.group).within(keys.begin, keys.end);
      float* scores = scratch.scores + row * kPartitionKeys + key - partition.begin;
      for (int64_t i = 0; i < keys.end - keys.begin; i += Isa::kLanes) {
        if (visible.within(key + i, key + i + Isa::kLanes).empty()) continue;
        const float* decoded = scratch.decoded + i * Isa::kLanes;
        const Lanes sums = score<Isa>(query + row * padded, decoded, padded);
        const Lanes scaled = Lanes::mul(sums, factor);
        const Lanes result = task.softcap > 0 ? soft_capped(scaled, task.softcap) : scaled;
        result.store(scores + i);
      }
    }
  }
}

// Replaces the scores of `seen` (relative to the partition) by exponentials of their distance to
// the highest; those around it in the same vectors become zero.
template <class Isa>
inline void exponentials(float* scores, Range seen, float* highest, float* total) {
  using Lanes = typename Isa::Lanes;
  const int64_t begin = seen.begin / Isa::kLanes * Isa::kLanes;
  const int64_t end = round_up(seen.end, Isa::kLanes);
  for (int64_t i = begin; i < seen.begin; ++i) scores[i] = -__builtin_inff();
  for (int64_t i = seen.end; i < end; ++i) scores[i] = -__builtin_inff();
  Lanes peak = Lanes::broadcast(kNoScore);
  for (int64_t i = begin; i < end; i += Isa::kLanes) {
    peak = Lanes::max(peak, Lanes::load(scores + i));
  }
  *highest = peak.highest();
  const Lanes minus = Lanes::broadcast(-*highest);
  Lanes sum = Lanes::zero();
  for (int64_t i = begin; i < end; i += Isa::kLanes) {
    const Lanes weight = Lanes::exp(Lanes::add(Lanes::load(scores + i), minus));
    weight.store(scores + i);
    sum = Lanes::add(sum, weight);
  }
  *total = sum.sum();
}

// output[kR rows] += sum over keys of weight[row, key] * values[key], the rows seeing the same
// keys.
template <class Isa, int kR>
inline void weigh_rows(const float* weights, const float* values, int64_t count, int64_t padded,
                       float* output) {
  using Lanes = typename Isa::Lanes;
  constexpr int kParts = Isa::kColumns / Isa::kLanes;
  for (int64_t column = 0; column < padded; column += Isa::kColumns) {
    Lanes sum[kR][kParts];
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      QK_UNROLL for (int i = 0; i < kParts; ++i) {
        sum[r][i] = Lanes::load(output + r * padded + column + i * Isa::kLanes);
      }
    }
    for (int64_t key = 0; key < count; ++key) {
      const float* value = values + column * kTileKeys + key * Isa::kLanes;
      Lanes weight[kR];
      QK_UNROLL for (int r = 0; r < kR; ++r) {
        weight[r] = Lanes::broadcast(weights[r * kPartitionKeys + key]);
      }
      QK_UNROLL for (int i = 0; i < kParts; ++i) {
        const Lanes part = Lanes::load(value + i * kTileKeys * Isa::kLanes);
        QK_UNROLL for (int r = 0; r < kR; ++r) sum[r][i] = Lanes::fma(weight[r], part, sum[r][i]);
      }
    }
    QK_UNROLL for (int r = 0; r < kR; ++r) {
      QK_UNROLL for (int i = 0; i < kParts; ++i) {
        sum[r][i].store(output + r * padded + column + i * Isa::kLanes);
      }
    }
  }
}

template <class Isa, class Format>
void attention_output(const AttentionTask& task, const AttentionTile& tile, Range partition,
                      const Scratch& scratch, float* output) {
  const int64_t padded = padded_dim<Isa>(task);
  __builtin_memset(output, 0, tile.tokens * task.group * padded * sizeof(float));
  const int64_t first = seen_by(task, tile, 0).within(partition.begin, partition.end).begin;
  for (int64_t key = first; key < partition.end; key += kTileKeys) {
    const Range keys{key, at_most(key + kTileKeys, partition.end)};
    decode_keys<Isa, Format>(task, tile, task.values, keys, scratch.decoded);
    for (int64_t token = 0; token < tile.tokens; ++token) {
      const Range seen = seen_by(task, tile, token).within(keys.begin, keys.end);
      if (seen.empty()) continue;
      const float* values = scratch.decoded + (seen.begin - key) * Isa::kLanes;
      const int64_t count = seen.end - seen.begin;
      for (int64_t row = token * task.group; row < (token + 1) * task.group;) {
        const float* weights = scratch.scores + row * kPartitionKeys + seen.begin - partition.begin;
        float* target = output + row * padded;
        switch (at_most((token + 1) * task.group - row, 4)) {
          case 1:
            weigh_rows<Isa, 1>(weights, values, count, padded, target);
            row += 1;
            break;
          case 2:
            weigh_rows<Isa, 2>(weights, values, count, padded, target);
            row += 2;
            break;
          case 3:
            weigh_rows<Isa, 3>(weights, values, count, padded, target);
            row += 3;
            break;
          default: weigh_rows<Isa, 4>(weights, values, count, padded, target); row += 4;
        }
      }
    }
  }
}

template <class Isa, class Format>
void attend_format(const AttentionTask& task, const AttentionTile& tile, Range partition,
                   const float* query, float* partial, const Scratch& scratch) {
  const Partial result = Partial::at(partial, tile.tokens * task.group);
  attention_scores<Isa, Format>(task, tile, partition, query, scratch);
  for (int64_t row = 0; row < tile.tokens * task.group; ++row) {
    result.highest[row] = kNoScore;
    result.total[row] = 0.0f;
    const Range seen = seen_by(task, tile, row / task.group).within(partition.begin, partition.end);
    if (seen.empty()) continue;
    const Range relative{seen.begin - partition.begin, seen.end - partition.begin};
    exponentials<Isa>(scratch.scores + row * kPartitionKeys, relative, result.highest + row,
                      result.total + row);
  }
  attention_output<Isa, Format>(task, tile, partition, scratch, result.output);
}

template <class Isa>
void attend_head(const AttentionTask& task, const AttentionTile& tile, Range partition,
                 const float* query, float* partial, const Scratch& scratch) {
  switch (task.cache_type) {
    case WeightFormat::kFloat32:
      return attend_format<Isa, float>(task, tile, partition, query, partial, scratch);
    case WeightFormat::kBFloat16:
      return attend_format<Isa, BFloat16>(task, tile, partition, query, partial, scratch);
    case WeightFormat::kFloat16:
      return attend_format<Isa, Half>(task, tile, partition, query, partial, scratch);
    case WeightFormat::kE3M4:
      return attend_format<Isa, E3M4>(task, tile, partition, query, partial, scratch);
    default: return attend_format<Isa, E4M3>(task, tile, partition, query, partial, scratch);
  }
}

template <class Isa>
void attend(const AttentionTask& task, const AttentionTile& first, int64_t number,
            const AttentionHeads& heads, float* data) {
  const Scratch scratch = Scratch::at(data, first.tokens * task.group);
  const Range partition = partition_of(first, number);
  AttentionTile tile = first;
  for (int64_t i = 0; i < heads.count; ++i, ++tile.kv_head) {
    attend_head<Isa>(task, tile, partition, heads.query + i * heads.query_stride,
                     heads.partial + i * heads.partial_stride, scratch);
  }
}

template <class Isa>
void attention_fold(const AttentionTask& task, int64_t tokens, float* folded,
                    const float* partial) {
  using Lanes = typename Isa::Lanes;
  const int64_t rows = tokens * task.group;
  const int64_t padded = padded_dim<Isa>(task);
  const Partial sum = Partial::at(folded, rows);
  const Partial next = Partial::at(const_cast<float*>(partial), rows);
  for (int64_t first = 0; first < rows; first += Isa::kLanes) {
    const Lanes old_highest = Lanes::load(sum.highest + first);
    const Lanes new_highest = Lanes::load(next.highest + first);
    const Lanes highest = Lanes::max(old_highest, new_highest);
    const Lanes minus = Lanes::mul(highest, Lanes::broadcast(-1.0f));
    const Lanes old_factor = Lanes::exp(Lanes::add(old_highest, minus));
    const Lanes new_factor = Lanes::exp(Lanes::add(new_highest, minus));
    const Lanes old_total = Lanes::mul(Lanes::load(sum.total + first), old_factor);
    highest.store(sum.highest + first);
    Lanes::fma(Lanes::load(next.total + first), new_factor, old_total).store(sum.total + first);
    alignas(64) float factors[2][Isa::kLanes];
    old_factor.store(factors[0]);
    new_factor.store(factors[1]);
    for (int64_t row = first; row < at_most(first + Isa::kLanes, rows); ++row) {
      const Lanes of_old = Lanes::broadcast(factors[0][row - first]);
      const Lanes of_new = Lanes::broadcast(factors[1][row - first]);
      for (int64_t i = row * padded; i < (row + 1) * padded; i += Isa::kLanes) {
        const Lanes scaled = Lanes::mul(Lanes::load(sum.output + i), of_old);
        Lanes::fma(Lanes::load(next.output + i), of_new, scaled).store(sum.output + i);
      }
    }
  }
}

template <class Isa, class T>
void finish_typed(const AttentionTask& task, const AttentionTile& tile, const Partial& folded,
                  float factor, float* natural) {
  using Lanes = typename Isa::Lanes;
  const int64_t padded = padded_dim<Isa>(task);
  for (int64_t row = 0; row < tile.tokens * task.group; ++row) {
    const int64_t token = tile.row + row / task.group;
    const int64_t head = tile.kv_head * task.group + row % task.group;
    T* out =
        static_cast<T*>(task.out) + (token * task.kv_heads * task.group + head) * task.head_dim;
    const float* output = folded.output + row * padded;
    for (int64_t i = 0; i < padded; ++i) {
      const int64_t chunk = i / Isa::kColumns * Isa::kColumns;
      natural[i] = output[chunk + Isa::slot(static_cast<int>(i % Isa::kColumns))];
    }
    const Lanes scale = Lanes::broadcast(factor / folded.total[row]);
    for (int64_t i = 0; i < task.head_dim; i += Isa::kLanes) {
      const Lanes value = Lanes::mul(Lanes::load(natural + i), scale);
      store_lanes<Lanes, Isa::kLanes>(value, out + i, task.head_dim - i);
    }
  }
}

template <class Isa>
void attention_finish(const AttentionTask& task, const AttentionTile& tile, const float* data,
                      float* scratch) {
  const Partial folded = Partial::at(const_cast<float*>(data), tile.tokens * task.group);
  float factor = 1.0f;
  if (task.v_scale != nullptr) {
    const bool is_e3m4 = task.cache_type == WeightFormat::kE3M4;
    factor = task.v_scale[tile.kv_head * task.v_scale_stride] *
             (is_e3m4 ? Isa::template Codes<E3M4>::kFactor : Isa::template Codes<E4M3>::kFactor);
  }
  switch (task.type) {
    case FloatType::kFloat32: return finish_typed<Isa, float>(task, tile, folded, factor, scratch);
    case FloatType::kBFloat16:
      return finish_typed<Isa, BFloat16>(task, tile, folded, factor, scratch);
    case FloatType::kFloat16: return finish_typed<Isa, Half>(task, tile, folded, factor, scratch);
  }
}

}  // namespace
}  // namespace quantkit
