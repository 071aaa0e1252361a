// Attention of a whole batch: tiles, partitions and threads around KernelSet::attend.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "team.h"

namespace quantkit {

// The batch that paged_attention describes: the last queries of each sequence.
struct AttentionBatch {
  const int32_t* lengths;  // [sequences], stored tokens including the new ones
  const int32_t* starts;   // [sequences + 1], rows of each sequence in query
  int64_t sequences;
};

// Writes task.out for all rows.
void run_attention(const AttentionTask& task, const AttentionBatch& batch,
                   const KernelSet& kernels, Team& team);

// Threads worth waking for it: as many as have some products of query and key elements to do.
int64_t attention_threads(const AttentionTask& task, const AttentionBatch& batch);

}  // namespace quantkit
