// Splits attention over tiles and, where these are few, over partitions of the keys as well. Both
// ways give the same bits, because a tile's partitions are folded in ascending order in both.

#include "attention.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "buffer.h"

namespace quantkit {
namespace {

// Queries that share decoded keys; more cost cache without saving much.
constexpr int64_t kTileRows = 32;
// Products of a query's and a key's element below which a second thread does not pay.
constexpr int64_t kWorkPerThread = 40 * 1000;

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

int64_t work_of(const AttentionTask& task, const std::vector<Job>& jobs) {
  int64_t rows_by_keys = 0;
  for (const Job& job : jobs) {
    const int64_t keys = job.tile.position + job.tile.tokens - job.first * kPartitionKeys;
    rows_by_keys += job.tile.tokens * task.group * keys;
  }
  return rows_by_keys * task.head_dim;
}

// Calls body(i, scratch) for every i in [0, count), each thread taking the next one that is left.
template <class Body>
void for_each(int64_t count, int64_t threads, int64_t scratch_size, const Body& body) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(count, threads), 1, [&](int64_t, int64_t) {
    const Buffer scratch = aligned_buffer(scratch_size);
    for (int64_t i = next++; i < count; i = next++) body(i, scratch.get());
  });
}

void run_tiles(const AttentionTask& task, const std::vector<Job>& jobs, const KernelSet& kernels,
               int64_t threads) {
  const int64_t tokens = std::max<int64_t>(1, kTileRows / task.group);
  const int64_t partial = kernels.partial_size(task, tokens);
  const int64_t size = 2 * partial + kernels.scratch_size(task, tokens);
  for_each(static_cast<int64_t>(jobs.size()), threads, size, [&](int64_t i, float* scratch) {
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

void run_partitions(const AttentionTask& task, const std::vector<Job>& jobs,
                    const KernelSet& kernels, int64_t threads) {
  struct Piece {
    const Job* job;
    int64_t partition;
  };
  std::vector<Piece> pieces;
  int64_t tokens = 1;
  for (const Job& job : jobs) {
    tokens = std::max(tokens, job.tile.tokens);
    for (int64_t number = job.first; number < job.last; ++number) pieces.push_back({&job, number});
  }
  const int64_t size = (kernels.partial_size(task, tokens) + 15) / 16 * 16;
  const int64_t scratch_size = kernels.scratch_size(task, tokens);
  const Buffer partials = aligned_buffer(size * static_cast<int64_t>(pieces.size()));
  for_each(static_cast<int64_t>(pieces.size()), threads, scratch_size, [&](int64_t i, float* data) {
    kernels.attend(task, pieces[i].job->tile, pieces[i].partition, partials.get() + i * size, data);
  });
  const Buffer scratch = aligned_buffer(scratch_size);
  float* partial = partials.get();
  for (const Job& job : jobs) {
    float* folded = partial;
    for (int64_t number = job.first + 1; number < job.last; ++number) {
      kernels.fold(task, job.tile.tokens, folded, partial += size);
    }
    partial += size;
    kernels.finish(task, job.tile, folded, scratch.get());
  }
}

}  // namespace

void run_attention(const AttentionTask& task, const AttentionBatch& batch,
                   const KernelSet& kernels) {
  const std::vector<Job> jobs = make_jobs(task, batch);
  const int64_t useful = work_of(task, jobs) / kWorkPerThread;
  const int64_t available = torch::stable::get_num_threads();
  const int64_t threads = std::clamp<int64_t>(useful, 1, available);
  if (threads > 1 && static_cast<int64_t>(jobs.size()) < 4 * threads) {
    run_partitions(task, jobs, kernels, threads);
  } else {
    run_tiles(task, jobs, kernels, threads);
  }
}

}  // namespace quantkit
