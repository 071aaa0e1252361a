// read_memory: how fast memory can be read, for comparison with kernels that have to read it.

#include <atomic>

#include "checks.h"
#include "ops.h"
#include "team.h"

namespace quantkit {
namespace {

constexpr int64_t kWordsPerUnit = 128 * 1024;
constexpr int64_t kLineWords = 8;
constexpr int64_t kWordsAhead = 512;  // to L2, as far ahead as it takes to keep it busy

uint64_t sum_of(const uint64_t* words, int64_t count) {
  uint64_t sums[kLineWords] = {};
  int64_t i = 0;
  for (; i + kLineWords <= count; i += kLineWords) {
    __builtin_prefetch(words + i + kWordsAhead, 0, 2);
    for (int64_t lane = 0; lane < kLineWords; ++lane) sums[lane] += words[i + lane];
  }
  for (; i < count; ++i) sums[0] += words[i];
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

Tensor read_memory(Tensor x) {
  const char* op = "read_memory";
  if (x.scalar_type() != ScalarType::Long) fail(op, "x", "int64", dtype_text(x.scalar_type()));
  check_layout(op, "x", x);
  const auto* words = static_cast<const uint64_t*>(x.const_data_ptr());
  const int64_t count = x.numel();
  std::atomic<uint64_t> total{0};
  Team::run(0, cpu_kernels(), [&](Team& team) {
    team.for_each((count + kWordsPerUnit - 1) / kWordsPerUnit, [&](int64_t unit, int64_t) {
      const int64_t begin = unit * kWordsPerUnit;
      total += sum_of(words + begin, std::min(kWordsPerUnit, count - begin));
    });
  });
  Tensor out = torch::stable::new_empty(x, {1});
  *static_cast<uint64_t*>(out.mutable_data_ptr()) = total;
  return out;
}

}  // namespace quantkit
