// Splits attention over tiles and, where these are few, over partitions of the keys as well. Both
// ways give the same bits, because a tile's partitions are folded in ascending order in both.

#include "attention.h"

#include <algorithm>

#include "buffer.h"

namespace quantkit {
namespace {

int64_t tile_tokens(const AttentionTask& task, const KernelSet& kernels) {
  return std::max<int64_t>(1, kernels.tile_rows(task) / task.group);
}

int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

// One tile and the partitions that it reads.
struct Job {
  AttentionTile tile;
  int64_t first, last;  // partitions [first, last)
};

std::vector<Job> make_jobs(const AttentionTask& task, const AttentionBatch& batch,
                           const KernelSet& kernels) {
  std::vector<Job> jobs;
  const int64_t step = tile_tokens(task, kernels);
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
  const int64_t size = whole_lines(scratch_size);
  const Buffer scratch = aligned_buffer(size * team.size());
  team.for_each(count,
                [&](int64_t i, int64_t worker) { body(i, scratch.get() + worker * size); });
}

void run_tiles(const AttentionTask& task, const std::vector<Job>& jobs, const KernelSet& kernels,
               Team& team) {
  const int64_t tokens = tile_tokens(task, kernels);
  const int64_t query = whole_lines(kernels.query_size(task, tokens));
  const int64_t partial = whole_lines(kernels.partial_size(task, tokens));
  const int64_t size = query + 2 * partial + kernels.scratch_size(task, tokens);
  for_each(team, static_cast<int64_t>(jobs.size()), size, [&](int64_t i, float* queries) {
    const Job& job = jobs[i];
    float* next = queries + query;
    float* folded = next + partial;
    float* rest = folded + partial;
    kernels.pack_queries(task, job.tile, queries);
    kernels.attend(task, job.tile, job.first, {1, queries, 0, folded, 0}, rest);
    for (int64_t number = job.first + 1; number < job.last; ++number) {
      kernels.attend(task, job.tile, number, {1, queries, 0, next, 0}, rest);
      kernels.fold(task, job.tile.tokens, folded, next);
    }
    kernels.finish(task, job.tile, folded, rest);
  });
}

// One partition of some heads of a tile: heads lie side by side in memory.
struct Piece {
  int64_t job;  // of the first head
  int64_t heads;
  int64_t partition;
  int64_t result;  // the first head's partial result
};

struct Pieces {
  std::vector<Piece> list;
  std::vector<int64_t> first_result;  // of each job; the next partition's is kv_heads later
  int64_t results;
};

Pieces make_pieces(const std::vector<Job>& jobs, int64_t kv_heads, int64_t threads) {
  Pieces pieces{};
  int64_t partitions = 0;
  for (size_t i = 0; i < jobs.size(); i += kv_heads) partitions += jobs[i].last - jobs[i].first;
  const int64_t together = partitions < 2 * threads ? 1 : kv_heads;
  for (size_t i = 0; i < jobs.size(); i += kv_heads) {
    const auto tile = static_cast<int64_t>(i);
    for (int64_t head = 0; head < kv_heads; ++head) {
      pieces.first_result.push_back(pieces.results + head);
    }
    for (int64_t number = jobs[i].first; number < jobs[i].last; ++number) {
      for (int64_t head = 0; head < kv_heads; head += together) {
        pieces.list.push_back({tile + head, together, number, pieces.results + head});
      }
      pieces.results += kv_heads;
    }
  }
  return pieces;
}

void run_partitions(const AttentionTask& task, const std::vector<Job>& jobs,
                    const KernelSet& kernels, Team& team) {
  const Pieces pieces = make_pieces(jobs, task.kv_heads, team.size());
  int64_t tokens = 1;
  for (const Job& job : jobs) tokens = std::max(tokens, job.tile.tokens);
  const auto num_jobs = static_cast<int64_t>(jobs.size());
  const int64_t query = whole_lines(kernels.query_size(task, tokens));
  const int64_t size = whole_lines(kernels.partial_size(task, tokens));
  const int64_t scratch_size = kernels.scratch_size(task, tokens);
  const Buffer queries = aligned_buffer(query * num_jobs);
  const Buffer partials = aligned_buffer(size * pieces.results);
  for (int64_t i = 0; i < num_jobs; ++i) {
    kernels.pack_queries(task, jobs[i].tile, queries.get() + i * query);
  }
  const auto num_pieces = static_cast<int64_t>(pieces.list.size());
  for_each(team, num_pieces, scratch_size, [&](int64_t i, float* scratch) {
    const Piece& piece = pieces.list[i];
    const AttentionHeads heads{piece.heads, queries.get() + piece.job * query, query,
                               partials.get() + piece.result * size, size};
    kernels.attend(task, jobs[piece.job].tile, piece.partition, heads, scratch);
  });
  for_each(team, num_jobs, scratch_size, [&](int64_t i, float* scratch) {
    const Job& job = jobs[i];
    float* first = partials.get() + pieces.first_result[i] * size;
    for (int64_t number = 1; number < job.last - job.first; ++number) {
      kernels.fold(task, job.tile.tokens, first, first + number * task.kv_heads * size);
    }
    kernels.finish(task, job.tile, first, scratch);
  });
}

}  // namespace

void run_attention(const AttentionTask& task, const AttentionBatch& batch,
                   const KernelSet& kernels, Team& team) {
  const std::vector<Job> jobs = make_jobs(task, batch, kernels);
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
