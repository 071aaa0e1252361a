// Splits attention over tiles and, where these are few, over partitions of the keys as well. Both
// ways give the same bits, because a tile's partitions are folded in ascending order in both.

#include "attention.h"

#include <algorithm>

#include "buffer.h"

namespace quantkit {
namespace {

// Queries that share decoded keys; more cost cache without saving much.
constexpr int64_t kTileRows = 32;

// One tile and the partitions that it reads.
struct Job {
  AttentionTile tile;
  int64_t first, last;  // partitions [first, last)
};

std::vector<Job> make_jobs(const AttentionTask& task, const AttentionBatch& batch) {
  std::vector<Job> jobs;
  const int64_t step = std::max<int64_t>(1, kTileRows / task.group);
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int64_t count = batch.starts[s + 1] - batch.starts[s];
    const int64_t past = batch.lengths[s] - count;
    for (int64_t token = 0; token < count; token += step) {
      const int64_t tokens = std::min(step, count - token);
      const int64_t position = past + token;
      const int64_t unseen = task.window > 0 ? std::max<int64_t>(0, position + 1 - task.window) : 0;
      for (int64_t head = 0; head < task.kv_heads; ++head) {
        jobs.push_back({{s, batch.starts[s] + token, position, tokens, head},
                        unseen / kPartitionKeys,
                        (position + tokens + kPartitionKeys - 1) / kPartitionKeys});
      }
    }
  }
  return jobs;
}

// Calls body(i, scratch) for every i in [0, count).
template <class Body>
void for_each(Team& team, int64_t count, int64_t scratch_size, const Body& body) {
  const int64_t size = (scratch_size + 15) / 16 * 16;
  const Buffer scratch = aligned_buffer(size * team.size());
  team.for_each(count,
                [&](int64_t i, int64_t worker) { body(i, scratch.get() + worker * size); });
}

void run_tiles(const AttentionTask& task, const std::vector<Job>& jobs, const KernelSet& kernels,
               Team& team) {
  const int64_t tokens = std::max<int64_t>(1, kTileRows / task.group);
  const int64_t partial = kernels.partial_size(task, tokens);
  const int64_t size = 2 * partial + kernels.scratch_size(task, tokens);
  for_each(team, static_cast<int64_t>(jobs.size()), size, [&](int64_t i, float* scratch) {
    const Job& job = jobs[i];
    float* folded = scratch + partial;
    float* rest = folded + partial;
    kernels.attend(task, job.tile, job.first, folded, rest);
    for (int64_t number = job.first + 1; number < job.last; ++number) {
      kernels.attend(task, job.tile, number, scratch, rest);
      kernels.fold(task, job.tile.tokens, folded, scratch);
    }
    kernels.finish(task, job.tile, folded, rest);
  });
}

// A partition's heads follow each other: they lie side by side in memory.
void run_partitions(const AttentionTask& task, const std::vector<Job>& jobs,
                    const KernelSet& kernels, Team& team) {
  struct Piece {
    const Job* job;
    int64_t partition;
  };
  std::vector<Piece> pieces;
  int64_t tokens = 1;
  for (size_t tile = 0; tile < jobs.size(); tile += task.kv_heads) {
    const Job& any_head = jobs[tile];
    tokens = std::max(tokens, any_head.tile.tokens);
    for (int64_t number = any_head.first; number < any_head.last; ++number) {
      for (int64_t head = 0; head < task.kv_heads; ++head) {
        pieces.push_back({&jobs[tile + head], number});
      }
    }
  }
  const int64_t size = (kernels.partial_size(task, tokens) + 15) / 16 * 16;
  const int64_t scratch_size = kernels.scratch_size(task, tokens);
  const Buffer partials = aligned_buffer(size * static_cast<int64_t>(pieces.size()));
  for_each(team, static_cast<int64_t>(pieces.size()), scratch_size, [&](int64_t i, float* data) {
    kernels.attend(task, pieces[i].job->tile, pieces[i].partition, partials.get() + i * size, data);
  });
  const Buffer scratch = aligned_buffer(scratch_size);
  float* first = partials.get();
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Job& job = jobs[i];
    float* folded = first + static_cast<int64_t>(i) % task.kv_heads * size;
    for (int64_t number = job.first + 1; number < job.last; ++number) {
      const int64_t index = (number - job.first) * task.kv_heads;
      kernels.fold(task, job.tile.tokens, folded, folded + index * size);
    }
    kernels.finish(task, job.tile, folded, scratch.get());
    if ((static_cast<int64_t>(i) + 1) % task.kv_heads == 0) {
      first += (job.last - job.first) * task.kv_heads * size;
    }
  }
}

}  // namespace

void run_attention(const AttentionTask& task, const AttentionBatch& batch,
                   const KernelSet& kernels, Team& team) {
  const std::vector<Job> jobs = make_jobs(task, batch);
  if (static_cast<int64_t>(jobs.size()) < 4 * team.size()) {
    run_partitions(task, jobs, kernels, team);
  } else {
    run_tiles(task, jobs, kernels, team);
  }
}

int64_t attention_threads(const AttentionTask& task, const AttentionBatch& batch) {
  constexpr int64_t kWorkPerThread = 40 * 1000;
  int64_t work = 0;
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int64_t keys = task.window > 0 ? std::min<int64_t>(task.window, batch.lengths[s])
                                         : batch.lengths[s];
    work += (batch.starts[s + 1] - batch.starts[s]) * keys * task.kv_heads * task.group *
            task.head_dim;
  }
  return std::max<int64_t>(1, work / kWorkPerThread);
}

}  // namespace quantkit
