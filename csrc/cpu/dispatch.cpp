// Chooses the kernel set at run time, once per process.

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace quantkit {
namespace {

bool always() { return true; }

#if defined(__x86_64__) && defined(__GNUC__)
// Not every compiler knows the name of this one: leaf 7, EDX bit 23.
bool cpuid_avx512fp16() {
  unsigned int a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 23 & 1) != 0;
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
bool has_avx512fp16() { return has_avx512() && cpuid_avx512fp16(); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512fp16() { return false; }
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
    {"avx512fp16", has_avx512fp16, avx512fp16_kernels},
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
        "QUANTKIT_CPU_ISA must be portable, avx2, avx512 or avx512fp16, got '" + std::string(cap) +
        "'");
  }
  return best;
}

}  // namespace

const KernelSet& cpu_kernels() {
  static const KernelSet* const chosen = choose(std::getenv("QUANTKIT_CPU_ISA"));
  return *chosen;
}

}  // namespace quantkit
