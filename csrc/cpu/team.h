// Threads that work through one phase after another inside a single parallel region. Waking torch's
// threads costs more than many a phase of a decode step, and equal shares are not done at the same
// time where memory is the limit: here a phase starts by a store, and who is done takes from others.
//
// One thread drives: it runs code between phases, and publishes each phase. The others help. Nobody
// waits for a helper that has not come, so a team works with any number of them, none included.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "kernels.h"

namespace quantkit {

class Team {
 public:
  // Calls drive(team) on one of up to `threads` threads; 0 stands for as many as torch uses. All of
  // them are ready for `kernels`.
  template <class Drive>
  static void run(int64_t threads, const KernelSet& kernels, const Drive& drive) {
    const auto available = static_cast<int64_t>(torch::stable::get_num_threads());
    Team team(threads > 0 ? std::min(threads, available) : available);
    torch::stable::parallel_for(0, team.size_, 1, [&](int64_t, int64_t) {
      const int64_t worker = team.arrived_.fetch_add(1, std::memory_order_relaxed);
      const Within within(kernels);
      if (worker == 0) {
        const Finish at_the_end{team};  // also when it throws
        drive(team);
      } else {
        team.help(worker);
      }
    });
  }

  // Workers are numbered from 0 below this.
  int64_t size() const { return size_; }

  // Calls body(unit, worker) for every unit in [0, count), below 2^31, in any order. Each worker has
  // a range of its own and takes it in ascending order. For the driving thread only; no exceptions.
  template <class Body>
  void for_each(int64_t count, const Body& body) {
    if (size_ == 1 || count <= 1) {
      for (int64_t unit = 0; unit < count; ++unit) body(unit, 0);
      return;
    }
    call_ = [](const void* context, int64_t unit, int64_t worker) {
      (*static_cast<const Body*>(context))(unit, worker);
    };
    context_ = &body;
    done_.store(0, std::memory_order_relaxed);
    for (int64_t i = 0; i < size_; ++i) {
      const int64_t begin = count * i / size_;
      const int64_t end = count * (i + 1) / size_;
      ranges_[i].left.store(begin | end << 32, std::memory_order_release);
    }
    while (work(0)) {
    }
    for (Patience patience; done_.load(std::memory_order_acquire) < count;) patience.wait();
  }

 private:
  // [next, end): the next unit in the low half. Who raises `next` by exchange owns the unit, and
  // then the phase cannot end before it is done: what the phase calls is read only after that.
  struct alignas(64) Range {
    std::atomic<int64_t> left{0};
  };

  // Between KernelSet::enter and leave.
  struct Within {
    const KernelSet& kernels;

    explicit Within(const KernelSet& set) : kernels(set) {
      if (kernels.enter != nullptr) kernels.enter();
    }
    ~Within() {
      if (kernels.leave != nullptr) kernels.leave();
    }
    Within(const Within&) = delete;
  };

  struct Finish {
    Team& team;
    ~Finish() { team.finished_.store(true, std::memory_order_release); }
  };

  // Spins for as long as another thread may need for a phase, then lets others have the processor.
  class Patience {
   public:
    void wait() {
      if (++turns_ > 3000) {
        std::this_thread::yield();
        return;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }

   private:
    int turns_ = 0;
  };

  explicit Team(int64_t size) : size_(size), ranges_(new Range[size]) {}

  void help(int64_t worker) {
    for (Patience patience; !finished_.load(std::memory_order_acquire);) {
      if (work(worker)) {
        patience = Patience();
      } else {
        patience.wait();
      }
    }
  }

  // Does one unit, of the worker's own range if that has any; returns whether there was one.
  bool work(int64_t worker) {
    for (int64_t i = 0; i < size_; ++i) {
      std::atomic<int64_t>& left = ranges_[(worker + i) % size_].left;
      int64_t seen = left.load(std::memory_order_relaxed);
      while ((seen & 0xFFFFFFFF) < seen >> 32) {
        if (!left.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire,
                                        std::memory_order_relaxed)) {
          continue;
        }
        call_(context_, seen & 0xFFFFFFFF, worker);
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  const int64_t size_;
  std::unique_ptr<Range[]> ranges_;
  void (*call_)(const void*, int64_t, int64_t) = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> arrived_{0};
  std::atomic<bool> finished_{false};
};

}  // namespace quantkit
