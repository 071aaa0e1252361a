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

// Scores below the largest by more than this are far, in nats: one in exp(kNear) of their tokens has
// noise that could make up for it.
constexpr float kNear = 7.0f;

struct Choice {
  double score;
  int64_t token;  // negative for none

  // Of equals the first stays; a NaN wins over all, as in torch.argmax.
  void meet(double other, int64_t other_token) {
    if (score != score) return;
    if (token < 0 || other > score || other != other) *this = {other, other_token};
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
  for (int64_t token = 0; token < columns; token += kScores) {
    Scores score = Scores{} - __builtin_inff();
    if (token + kScores <= columns) {
      __builtin_memcpy(&score, row + token, sizeof score);
    } else {
      __builtin_memcpy(&score, row + token, (columns - token) * sizeof(float));
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

inline int64_t likeliest_token(const float* row, int64_t columns) {
  const float peak = peak_score(row, columns);
  int64_t token = 0;
  if (peak == peak) {
    while (row[token] != peak) ++token;
  } else {
    while (row[token] == row[token]) ++token;
  }
  return token;
}

// The best of tokens [begin, end) that are far and allowed, if their bits are at least `least`.
inline void meet_far(const float* row, int64_t begin, int64_t end, uint64_t key, float near,
                     uint64_t least, Choice* best) {
  for (int64_t token = begin; token < end; ++token) {
    const uint64_t bits = noise_bits(key, token);
    if (bits < least || !(row[token] <= near) || row[token] == -__builtin_inff()) continue;
    best->meet(row[token] + gumbel(bits), token);
  }
}

inline int64_t noisiest_token(const float* row, int64_t columns, uint64_t key) {
  const float near = peak_score(row, columns) - kNear;
  Choice best{0.0, -1};
  for (int64_t token = 0; token < columns; ++token) {
    if (row[token] <= near) continue;  // no NaN is
    best.meet(row[token] + gumbel(noise_bits(key, token)), token);
  }
  if (best.token < 0) return 0;  // nothing is above -infinity
  const uint64_t least = bits_below(best.score - near);
  Choice far{0.0, -1};
  NoiseBits start;
  for (int64_t i = 0; i < kNoiseBits; ++i) start[i] = key + (i + 1) * kGolden;
  int64_t token = 0;
  for (; token + kChoiceBlock <= columns; token += kChoiceBlock) {
    auto some = start < 0;
    QK_UNROLL for (int64_t i = 0; i < kChoiceBlock; i += kNoiseBits) {
      NoiseBits bits = start;
      mix(bits);
      some |= bits >= least;
      start += kNoiseBits * kGolden;
    }
    int64_t any = 0;
    QK_UNROLL for (int64_t i = 0; i < kNoiseBits; ++i) any |= some[i];
    if (any != 0) meet_far(row, token, token + kChoiceBlock, key, near, least, &far);
  }
  meet_far(row, token, columns, key, near, least, &far);
  const bool wins = far.score > best.score || (far.score == best.score && far.token < best.token);
  return far.token >= 0 && wins ? far.token : best.token;
}

inline void choose_tokens(const ChoiceTask& task, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* row = task.scores + i * task.columns;
    task.tokens[i] = task.keys == nullptr
                         ? likeliest_token(row, task.columns)
                         : noisiest_token(row, task.columns, static_cast<uint64_t>(task.keys[i]));
  }
}

}  // namespace
}  // namespace quantkit
