// Fibers: stacks of their own that run one at a time and switch by a call.
//
// On x86-64 a switch is a dozen instructions; elsewhere, or with QK_UCONTEXT, ucontext does it.
// Address sanitizer is told about every switch, and each stack ends in a page that cannot be
// touched.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define QK_ASAN 1
#else
#define QK_ASAN 0
#endif

#if defined(__x86_64__) && !defined(QK_UCONTEXT)
#define QK_OWN_SWITCH 1
#else
#define QK_OWN_SWITCH 0
#include <ucontext.h>
#endif

namespace quantkit::cuda::emulator {

#if QK_ASAN
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

struct Fiber {
  void (*body)() = nullptr;
  char* stack = nullptr;  // null for the thread that the process began with
  size_t stack_bytes = 0;
#if QK_OWN_SWITCH
  void* top = nullptr;  // where the registers of a fiber that is not running were pushed
#else
  ucontext_t context{};
#endif
};

// Called on the new fiber's side of a switch. `from` learns its own stack if it did not know it.
inline void finish_switch(Fiber* from, void* saved) {
#if QK_ASAN
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(saved, &bottom, &bytes);
  if (from != nullptr && from->stack == nullptr) {
    from->stack = static_cast<char*>(const_cast<void*>(bottom));
    from->stack_bytes = bytes;
  }
#else
  (void)from;
  (void)saved;
#endif
}

// The fiber that switched last; the one that comes to run asks whom it took over from.
inline Fiber* switched_from = nullptr;

#if QK_OWN_SWITCH
__attribute__((naked, noinline,
               no_sanitize("address", "undefined"))) inline void exchange_stacks(void** /*save*/,
                                                                                 void* /*load*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n"
      "movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
      "ret\n");
}
#endif

inline Fiber* starting = nullptr;

inline void fiber_entry() {
  Fiber* self = starting;
  finish_switch(switched_from, nullptr);
  self->body();
  std::abort();  // a body never returns
}

// `body` must never return. The stack is never given back: fibers are kept for the next block.
inline void make_fiber(Fiber& fiber, void (*body)()) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    std::fprintf(stderr, "emulator: no memory for the stack of a thread\n");
    std::abort();
  }
  fiber.stack = static_cast<char*>(memory) + page;
  fiber.stack_bytes = kStackBytes;
  fiber.body = body;
#if QK_OWN_SWITCH
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
  *--top = nullptr;  // as if called: rsp is 8 below a multiple of 16 when the function begins
  *--top = reinterpret_cast<void*>(&fiber_entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.top = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &fiber_entry, 0);
#endif
}

__attribute__((no_sanitize("address"))) inline void switch_fiber(Fiber& from, Fiber& to) {
  void* saved = nullptr;
#if QK_ASAN
  __sanitizer_start_switch_fiber(&saved, to.stack, to.stack_bytes);
#endif
  switched_from = &from;
  starting = &to;
#if QK_OWN_SWITCH
  exchange_stacks(&from.top, to.top);
#else
  swapcontext(&from.context, &to.context);
#endif
  finish_switch(switched_from, saved);
}

}  // namespace quantkit::cuda::emulator
