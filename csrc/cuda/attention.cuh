// Attention from the newest tokens of each sequence to its paged KV cache. Decode reads every stored
// key and value once and is bound by that.
//
// A row is a query token and one of the heads that share a KV head. The matrix instruction takes
// cache as its 16-row operand and rows as its 8-column operand,
//   scores^T [16 keys x 8 rows] = K [16 x d] Q^T [d x 8]
//   out^T [16 d x 8 rows] += V^T [16 x 16 keys] P^T [16 keys x 8]
// so codes are decoded once for all rows, straight from global memory into registers.
//
// Which d one instruction sums over is free if K and Q agree, and which d are its rows is free in
// V^T; so a lane (4 * g + t) loads adjacent bytes: of keys g and g + 8 quarter t of every 64 bytes,
// of values 2t, 2t+1, 2t+8, 2t+9 eighth g of every 128 bytes (`lane_place`).
//
//   tile    adjacent tokens of one sequence, times heads: up to 8 * kRowTiles rows
//   chunk   kChunk keys, counted from the sequence's first; its partial result (reference, sum of
//           weights, weighted sum of values) is computed on its own, its steps of 16 * kKeyTiles
//           keys dealt out to the block's warps
//   block   one tile, one KV head, every gridDim.y-th chunk
//
// Partial results of a row are folded in ascending order of chunks, by the block itself if it has
// all chunks (gridDim.y == 1), else by attention_fold.cuh. All of this is anchored at positions in the
// sequence: a row's bits depend neither on its tile nor on other sequences nor on how much room the
// tables have. Keys outside of a tile's sight are never touched: their place is taken by the nearest
// one that is in sight, and their weight is zero.
//
// The reference of a softmax sum is not its maximum but a score at most 2^kSlack times smaller: it
// moves rarely, and sums need scaling only then. Whether it moves depends on the row alone.
#pragma once

#include "attention_fold.cuh"
#include "attention_tile.cuh"

namespace quantkit::cuda {

// What becomes of a row's sums of one chunk.
enum class RowAction { kSkip, kKeep, kStore, kFinish };
struct RowFold {
  Fold fold;
  float finish;  // what the sums are multiplied by in the end
  RowAction action;
};

QK_DEVICE bool find_block(const AttentionCall& call, int chunk_keys, BlockPlace& place) {
  const int number = divide(static_cast<int>(blockIdx.x), call.kv_heads);
  const int tile_number = divide(number, call.head_tiles);
  TokenTile tile;
  if (!find_tile(call, tile_number, tile)) return false;
  const Sight first = sight_of(call, tile.position);
  const Sight last = sight_of(call, tile.position + tile.tokens - 1);
  place.any = {first.begin, last.end};
  place.all = {last.begin, first.end};
  place.first_chunk = first.begin / chunk_keys + static_cast<int>(blockIdx.y);
  place.alone = gridDim.y == 1;
  place.sequence = tile.sequence;
  place.kv_head = static_cast<int>(blockIdx.x) - number * call.kv_heads;
  const int first_head = (number - tile_number * call.head_tiles) * call.tile_heads;
  RowMap& map = place.map;
  map.row = tile.row;
  map.position = tile.position;
  map.heads_all = call.kv_heads * call.group;
  map.head = place.kv_head * call.group + first_head;
  map.heads = min(call.tile_heads, call.group - first_head);
  map.rows = tile.tokens * map.heads;
  map.reciprocal = divide(65535 + map.heads, map.heads);
  return place.first_chunk * chunk_keys < last.end;
}

// Shared memory of a block.
template <class Shape>
struct BlockMemory {
  int32_t* slots;    // [kChunk]
  float* sums;       // [kWarps, kRows, kRowStride]
  float* folded;     // [kRows, kHeadDim]
  float* reference;  // [kWarps, kRows]; then what each warp's sums count in the chunk's
  float* total;      // [kWarps, kRows]
  RowFold* rows;     // [kRows]
  BlockPlace* place;
  Word2* query;   // [kRowTiles, kParts, 32], if Shape::kSharedQuery
  float* factor;  // [kRows], the same

  QK_DEVICE static BlockMemory at(uint8_t* memory) {
    BlockMemory out;
    out.slots = reinterpret_cast<int32_t*>(memory);
    out.sums = reinterpret_cast<float*>(out.slots + Shape::kChunk);
    out.folded = out.sums + Shape::kWarps * Shape::kRows * Shape::kRowStride;
    out.reference = out.folded + Shape::kRows * Shape::kHeadDim;
    out.total = out.reference + Shape::kWarps * Shape::kRows;
    out.rows = reinterpret_cast<RowFold*>(out.total + Shape::kWarps * Shape::kRows);
    out.place = reinterpret_cast<BlockPlace*>(out.rows + Shape::kRows);
    out.query = reinterpret_cast<Word2*>(reinterpret_cast<uint8_t*>(out.place) + 64);
    out.factor = reinterpret_cast<float*>(out.query + Shape::kRowTiles * Shape::kParts * kWarp);
    return out;
  }
};

// Puts a warp's sums into shared memory.
template <class Shape>
QK_DEVICE void share_sums(const RunningSums<Shape>& sums, int warp, int g, int t,
                          const BlockMemory<Shape>& memory) {
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sums.total[r][i];
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) {
        total += __shfl_xor_sync(kAllLanes, total, step);
      }
      const int row = warp * Shape::kRows + 8 * r + 2 * t + i;
      if (g == 0) {
        memory.reference[row] = sums.reference[r][i];
        memory.total[row] = total;
      }
      float* target = memory.sums + row * Shape::kRowStride;
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        constexpr int kElement = Shape::kElement;
        const LanePlace place = lane_place(Shape::kValueBytes, 8, 2 * part * kElement);
        const int d = (place.first + g * place.stride) / kElement;
        *reinterpret_cast<float2*>(target + d) =
            make_float2(sums.out[part][r][i], sums.out[part][r][i + 2]);
      }
    }
  }
}

// A thread for each row: joins the warps' references and totals to the chunk's, and says what is to
// be done with its sums.
template <class Shape>
QK_DEVICE void join_totals(const AttentionCall& call, const BlockPlace& place, int chunk,
                           bool fresh, int row, const BlockMemory<Shape>& memory) {
  constexpr int kWarps = Shape::kWarps, kRows = Shape::kRows;
  float reference = memory.reference[row];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    reference = fmaxf(reference, memory.reference[w * kRows + row]);
  }
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float share = exp2_flush(memory.reference[w * kRows + row] - reference);
    memory.reference[w * kRows + row] = share;
    total = fmaf(memory.total[w * kRows + row], share, total);
  }
  RowFold& state = memory.rows[row];
  state.fold = fresh ? fold(kNoScore, 0.0f, reference, total)
                     : fold(state.fold.reference, state.fold.total, reference, total);
  state.finish = value_factor(call, place.kv_head) / state.fold.total;
  if (row >= place.map.rows) {
    state.action = RowAction::kSkip;
  } else if (place.alone) {
    const bool last = (chunk + 1) * Shape::kChunk >= place.any.end;
    state.action = last ? RowAction::kFinish : RowAction::kKeep;
  } else {
    const Sight sight = sight_of(call, place.map.position + place.map.token(row));
    const int first = sight.begin / Shape::kChunk, last = (sight.end - 1) / Shape::kChunk;
    state.action = chunk < first || chunk > last ? RowAction::kSkip
                   : first == last               ? RowAction::kFinish
                                                 : RowAction::kStore;
    if (state.action == RowAction::kStore) {
      float* weights = call.weights + 2 * (place.map.index(row) * call.chunks + chunk);
      weights[0] = reference;
      weights[1] = total;
    }
  }
}

// Joins the warps' sums of a chunk, in the order of the warps, and folds them into those of earlier
// chunks or stores them: as a partial result, or as the end result.
template <class Shape>
QK_DEVICE void join_sums(const AttentionCall& call, const BlockPlace& place, int chunk, bool fresh,
                         const BlockMemory<Shape>& memory) {
  constexpr int kRows = Shape::kRows, kHeadDim = Shape::kHeadDim;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kHeadDim / 4; i += Shape::kThreads) {
    const int row = i / (kHeadDim / 4), d = i % (kHeadDim / 4) * 4;
    const RowFold& state = memory.rows[row];
    if (state.action == RowAction::kSkip) continue;
    Float4 sum{};
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float share = memory.reference[w * kRows + row];
      const Float4 next = *reinterpret_cast<const Float4*>(
          memory.sums + (w * kRows + row) * Shape::kRowStride + d);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum.value[j] = fmaf(next.value[j], share, sum.value[j]);
    }
    Float4* folded = reinterpret_cast<Float4*>(memory.folded + row * kHeadDim + d);
    const int64_t index = place.map.index(row);
    if (state.action == RowAction::kStore) {
      *reinterpret_cast<Float4*>(call.sums + (index * call.chunks + chunk) * kHeadDim + d) = sum;
      continue;
    }
    const Float4 all = folded_sum(state.fold, fresh ? Float4{} : *folded, sum);
    if (state.action == RowAction::kKeep) {
      *folded = all;
    } else {
      store_out(call, index * kHeadDim + d, all, state.finish);
    }
  }
}

// Where converted queries, which all warps hold, stay.
template <class Shape>
QK_DEVICE QueryOperands<Shape> keep_query(const Word2 (&rows)[Shape::kRowTiles][Shape::kParts],
                                          const float (&factor)[Shape::kRowTiles][2], int warp,
                                          int lane, const BlockMemory<Shape>& memory) {
  QueryOperands<Shape> query;
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i) {
      if constexpr (!Shape::kSharedQuery) {
        query.word[r][i] = rows[r][i];
      } else if (warp == 0) {
        memory.query[(r * Shape::kParts + i) * kWarp + lane] = rows[r][i];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (!Shape::kSharedQuery) {
        query.factor[r][i] = factor[r][i];
      } else if (warp == 0 && lane < 4) {
        memory.factor[8 * r + 2 * lane + i] = factor[r][i];
      }
    }
  }
  if constexpr (Shape::kSharedQuery) {
    __syncthreads();
    query.word = memory.query + lane;
    query.factor = memory.factor + lane % 4 * 2;
  }
  return query;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    attend(const AttentionCall call) {
  constexpr int kThreadSlots = Shape::kChunk / Shape::kThreads;
  static_assert(Shape::kChunk % Shape::kThreads == 0);
  static_assert(sizeof(BlockPlace) <= 64 && sizeof(RowFold) == 24);
  QK_DYNAMIC_SHARED(uint8_t, bytes);
  const BlockMemory<Shape> memory = BlockMemory<Shape>::at(bytes);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp, warp = thread / kWarp;
  const int g = lane / 4, t = lane % 4;
  start_next_kernel();
  wait_for_previous_kernel();
  BlockPlace found;
  if (!find_block(call, Shape::kChunk, found)) return;

  // What takes a way through memory is begun first: the table, queries, then keys and values.
  int32_t slots[kThreadSlots];
#pragma unroll
  for (int i = 0; i < kThreadSlots; ++i) {
    slots[i] = found.slot<Shape>(call, found.first_chunk, i);
  }
  Word2 rows[Shape::kRowTiles][Shape::kParts];
  load_query<Shape>(call, found.map, g, t, rows);
#pragma unroll
  for (int i = 0; i < kThreadSlots; ++i) memory.slots[thread + i * Shape::kThreads] = slots[i];
  if (thread == 0) *memory.place = found;
  __syncthreads();
  const BlockPlace& place = *memory.place;  // out of registers
  ChunkWork<Shape> work;
  work.slot_bytes = call.kv_heads * (Shape::kHeadDim * Shape::kElement);
  work.keys = call.keys + place.kv_head * (Shape::kHeadDim * Shape::kElement);
  work.values = call.values + place.kv_head * (Shape::kHeadDim * Shape::kElement);
  work.slots = memory.slots;
  work.begin(place.first_chunk, place.any, warp, g, t);

  float factor[Shape::kRowTiles][2];
  convert_query<Shape>(call, call.scale * key_factor(call, place.kv_head), t, rows, factor);
  const auto query = keep_query<Shape>(rows, factor, warp, lane, memory);
  for (;;) {
    RunningSums<Shape> sums;
    clear(sums);
    attend_chunk<Shape>(work, call, place, g, t, query, sums);
    const int chunk = work.chunk;
    const bool fresh = !place.alone || chunk == place.first_chunk;
    const int next = chunk + static_cast<int>(gridDim.y);
    const bool more = next * Shape::kChunk < place.any.end;
    __syncthreads();  // nobody reads the last chunk's sums or this one's slots any more
    share_sums<Shape>(sums, warp, g, t, memory);
    if (more) {
#pragma unroll
      for (int i = 0; i < kThreadSlots; ++i) {
        memory.slots[thread + i * Shape::kThreads] = place.slot<Shape>(call, next, i);
      }
    }
    __syncthreads();
    if (more) work.begin(next, place.any, warp, g, t);
    if (thread < Shape::kRows) join_totals<Shape>(call, place, chunk, fresh, thread, memory);
    __syncthreads();
    join_sums<Shape>(call, place, chunk, fresh, memory);
    if (!more) return;
  }
}

}  // namespace quantkit::cuda
