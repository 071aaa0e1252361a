// Argument checks of the CUDA ops: the shared ones, that all tensors are on one GPU, and dispatch
// from dtypes to types. An op reads
//
//   const char* op = "rms_norm";
//   check_shape(op, ...);                                     // what the op promises
//   const Launch launch = launch_on(op, x, {{"weight", weight}});  // the same GPU, current now
//   if (x.numel() == 0) return out;
//   with_float_type(op, "x", x.scalar_type(), [&](auto type) {
//     using T = decltype(type);
//     kernel<T><<<grid, block, 0, launch.stream()>>>(data<T>(x), ...);
//   });
//   launch.check();
//   return out;
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "../checks.h"
#include "../cpu/float16.h"
#include "launch.h"

namespace quantkit {

inline void check_layout(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_cuda()) fail(op, argument, "on the GPU like x", "a tensor on another device");
  check_contiguous(op, argument, tensor);
}

inline void check_rows(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_cuda()) fail(op, argument, "on the GPU", "a tensor on another device");
  check_side_by_side(op, argument, tensor);
}

}  // namespace quantkit

namespace quantkit::cuda {

// A tensor argument and its name, for messages; one that was not given is passed over.
struct Named {
  const char* argument;
  const Tensor* tensor;

  Named(const char* argument, const Tensor& tensor) : argument(argument), tensor(&tensor) {}
  Named(const char* argument, const std::optional<Tensor>& tensor)
      : argument(argument), tensor(tensor.has_value() ? &*tensor : nullptr) {}
};

inline std::string device_text(const Tensor& tensor) {
  return tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device()) : "another device";
}

// Makes x's GPU the current one; throws unless the others are there too.
inline Launch launch_on(const char* op, const Tensor& x, std::initializer_list<Named> others) {
  if (!x.is_cuda()) fail(op, "its first argument", "on a GPU", "a tensor on another device");
  for (const Named& other : others) {
    if (other.tensor != nullptr &&
        (!other.tensor->is_cuda() || other.tensor->get_device() != x.get_device())) {
      fail(op, other.argument, "on " + device_text(x) + " like x", device_text(*other.tensor));
    }
  }
  return Launch(op, x.get_device());
}

// Pointers to a tensor's elements as the kernels' types: Half, BFloat16, uint8_t for all codes.
template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
const T* data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? data<T>(*tensor) : nullptr;
}
template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline const void* address(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

// A norm's weight: of x's dtype, or float32 beside x of 16 bits.
inline void check_norm_weight(const char* op, const char* argument, const Tensor& weight,
                              const Tensor& x) {
  if (weight.scalar_type() != ScalarType::Float) check_same_dtype(op, argument, weight, x);
}

// How many elements of a head turn, as cos [num_tokens, rotary_dim] tells.
inline int64_t rotary_dim_of(const char* op, const Tensor& cos, int64_t head_dim) {
  const int64_t dim = cos.dim() == 2 ? cos.size(1) : 0;
  if (cos.dim() != 2 || dim % 2 != 0 || dim > head_dim) {
    fail(op, "cos", "[num_tokens, rotary_dim], rotary_dim even and at most " +
         std::to_string(head_dim), shape_text(cos.sizes()));
  }
  return dim;
}

// The type of activations that a kernel multiplies in 16 bits.
inline FloatType half_type(const char* op, const Tensor& x) {
  const ScalarType type = x.scalar_type();
  if (type != ScalarType::BFloat16 && type != ScalarType::Half) {
    fail(op, "x", "bfloat16 or float16", dtype_text(type));
  }
  return float_type(op, "x", type);
}

// cos or sin: the angles of x's tokens.
inline void check_angles(const char* op, const char* name, const Tensor& angles, const Tensor& x,
                         int64_t rotary_dim) {
  check_shape(op, name, angles, "[num_tokens, rotary_dim]", {x.size(0), rotary_dim});
  check_layout(op, name, angles);
  check_same_dtype(op, name, angles, x);
}

inline void check_both(const char* op, const char* first, const char* second,
                       const std::optional<Tensor>& a, const std::optional<Tensor>& b) {
  if (a.has_value() != b.has_value()) {
    fail(op, second, std::string("given if and only if ") + first + " is",
         b.has_value() ? "a tensor" : "none");
  }
}

// Calls use(BFloat16{}) or use(Half{}).
template <class Use>
auto with_half_type(const char* op, const char* argument, ScalarType type, const Use& use) {
  switch (type) {
    case ScalarType::BFloat16: return use(BFloat16{});
    case ScalarType::Half: return use(Half{});
    default: fail(op, argument, "bfloat16 or float16", dtype_text(type));
  }
}

// The same with float for float32.
template <class Use>
auto with_float_type(const char* op, const char* argument, ScalarType type, const Use& use) {
  switch (float_type(op, argument, type)) {
    case FloatType::kFloat32: return use(float{});
    case FloatType::kBFloat16: return use(BFloat16{});
    case FloatType::kFloat16: break;
  }
  return use(Half{});
}

// Calls use(E4M3{}), use(E5M2{}) or use(E3M4{}) for the codes of a weight.
template <class Use>
auto with_code_format(const char* op, ScalarType type, const Use& use) {
  switch (weight_format(op, type)) {
    case WeightFormat::kE5M2: return use(E5M2{});
    case WeightFormat::kE3M4: return use(E3M4{});
    default: return use(E4M3{});
  }
}

}  // namespace quantkit::cuda
