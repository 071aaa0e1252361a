#include "grouped_linear.h"

#include <algorithm>

#include "buffer.h"

namespace quantkit {
namespace {

// Consecutive ranges of numbers, one after another; finds the range of a number.
class Ranges {
 public:
  void add(int64_t size) { ends_.push_back(total() + size); }
  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  int64_t start(size_t range) const { return range == 0 ? 0 : ends_[range - 1]; }
  size_t find(int64_t number) const {
    return std::upper_bound(ends_.begin(), ends_.end(), number) - ends_.begin();
  }

 private:
  std::vector<int64_t> ends_;
};

// The passes of all calls, those of one call side by side, and where they are packed.
struct Passes {
  std::vector<LinearPass> list;
  Ranges of_call;
  Ranges pack_units;
  Ranges units;  // of calls
  int64_t scratch_size = 0;
  Buffer packed;

  Passes(const std::vector<LinearCall>& calls, const KernelSet& kernels) {
    for (const LinearCall& call : calls) add(call, kernels);
    int64_t size = 0;
    for (const LinearPass& pass : list) size += pass.buffer_size();
    packed = aligned_buffer(size);
    float* next = packed.get();
    for (LinearPass& pass : list) {
      pass.use(next);
      next += pass.buffer_size();
    }
  }

  void add(const LinearCall& call, const KernelSet& kernels) {
    const int64_t rows = call.empty() ? 1 : rows_of_pass(call, kernels);
    const size_t first = list.size();
    for (int64_t row = 0; !call.empty() && row < call.x.batch; row += rows) {
      list.push_back(pass_at(call, row, kernels));
      pack_units.add(list.back().pack_units());
      scratch_size = std::max(scratch_size, list.back().scratch_size());
    }
    const auto passes = static_cast<int64_t>(list.size() - first);
    of_call.add(passes);
    units.add(passes == 0 ? 0 : passes * list[first].units());
  }

  void pack(int64_t unit) const {
    const size_t pass = pack_units.find(unit);
    list[pass].pack_unit(unit - pack_units.start(pass));
  }

  // Passes of a few rows take turns, so that their weights are read once; of many, each has packed
  // as much as the cache holds.
  void multiply(int64_t unit, float* scratch) const {
    const size_t call = units.find(unit);
    const int64_t first = of_call.start(call);
    const int64_t passes = of_call.start(call + 1) - first;
    const int64_t each = list[first].units();
    const int64_t at = unit - units.start(call);
    const bool by_pass = list[first].tiles;
    list[first + (by_pass ? at / each : at % passes)].multiply(by_pass ? at % each : at / passes,
                                                               scratch);
  }
};

}  // namespace

void run_grouped(const std::vector<LinearCall>& calls, const KernelSet& kernels, Team& team) {
  const Passes passes(calls, kernels);
  const Buffer scratch = aligned_buffer(passes.scratch_size * team.size());
  team.for_each(passes.pack_units.total(), [&](int64_t unit, int64_t) { passes.pack(unit); });
  team.for_each(passes.units.total(), [&](int64_t unit, int64_t worker) {
    passes.multiply(unit, scratch.get() + worker * passes.scratch_size);
  });
}

}  // namespace quantkit
