// Attention for everything else.

#include "attention_plain.cuh"

namespace quantkit::cuda {
namespace {

template <class Cache>
PlainKernel kernel(int64_t head_dim) {
  return head_dim <= 128 ? &attend_plain<Cache, 4> : &attend_plain<Cache, 16>;
}

}  // namespace

PlainKernel attention_plain_kernel(WeightFormat cache, int64_t head_dim) {
  switch (cache) {
    case WeightFormat::kFloat32: return kernel<float>(head_dim);
    case WeightFormat::kBFloat16: return kernel<BFloat16>(head_dim);
    case WeightFormat::kFloat16: return kernel<Half>(head_dim);
    case WeightFormat::kE3M4: return kernel<E3M4>(head_dim);
    default: return kernel<E4M3>(head_dim);
  }
}

}  // namespace quantkit::cuda
