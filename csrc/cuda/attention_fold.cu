// Folding of attention's partial results.

#include "attention_fold.cuh"

namespace quantkit::cuda {

FoldKernel attention_fold_kernel() { return &fold_chunks<16>; }

}  // namespace quantkit::cuda
