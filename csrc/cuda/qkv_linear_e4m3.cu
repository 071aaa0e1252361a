// The kernels of q, k and v for E4M3 codes; qkv_linear_launch.cuh.

#include "qkv_linear_launch.cuh"

namespace quantkit::cuda {

template bool launch_qkv_linear<E4M3>(const QkvCall&, FloatType, cudaStream_t, bool);

}  // namespace quantkit::cuda
