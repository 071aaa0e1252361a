// Runs the threads of a thread block as fibers, and blocks one after another.
//
// A thread runs until it meets a barrier or a warp-wide operation; then the next one that can runs.
// In which order threads come is up to `order`: a kernel that lacks a barrier gives different
// results, or reads poison, in one of them. Whoever waits for a thread that has left, or that waits
// elsewhere, is reported with its place in the source, and the process ends.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstring>
#include <set>
#include <source_location>
#include <type_traits>
#include <utility>
#include <vector>

#include "fiber.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace quantkit::cuda::emulator {

using Place = std::source_location;

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr size_t kMaxShared = 227 * 1024;

enum class Order { kAscending, kDescending, kRandom };
enum class Wait { kNothing, kBlock, kWarp, kExit };

struct Thread {
  Fiber fiber;
  uint3 index;
  Wait wait;
  const char* operation;  // what it waits in; a literal
  Place place;
  uint32_t mask;  // lanes that take part, of a warp-wide operation
  void* payload;  // on the thread's own stack
};

struct SharedArray {
  unsigned char* begin;
  size_t bytes;
};

struct State {
  std::vector<Thread*> threads;  // made when first needed, kept
  Fiber caller;
  void (*call)(void*) = nullptr;
  void* arguments = nullptr;
  int count = 0;  // threads of a block
  int left = 0;   // of these, not yet at their end
  int at_barrier = 0;
  int votes = 0;  // sum of the predicates at the barrier
  int vote_result = 0;
  int current = 0;
  uint32_t ready[kMaxWarps] = {};
  Order order = Order::kAscending;
  uint64_t random = 1;
  unsigned char* dynamic_shared = nullptr;
  size_t dynamic_bytes = 0;
  std::vector<SharedArray> shared;
  std::set<const unsigned char*> launched;  // addresses of kernels
};

inline State the_state;
inline State& state() { return the_state; }

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void stop(const char* format, ...) {
  std::fprintf(stderr, "emulator: ");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\nemulator: in thread (%u, %u, %u) of block (%u, %u, %u)\n", threadIdx.x,
               threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
  std::fflush(nullptr);
  std::abort();
}

// Tells where everybody is: one line for each group of neighbours that wait at the same place.
[[noreturn]] inline void report_divergence(const char* why) {
  State& s = state();
  std::fprintf(stderr, "emulator: divergence in block (%u, %u, %u): %s\n", blockIdx.x, blockIdx.y,
               blockIdx.z, why);
  for (int first = 0; first < s.count;) {
    const Thread& t = *s.threads[first];
    const auto alike = [&](const Thread& other) {
      return other.wait == t.wait && (t.wait == Wait::kExit || t.wait == Wait::kNothing ||
                                      (other.place.line() == t.place.line() &&
                                       other.operation == t.operation && other.mask == t.mask));
    };
    int last = first;
    while (last + 1 < s.count && alike(*s.threads[last + 1])) ++last;
    std::fprintf(stderr, "emulator:   threads %d to %d ", first, last);
    if (t.wait == Wait::kExit) {
      std::fprintf(stderr, "have left the kernel\n");
    } else if (t.wait == Wait::kNothing) {
      std::fprintf(stderr, "are running\n");
    } else {
      std::fprintf(stderr, "wait in %s", t.operation);
      if (t.wait == Wait::kWarp) std::fprintf(stderr, " of lanes 0x%08x", t.mask);
      std::fprintf(stderr, " at %s:%u, %s\n", t.place.file_name(), t.place.line(),
                   t.place.function_name());
    }
    first = last + 1;
  }
  std::fflush(nullptr);
  std::abort();
}

inline void set_ready(State& s, int thread) { s.ready[thread / 32] |= 1u << (thread % 32); }
inline void set_waiting(State& s, int thread) { s.ready[thread / 32] &= ~(1u << (thread % 32)); }

// The thread to run after `current`, or -1: its own warp's next first, then the next warps'.
inline int next_thread(State& s) {
  const int warps = (s.count + 31) / 32;
  int warp = s.current / 32, lane = s.current % 32;
  if (s.order == Order::kRandom) {
    s.random = s.random * 6364136223846793005u + 1442695040888963407u;
    warp = static_cast<int>((s.random >> 33) % warps);
    lane = static_cast<int>((s.random >> 58) % 32);
  }
  const bool down = s.order == Order::kDescending;
  for (int i = 0; i <= warps; ++i) {
    uint32_t ready = s.ready[warp];
    if (i == 0) ready &= down ? (1u << lane) - 1 : ~((2u << lane) - 1);  // those beyond this lane
    if (ready != 0) {
      return 32 * warp + (down ? 31 - __builtin_clz(ready) : __builtin_ctz(ready));
    }
    warp = down ? (warp + warps - 1) % warps : (warp + 1) % warps;
  }
  return -1;
}

inline void run_thread(State& s, int thread) {
  s.current = thread;
  threadIdx = s.threads[thread]->index;
}

// Lets others run until somebody makes this thread ready again.
inline void wait_for_others(State& s) {
  const int self = s.current;
  const int next = next_thread(s);
  if (next < 0) report_divergence("the threads wait for each other");
  if (next == self) return;
  run_thread(s, next);
  switch_fiber(s.threads[self]->fiber, s.threads[next]->fiber);
}

inline void thread_body() {
  State& s = state();
  for (;;) {
    s.call(s.arguments);
    Thread& self = *s.threads[s.current];
    self.wait = Wait::kExit;
    set_waiting(s, s.current);
    if (--s.left == 0) {
      switch_fiber(self.fiber, s.caller);
      continue;
    }
    const int next = next_thread(s);
    if (next < 0) report_divergence("some threads left, others wait for them");
    run_thread(s, next);
    switch_fiber(self.fiber, s.threads[next]->fiber);
  }
}

inline int block_barrier(const char* operation, int vote, const Place& place) {
  State& s = state();
  Thread& self = *s.threads[s.current];
  s.votes += vote;
  if (++s.at_barrier < s.count) {
    self.wait = Wait::kBlock;
    self.operation = operation;
    self.place = place;
    self.mask = 0;
    set_waiting(s, s.current);
    wait_for_others(s);
    return s.vote_result;
  }
  for (int i = 0; i < s.count; ++i) {
    Thread& thread = *s.threads[i];
    if (i == s.current) continue;
    if (thread.operation != operation) {
      self.wait = Wait::kBlock;
      self.operation = operation;
      self.place = place;
      report_divergence("different barriers");
    }
    thread.wait = Wait::kNothing;
    set_ready(s, i);
  }
  s.at_barrier = 0;
  s.vote_result = s.votes;
  s.votes = 0;
  return s.vote_result;
}

// Waits for all lanes of `mask`; the last to come calls `complete` with everybody's payloads (null
// for lanes outside of the mask), which leaves in each what its lane is to get.
template <class Payload, class Complete>
void warp_operation(const char* operation, uint32_t mask, Payload& payload, const Place& place,
                    Complete complete) {
  State& s = state();
  const int first = s.current / 32 * 32;
  Thread& self = *s.threads[s.current];
  self.wait = Wait::kWarp;
  self.operation = operation;
  self.place = place;
  self.mask = mask;
  self.payload = &payload;
  if ((mask >> (s.current - first) & 1) == 0) report_divergence("a lane outside of its own mask");
  Payload* payloads[32] = {};
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    if (first + lane >= s.count) report_divergence("the mask names lanes that do not exist");
    const Thread& other = *s.threads[first + lane];
    if (other.wait == Wait::kExit) report_divergence("the mask names lanes that have left");
    if (other.wait != Wait::kWarp) {  // this one will be the last, or find the next
      set_waiting(s, s.current);
      wait_for_others(s);
      return;
    }
    if (other.mask != mask || other.operation != operation) {
      report_divergence("lanes of one warp in different operations");
    }
    payloads[lane] = static_cast<Payload*>(other.payload);
  }
  complete(payloads);
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    s.threads[first + lane]->wait = Wait::kNothing;
    set_ready(s, first + lane);
  }
}

// Shared memory is undefined when a block begins: every byte 0xFF, a NaN in all float formats and
// an index of -1.
__attribute__((no_sanitize("address"))) inline void poison(unsigned char* begin, size_t bytes) {
  for (volatile unsigned char* p = begin; p < begin + bytes; ++p) *p = 0xFF;
}

inline void run_block(State& s) {
  for (const SharedArray& array : s.shared) poison(array.begin, array.bytes);
  poison(s.dynamic_shared, s.dynamic_bytes);
  for (int i = 0; i < s.count; ++i) {
    s.threads[i]->wait = Wait::kNothing;
    set_ready(s, i);
  }
  s.left = s.count;
  s.at_barrier = s.votes = 0;
  s.current = s.order == Order::kDescending ? 0 : s.count - 1;
  run_thread(s, next_thread(s));
  switch_fiber(s.caller, s.threads[s.current]->fiber);
}

// kernel<<<grid, block, shared_bytes>>>(arguments...)
template <class... Parameters, class... Arguments>
void launch(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
  State& s = state();
  s.count = static_cast<int>(block.x * block.y * block.z);
  if (s.count < 1 || s.count > kMaxThreads || block.z > 64) stop("a block of %d threads", s.count);
  if (shared_bytes > kMaxShared) stop("%zu bytes of shared memory", shared_bytes);
  if (grid.x < 1 || grid.x > 0x7FFFFFFF || grid.y < 1 || grid.y > 65535 || grid.z < 1 ||
      grid.z > 65535) {
    stop("a grid of %u x %u x %u blocks", grid.x, grid.y, grid.z);
  }
  while (static_cast<int>(s.threads.size()) < s.count) {
    s.threads.push_back(new Thread{});
    make_fiber(s.threads.back()->fiber, &thread_body);
  }
  for (int i = 0; i < s.count; ++i) {
    const unsigned n = static_cast<unsigned>(i);
    s.threads[i]->index = {n % block.x, n / block.x % block.y, n / (block.x * block.y)};
  }
  auto call = [&] { kernel(static_cast<Parameters>(arguments)...); };
  s.call = [](void* closure) { (*static_cast<decltype(call)*>(closure))(); };
  s.arguments = &call;
  s.launched.insert(reinterpret_cast<const unsigned char*>(kernel));
  s.dynamic_bytes = shared_bytes;  // a heap block of just this size: one byte over is noticed
  s.dynamic_shared = static_cast<unsigned char*>(std::malloc(shared_bytes));
  blockDim = block;
  gridDim = grid;
  const int64_t blocks = static_cast<int64_t>(grid.x) * grid.y * grid.z;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t n = s.order == Order::kDescending ? blocks - 1 - i : i;
    blockIdx = {static_cast<unsigned>(n % grid.x), static_cast<unsigned>(n / grid.x % grid.y),
                static_cast<unsigned>(n / grid.x / grid.y)};
    run_block(s);
  }
  std::free(s.dynamic_shared);
}

}  // namespace quantkit::cuda::emulator

// What tests/cuda/emulator.py calls after loading.
extern "C" {
inline __attribute__((used, visibility("default"))) void qk_emulator_order(int order) {
  quantkit::cuda::emulator::state().order = static_cast<quantkit::cuda::emulator::Order>(order);
}
inline __attribute__((used, visibility("default"))) void qk_emulator_shared(int64_t distance,
                                                                            int64_t bytes) {
  auto* anchor = reinterpret_cast<unsigned char*>(&qk_emulator_order);
  quantkit::cuda::emulator::state().shared.push_back(
      {anchor + distance, static_cast<size_t>(bytes)});
}
// Which kernels were launched since the last call, as distances from qk_emulator_order; returns how
// many, at most `room`.
inline __attribute__((used, visibility("default"))) int64_t qk_emulator_launched(int64_t* distances,
                                                                                 int64_t room) {
  auto* anchor = reinterpret_cast<const unsigned char*>(&qk_emulator_order);
  auto& launched = quantkit::cuda::emulator::state().launched;
  int64_t count = 0;
  for (const unsigned char* kernel : launched) {
    if (count < room) distances[count++] = kernel - anchor;
  }
  launched.clear();
  return count;
}
}
