// Launches a kernel that may start while the one before it in the stream still runs ("programmatic
// dependent launch"), so that its first loads are under way when its inputs arrive. The kernel must
// call wait_for_previous_kernel() (intrinsics.cuh) before it touches anything that changes.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace quantkit::cuda {

// `overlap` = false (processors before sm_90) is an ordinary launch. Errors: cudaGetLastError().
template <class... Parameters, class... Arguments>
void launch_overlapped(bool overlap, void (*kernel)(Parameters...), dim3 grid, int threads,
                       size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace quantkit::cuda
