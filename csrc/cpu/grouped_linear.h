// Several linear layers at once, each with rows of its own: the experts of a layer.
#pragma once

#include <vector>

#include "linear_pass.h"

namespace quantkit {

// What run_linear() and run_gated_linear() do for each call, threads sharing the work of all.
void run_grouped(const std::vector<LinearCall>& calls, const KernelSet& kernels, Team& team);

}  // namespace quantkit
