// What every op needs around its kernels: the device and stream of its tensors, the limits of that
// device, and an error where a launch failed. Host code; include it from .cu files through
// checks.h.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace quantkit::cuda {

inline void check_cuda(const char* op, cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(op) + ": CUDA error: " + cudaGetErrorString(error));
  }
}

struct DeviceProperties {
  int architecture;     // 10 * major + minor: 80, 89, 90, 100, 120
  int multiprocessors;  // SMs
  int shared_memory;    // bytes that one block may have, the dynamic part raised to its limit
  int l2_cache;         // bytes
};

inline DeviceProperties read_properties(int device) {
  const auto read = [device](cudaDeviceAttr attribute) {
    int value = 0;
    check_cuda("device properties", cudaDeviceGetAttribute(&value, attribute, device));
    return value;
  };
  return {.architecture = 10 * read(cudaDevAttrComputeCapabilityMajor) +
                          read(cudaDevAttrComputeCapabilityMinor),
          .multiprocessors = read(cudaDevAttrMultiProcessorCount),
          .shared_memory = read(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .l2_cache = read(cudaDevAttrL2CacheSize)};
}

// Of a device by its index; read once for all devices, which creates no context on any.
inline const DeviceProperties& device_properties(int device) {
  static const std::vector<DeviceProperties> all = [] {
    int count = 0;
    check_cuda("device properties", cudaGetDeviceCount(&count));
    std::vector<DeviceProperties> properties;
    for (int i = 0; i < count; ++i) properties.push_back(read_properties(i));
    return properties;
  }();
  return all.at(static_cast<size_t>(device));
}

// Makes a device the current one while it lives, and knows the stream that torch uses there.
class Launch {
 public:
  Launch(const char* op, int device) : op_(op), device_(device), guard_(device) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  int device() const { return device_; }
  cudaStream_t stream() const { return stream_; }
  const DeviceProperties& properties() const { return device_properties(device_); }

  // Lets `kernel` have `bytes` of dynamic shared memory; call before launching it with over 48 KB.
  template <class Kernel>
  void allow_shared_memory(Kernel* kernel, int bytes) const {
    check_cuda(op_, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }

  // Call after each kernel<<<...>>>: throws if it could not be launched. Does not wait for it.
  void check() const {
    const cudaError_t error = cudaGetLastError();
    if (error == cudaErrorNoKernelImageForDevice) {
      throw std::runtime_error(std::string(op_) + ": the CUDA kernels were not built for this GPU" +
                               " (sm_" + std::to_string(properties().architecture) +
                               "); build them with QUANTKIT_CUDA_ARCHS, or set"
                               " QUANTKIT_DISABLE_EXT=1 to use slow reference kernels");
    }
    check_cuda(op_, error);
  }

 private:
  const char* op_;
  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace quantkit::cuda
