// The W8A16 kernels for E3M4 codes; weight_linear_launch.cuh.

#include "weight_linear_launch.cuh"

namespace quantkit::cuda {

template void launch_weight_linear<E3M4>(const LinearCall&, FloatType, bool, cudaStream_t, bool);

}  // namespace quantkit::cuda
