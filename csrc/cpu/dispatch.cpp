// Chooses the kernel set at run time, once per process.

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quantkit {
namespace {

bool always() { return true; }

#if defined(__x86_64__) && defined(__GNUC__)
// Not every compiler knows the names of the newer ones: bits of leaf 7, EDX.
bool cpuid_leaf7_edx(unsigned int bits) {
  unsigned int a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & bits) == bits;
}

// Linux saves the tiles of a process that has asked for it, which it may refuse: an old kernel, a
// sandbox. Nothing else is harmed by asking.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// These builtins also ask the operating system whether it saves the wide registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512bf16");
}
bool has_avx512fp16() { return has_avx512() && cpuid_leaf7_edx(1u << 23); }
bool has_amx() {
  constexpr unsigned int kBFloat16AndTiles = 1u << 22 | 1u << 24;
  return has_avx512fp16() && has_avx512bf16() && cpuid_leaf7_edx(kBFloat16AndTiles) &&
         may_use_tiles();
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512bf16() { return false; }
bool has_avx512fp16() { return false; }
bool has_amx() { return false; }
#endif

struct Candidate {
  const char* name;
  bool (*supported)();
  const KernelSet* (*kernels)();
};

// Narrowest first: a cap by name admits that entry and all before it.
constexpr Candidate kCandidates[] = {
    {"portable", always, portable_kernels},
    {"avx2", has_avx2, avx2_kernels},
    {"avx512", has_avx512, avx512_kernels},
    {"avx512bf16", has_avx512bf16, avx512bf16_kernels},
    {"avx512fp16", has_avx512fp16, avx512fp16_kernels},
    {"amx", has_amx, amx_kernels},
};

const KernelSet* choose(const char* cap) {
  const KernelSet* best = nullptr;
  for (const Candidate& candidate : kCandidates) {
    const KernelSet* kernels = candidate.kernels();
    if (kernels != nullptr && candidate.supported()) best = kernels;
    if (cap != nullptr && std::string(cap) == candidate.name) return best;
  }
  if (cap != nullptr && *cap != '\0') {
    throw std::runtime_error(
        "QUANTKIT_CPU_ISA must be portable, avx2, avx512, avx512bf16, avx512fp16 or amx, got '" +
        std::string(cap) + "'");
  }
  return best;
}

}  // namespace

const KernelSet& cpu_kernels() {
  static const KernelSet* const chosen = choose(std::getenv("QUANTKIT_CPU_ISA"));
  return *chosen;
}

}  // namespace quantkit
