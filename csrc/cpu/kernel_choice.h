// One token a row: the largest score without or with Gumbel noise, which is a function of the row's
// key and the token id (quantkit/runtime/noise.py). In the compiler's own vectors, of 64 bytes for
// every instruction set: integers of 64 bits have no others here.
//
// Most noise is never computed. Likely tokens give a score to beat; one far below the likeliest
// beats it only with noise so large that its bits show it, before two logarithms are taken.
// Part of kernel_template.h; include only that.
#pragma once

#include "kernel_common.h"

namespace quantkit {
namespace {

typedef float Scores __attribute__((vector_size(64)));
typedef int32_t Flags __attribute__((vector_size(64)));
typedef uint64_t NoiseBits __attribute__((vector_size(64)));

constexpr int64_t kScores = 16;
constexpr int64_t kNoiseBits = 8;
// Tokens whose noise is looked at together.
constexpr int64_t kChoiceBlock = 32;
// Tokens that are passed over together when none is of interest.
constexpr int64_t kScanned = 4 * kScores;

// Scores below the largest by more than this are far, in nats: one in exp(kNear) of their tokens has
// noise that could make up for it.
constexpr float kNear = 7.0f;

struct Choice {
  double score;
  int64_t column;  // negative for none

  // Of equals the first stays; a NaN wins over all, as in torch.argmax.
  void meet(double other, int64_t other_column) {
    if (score != score) return;
    if (column < 0 || other > score || other != other) *this = {other, other_column};
  }
};

// Makes of key + (token + 1) * kGolden the 52 bits behind u: SplitMix64 started at the key, its
// number token + 1. T: an integer or a vector of them, in place, as vectors have no portable ABI.
template <class T>
inline __attribute__((always_inline)) void mix(T& bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  bits = (bits ^ (bits >> 31)) >> 12;
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

inline uint64_t noise_bits(uint64_t key, int64_t token) {
  uint64_t bits = key + (static_cast<uint64_t>(token) + 1) * kGolden;
  mix(bits);
  return bits;
}

// Which token a column is: its own number.
struct AllTokens {
  int64_t at(int64_t column) const { return column; }
  // Noise of kNoiseBits columns.
  __attribute__((always_inline)) void noise(uint64_t key, int64_t column, NoiseBits& bits) const {
    QK_UNROLL for (int64_t i = 0; i < kNoiseBits; ++i) bits[i] = (i + 1) * kGolden;
    bits += key + static_cast<uint64_t>(column) * kGolden;
    mix(bits);
  }
};

// Which token a column is: one of a list.
struct SomeTokens {
  const int64_t* ids;

  int64_t at(int64_t column) const { return ids[column]; }
  __attribute__((always_inline)) void noise(uint64_t key, int64_t column, NoiseBits& bits) const {
    __builtin_memcpy(&bits, ids + column, sizeof bits);
    bits = (bits + 1) * kGolden + key;
    mix(bits);
  }
};

inline double gumbel(uint64_t bits) {
  return -__builtin_log(-__builtin_log((static_cast<double>(bits) + 0.5) * 0x1p-52));
}

// A number of bits such that it and all smaller ones give less noise than `noise`.
inline uint64_t bits_below(double noise) {
  const double u = __builtin_exp(-__builtin_exp(-noise));
  // A margin for the roundings of four logarithms and exponentials; near 1, u has few digits.
  const double bits = u * 0x1p52 * (1.0 - 1e-12) - 16.0;
  return bits > 0.0 ? static_cast<uint64_t>(bits) : 0;
}

// The largest score of a row, NaN if there is one.
inline float peak_score(const float* row, int64_t columns) {
  Scores peak = Scores{} - __builtin_inff();
  Flags nans{};
  for (int64_t column = 0; column < columns; column += kScores) {
    Scores score = Scores{} - __builtin_inff();
    if (column + kScores <= columns) {
      __builtin_memcpy(&score, row + column, sizeof score);
    } else {
      __builtin_memcpy(&score, row + column, (columns - column) * sizeof(float));
    }
    peak = score > peak ? score : peak;
    nans |= score != score;
  }
  float highest = peak[0];
  for (int64_t i = 0; i < kScores; ++i) {
    if (nans[i] != 0) return __builtin_nanf("");
    highest = peak[i] > highest ? peak[i] : highest;
  }
  return highest;
}

// Where the next kScanned columns are of which `test` flags one, or fewer are left.
template <class Test>
inline int64_t next_flagged(const float* row, int64_t column, int64_t columns, const Test& test) {
  for (; column + kScanned <= columns; column += kScanned) {
    Flags some{};
    QK_UNROLL for (int64_t i = 0; i < kScanned; i += kScores) {
      Scores score;
      __builtin_memcpy(&score, row + column + i, sizeof score);
      test(score, some);
    }
    int32_t any = 0;
    QK_UNROLL for (int64_t i = 0; i < kScores; ++i) any |= some[i];
    if (any != 0) break;
  }
  return column;
}

inline int64_t likeliest_column(const float* row, int64_t columns) {
  const float peak = peak_score(row, columns);
  int64_t column = 0;
  if (peak == peak) {
    const auto largest = [&](const Scores& score, Flags& some) { some |= score == peak; };
    column = next_flagged(row, 0, columns, largest);
    while (row[column] != peak) ++column;
  } else {
    while (row[column] == row[column]) ++column;
  }
  return column;
}

// The best of columns [begin, end) that are far and allowed, if their bits are at least `least`.
template <class Tokens>
inline void meet_far(const float* row, int64_t begin, int64_t end, Tokens tokens, uint64_t key,
                     float near, uint64_t least, Choice* best) {
  for (int64_t column = begin; column < end; ++column) {
    const uint64_t bits = noise_bits(key, tokens.at(column));
    if (bits < least || !(row[column] <= near) || row[column] == -__builtin_inff()) continue;
    best->meet(row[column] + gumbel(bits), column);
  }
}

template <class Tokens>
inline int64_t noisiest_column(const float* row, int64_t columns, Tokens tokens, uint64_t key) {
  const float near = peak_score(row, columns) - kNear;
  const auto is_near = [&](const Scores& score, Flags& some) { some |= ~(score <= near); };
  Choice best{0.0, -1};
  for (int64_t first = 0; first < columns; first += kScanned) {
    first = next_flagged(row, first, columns, is_near);
    for (int64_t column = first; column < at_most(first + kScanned, columns); ++column) {
      if (row[column] <= near) continue;  // no NaN is
      best.meet(row[column] + gumbel(noise_bits(key, tokens.at(column))), column);
    }
  }
  if (best.column < 0) return 0;  // nothing is above -infinity
  const uint64_t least = bits_below(best.score - near);
  Choice far{0.0, -1};
  int64_t column = 0;
  for (; column + kChoiceBlock <= columns; column += kChoiceBlock) {
    auto some = NoiseBits{} < 0;
    QK_UNROLL for (int64_t i = 0; i < kChoiceBlock; i += kNoiseBits) {
      NoiseBits bits;
      tokens.noise(key, column + i, bits);
      some |= bits >= least;
    }
    int64_t any = 0;
    QK_UNROLL for (int64_t i = 0; i < kNoiseBits; ++i) any |= some[i];
    if (any != 0) meet_far(row, column, column + kChoiceBlock, tokens, key, near, least, &far);
  }
  meet_far(row, column, columns, tokens, key, near, least, &far);
  const bool wins = far.score > best.score || (far.score == best.score && far.column < best.column);
  return far.column >= 0 && wins ? far.column : best.column;
}

inline void choose_tokens(const ChoiceTask& task, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* row = task.scores + i * task.columns;
    task.tokens[i] = task.keys == nullptr
                         ? likeliest_column(row, task.columns)
                         : noisiest_column(row, task.columns, AllTokens{},
                                           static_cast<uint64_t>(task.keys[i]));
  }
}

// Up to kLanes scores; what is beyond `count` reads as a token that is not allowed.
template <class Isa>
inline typename Isa::Lanes load_scores(const float* source, int64_t count) {
  if (count >= Isa::kLanes) return Isa::Lanes::from(source);
  float padded[Isa::kLanes];
  for (int lane = 0; lane < Isa::kLanes; ++lane) padded[lane] = -__builtin_inff();
  __builtin_memcpy(padded, source, count * sizeof(float));
  return Isa::Lanes::from(padded);
}

// weights = (scores - peak) / temperature; returns the sum of their exponentials.
template <class Isa>
float weigh(const float* scores, int64_t columns, float temperature, float* weights) {
  using Lanes = typename Isa::Lanes;
  const Lanes minus = Lanes::broadcast(-peak_score(scores, columns));
  const Lanes divisor = Lanes::broadcast(temperature);
  Lanes sum = Lanes::zero();
  for (int64_t column = 0; column < columns; column += Isa::kLanes) {
    const int64_t left = columns - column;
    const Lanes score = load_scores<Isa>(scores + column, left);
    const Lanes weight = Lanes::div(Lanes::add(score, minus), divisor);
    store_lanes<Lanes, Isa::kLanes>(weight, weights + column, left);
    sum = Lanes::add(sum, Lanes::exp(weight));
  }
  return sum.sum();
}

template <class Isa>
void draw_tokens(const DrawTask& task, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* scores = task.scores + i * task.columns;
    float* weights = task.weights + i * task.columns;
    const float sum = weigh<Isa>(scores, task.columns, task.temperature, weights);
    int64_t column;
    if (task.keys == nullptr) {
      column = likeliest_column(scores, task.columns);
    } else {
      const auto key = static_cast<uint64_t>(task.keys[i]);
      column = task.token_ids == nullptr
                   ? noisiest_column(weights, task.columns, AllTokens{}, key)
                   : noisiest_column(weights, task.columns, SomeTokens{task.token_ids}, key);
    }
    task.tokens[i] = task.token_ids == nullptr ? column : task.token_ids[column];
    task.likelihoods[i] = __builtin_expf(weights[column]) / sum;
  }
}

}  // namespace
}  // namespace quantkit
