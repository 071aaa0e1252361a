// Launches the kernels of qkv_linear.cuh for a format of codes; defined in qkv_linear_<format>.cu.
#pragma once

#include "qkv_linear.cuh"

struct CUstream_st;  // cudaStream_t points to one

namespace quantkit::cuda {

// x_type is that of x, out, cosine and sine. `overlap`: the device can start this kernel before the
// previous one has ended. False if these kernels cannot do it.
template <class Format>
bool launch_qkv_linear(const QkvCall& call, FloatType x_type, CUstream_st* stream, bool overlap);

}  // namespace quantkit::cuda
