// Linear layers with tiles: 32 weight rows at a time are decoded into tiles in cache, while they
// meet the first 16 or 32 rows of x, and meet the other rows there. The weight is the first operand
// because its rows lie in memory as a tile wants them; results come out with a weight row's as a
// row, and are turned around when they are stored.
//
// One output is summed over chunks of 64 columns, in them over two tiles, in these over pairs of
// columns; with groups, each is summed by itself, scaled, and added to those before. Batch and
// blocking appear nowhere in that order. Sums are float32, and x is not rounded.
//
// For kernels_amx.cpp, after amx_tiles.h.
#pragma once

namespace quantkit {
namespace {

constexpr int64_t kPanelTiles = 2;
constexpr int64_t kPanelRows = kPanelTiles * kTileRows;
// Packed x beside a decoded panel in L2.
constexpr int64_t kPackedBytes = 1024 * 1024;

inline int64_t chunks_of(int64_t columns) { return ceil_div(columns, kChunk); }

bool tiles_take(FloatType x, const WeightMatrix& weight) {
  const bool exact = weight.format != WeightFormat::kFloat32 &&
                     weight.format != WeightFormat::kFloat16;
  const bool whole_chunks = weight.groups == 1 || weight.group_size % kChunk == 0;
  return x == FloatType::kBFloat16 && exact && whole_chunks && weight.columns > 0;
}

int64_t tiles_max_batch(int64_t columns) {
  const int64_t rows = kPackedBytes / (chunks_of(columns) * kChunk * 2);
  return rows < 2 * kTileRows ? 2 * kTileRows : rows / (2 * kTileRows) * (2 * kTileRows);
}

int64_t tiles_packed_size(const PackTask& task) {
  return ceil_div(task.batch, kTileRows) * chunks_of(task.columns) * 2 * kTileFloats;
}

void pack_tile(const PackTask& task, int64_t tile, float* packed) {
  const int64_t first = tile * kTileRows;
  const int64_t rows = at_most(kTileRows, task.batch - first);
  const BFloat16* row[kTileRows];
  for (int64_t i = 0; i < rows; ++i) {
    row[i] = static_cast<const BFloat16*>(task.x) + (first + i) * task.columns;
  }
  float* target = packed + tile * chunks_of(task.columns) * 2 * kTileFloats;
  pack_tile_columns(row, rows, task.columns, reinterpret_cast<char*>(target));
}

// Scratch: float32 tiles of results, as many for the sum of one group, decoded weights. Up to 32
// rows of x meet each chunk once: two chunks are kept then.
constexpr int64_t kResultTiles = 4;

inline int64_t kept_chunks(const LinearTask& task) {
  return task.batch <= 2 * kTileRows ? 2 : chunks_of(task.weight.columns);
}

int64_t tiles_scratch_size(const LinearTask& task) {
  return (2 * kResultTiles + kept_chunks(task) * 2 * kPanelTiles) * kTileFloats;
}

int64_t tiles_step(const LinearTask&, bool gated) { return gated ? kTileRows : kPanelRows; }

// 32 weight rows; those beyond the end repeat the last one.
struct PanelRows {
  const uint8_t* row[kPanelRows];
  const float* scale[kPanelRows];  // of the row's first group
  int64_t ahead;                   // bytes from a row to its place in the next panel

  // Two times 16 rows, of which `valid` exist.
  static PanelRows at(const LinearTask& task, const int64_t (&first)[kPanelTiles],
                      const int64_t (&valid)[kPanelTiles], int64_t step) {
    static constexpr float kOne = 1.0f;
    const WeightMatrix& weight = task.weight;
    const int64_t stride = weight.columns * bytes_of(weight.format);
    PanelRows panel;
    panel.ahead = step * stride;
    for (int64_t i = 0; i < kPanelRows; ++i) {
      const int64_t tile = i / kTileRows;
      const int64_t row = first[tile] + at_most(i % kTileRows, valid[tile] - 1);
      panel.row[i] = weight.codes + row * stride;
      panel.scale[i] = weight.scale == nullptr ? &kOne : weight.scale + row * weight.groups;
    }
    return panel;
  }
};

// Where the tiles of a chunk of decoded weights are: tile by tile, two of each.
struct DecodedWeights {
  char* data;
  int64_t kept;

  char* chunk(int64_t number) const {
    return data + (kept == 2 ? number % 2 : number) * 2 * kPanelTiles * kTileBytes;
  }
};

template <class Format>
struct ChunkDecoder {
  PairDecoder<Format> decoder;
  const PanelRows& panel;
  const DecodedWeights& decoded;
  int64_t columns;

  // Decodes rows [8 * part, 8 * part + 8) of a chunk.
  inline __attribute__((always_inline)) void eight(int64_t chunk, int part) const {
    constexpr int64_t kBytes = PairDecoder<Format>::kBytes;
    const uint64_t mask = first_columns(columns - chunk * kChunk);
    char* target = decoded.chunk(chunk) + part / 2 * 2 * kTileBytes + part % 2 * 8 * 64;
    QK_UNROLL for (int i = 0; i < 8; ++i) {
      const uint8_t* stored = panel.row[part * 8 + i] + chunk * kChunk * kBytes;
      QK_UNROLL for (int64_t line = 0; line < kBytes; ++line) {
        __builtin_prefetch(stored + panel.ahead + 64 * line, 0, 2);
      }
      store_pairs(decoder, stored, mask, target + 64 * i, target + kTileBytes + 64 * i);
    }
  }
};

// Two tiles of weight rows by one of x. Results are tiles 0 and 1.
struct NarrowBlock {
  static constexpr int64_t kTilesOfX = 1;

  static inline __attribute__((always_inline)) void clear() {
    _tile_zero(0);
    _tile_zero(1);
  }

  // One chunk; decodes another in between if there is one.
  template <class Format>
  static inline __attribute__((always_inline)) void add(const char* weights, const char* x, int64_t,
                                                        const ChunkDecoder<Format>& decoder,
                                                        int64_t next) {
    _tile_loadd(6, x, 64);
    _tile_loadd(4, weights, 64);
    if (next > 0) decoder.eight(next, 0);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, weights + 2 * kTileBytes, 64);
    if (next > 0) decoder.eight(next, 1);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(7, x + kTileBytes, 64);
    _tile_loadd(4, weights + kTileBytes, 64);
    if (next > 0) decoder.eight(next, 2);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, weights + 3 * kTileBytes, 64);
    if (next > 0) decoder.eight(next, 3);
    _tile_dpbf16ps(1, 5, 7);
  }

  static inline __attribute__((always_inline)) void store(float* results) {
    _tile_stored(0, results, 64);
    _tile_stored(1, results + kTileFloats, 64);
  }
};

// Two tiles of weight rows by two of x. Results are tiles 0 to 3, weight rows outermost.
struct WideBlock {
  static constexpr int64_t kTilesOfX = 2;

  static inline __attribute__((always_inline)) void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  template <class Format>
  static inline __attribute__((always_inline)) void add(const char* weights, const char* x,
                                                        int64_t x_stride,
                                                        const ChunkDecoder<Format>& decoder,
                                                        int64_t next) {
    QK_UNROLL for (int half = 0; half < 2; ++half) {
      _tile_loadd(6, x + half * kTileBytes, 64);
      _tile_loadd(4, weights + half * kTileBytes, 64);
      _tile_loadd(7, x + x_stride + half * kTileBytes, 64);
      if (next > 0) decoder.eight(next, 2 * half);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, weights + (2 + half) * kTileBytes, 64);
      if (next > 0) decoder.eight(next, 2 * half + 1);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  static inline __attribute__((always_inline)) void store(float* results) {
    _tile_stored(0, results, 64);
    _tile_stored(1, results + kTileFloats, 64);
    _tile_stored(2, results + 2 * kTileFloats, 64);
    _tile_stored(3, results + 3 * kTileFloats, 64);
  }
};

// results += scale of the group * the group's sums.
template <class Block>
void add_group(const PanelRows& panel, int64_t group, const float* sums, float* results) {
  for (int64_t tile = 0; tile < kPanelTiles * Block::kTilesOfX; ++tile) {
    for (int64_t i = 0; i < kTileRows; ++i) {
      const float scale = panel.scale[tile / Block::kTilesOfX * kTileRows + i][group];
      const int64_t at = tile * kTileFloats + i * 16;
      const __m512 before = group == 0 ? _mm512_setzero_ps() : _mm512_load_ps(results + at);
      const __m512 sum = _mm512_load_ps(sums + at);
      _mm512_store_ps(results + at, _mm512_fmadd_ps(sum, _mm512_set1_ps(scale), before));
    }
  }
}

// Multiplies a panel by one or two tiles of x, all columns; kDecode: decodes the panel on the way.
// results [panel tile, tile of x, 16 weight rows, 16 rows of x]; scaled if there are groups.
template <class Block, class Format, bool kDecode>
__attribute__((noinline)) void multiply_panel(const LinearTask& task, const PanelRows& panel,
                                              const DecodedWeights& decoded, const char* x,
                                              float* results) {
  const WeightMatrix& weight = task.weight;
  const int64_t chunks = chunks_of(weight.columns);
  const int64_t x_stride = chunks * 2 * kTileBytes;
  const int64_t group_chunks = weight.groups == 1 ? chunks : weight.group_size / kChunk;
  float* sums = results + kResultTiles * kTileFloats;
  const ChunkDecoder<Format> decoder{PairDecoder<Format>::make(), panel, decoded, weight.columns};
  if constexpr (kDecode) {
    for (int part = 0; part < 4; ++part) decoder.eight(0, part);
  }
  Block::clear();
  int64_t group_end = group_chunks;
  for (int64_t chunk = 0; chunk < chunks; ++chunk, x += 2 * kTileBytes) {
    finish_stores();
    const int64_t next = kDecode && chunk + 1 < chunks ? chunk + 1 : 0;
    Block::add(decoded.chunk(chunk), x, x_stride, decoder, next);
    if (weight.groups > 1 && (chunk + 1 == group_end || chunk + 1 == chunks)) {
      Block::store(sums);
      add_group<Block>(panel, chunk / group_chunks, sums, results);
      Block::clear();
      group_end += group_chunks;
    }
  }
  if (weight.groups == 1) Block::store(results);
  finish_stores();
}

// 16 features of one tile: scale of a row, its bias.
struct RowFactors {
  alignas(64) float scale[kTileRows];
  alignas(64) float bias[kTileRows];

  static RowFactors at(const LinearTask& task, const PanelRows& panel, int64_t tile, int64_t row,
                       int64_t valid) {
    RowFactors factors;
    for (int64_t i = 0; i < kTileRows; ++i) {
      const float* scale = panel.scale[tile * kTileRows + i];
      factors.scale[i] = task.weight.groups == 1 ? *scale : 1.0f;
    }
    bias_lanes<Avx512>(task, row, valid).store(factors.bias);
    return factors;
  }

  __m512 apply(const float* results, int i) const {
    const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(results + i * 16), _mm512_set1_ps(scale[i]));
    return _mm512_add_ps(scaled, _mm512_set1_ps(bias[i]));
  }
};

// Stores 16 features of up to 16 rows of x: values[feature] has the rows in its lanes.
inline void store_features(const LinearTask& task, __m512i (&values)[16], int64_t first_row,
                           int64_t feature, int64_t valid) {
  transpose(values);
  const int64_t rows = at_most(kTileRows, task.batch - first_row);
  for (int64_t m = 0; m < rows; ++m) {
    store_result<Avx512>(task, {_mm512_castsi512_ps(values[m])},
                         (first_row + m) * task.features + feature, valid);
  }
}

// Features [begin, end), at most tiles_step() of them, of all rows of x.
template <class Format, bool kGated>
void panel_features(const LinearTask& task, int64_t begin, int64_t end, float* scratch) {
  const int64_t second = kGated ? task.features + begin : begin + kTileRows;
  const int64_t valid = at_most(kTileRows, end - begin);
  const int64_t rest = kGated ? valid : end - begin - valid;
  const int64_t first[] = {begin, rest > 0 ? second : begin};
  const int64_t counts[] = {valid, rest > 0 ? rest : valid};
  const PanelRows panel = PanelRows::at(task, first, counts, kGated ? kTileRows : kPanelRows);
  const RowFactors factors[] = {RowFactors::at(task, panel, 0, first[0], counts[0]),
                                RowFactors::at(task, panel, 1, first[1], counts[1])};
  const DecodedWeights decoded{reinterpret_cast<char*>(scratch + 2 * kResultTiles * kTileFloats),
                               kept_chunks(task)};
  const int64_t tile_bytes = chunks_of(task.weight.columns) * 2 * kTileBytes;
  const char* x = reinterpret_cast<const char*>(task.x);
  for (int64_t row = 0; row < task.batch; row += 2 * kTileRows, x += 2 * tile_bytes) {
    const int64_t tiles = row + kTileRows < task.batch ? 2 : 1;
    const auto multiply =
        tiles == 2 ? (row == 0 ? multiply_panel<WideBlock, Format, true>
                               : multiply_panel<WideBlock, Format, false>)
                   : (row == 0 ? multiply_panel<NarrowBlock, Format, true>
                               : multiply_panel<NarrowBlock, Format, false>);
    multiply(task, panel, decoded, x, scratch);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const float* upper = scratch + tile * kTileFloats;
      const float* lower = upper + tiles * kTileFloats;
      const int64_t first_row = row + tile * kTileRows;
      __m512i values[16];
      if constexpr (kGated) {
        QK_UNROLL for (int i = 0; i < 16; ++i) {
          const __m512 gate =
              activate_lanes<Avx512>({factors[0].apply(upper, i)}, task.activation).v;
          values[i] = _mm512_castps_si512(_mm512_mul_ps(gate, factors[1].apply(lower, i)));
        }
        store_features(task, values, first_row, begin, valid);
      } else {
        QK_UNROLL for (int i = 0; i < 16; ++i) {
          values[i] = _mm512_castps_si512(factors[0].apply(upper, i));
        }
        store_features(task, values, first_row, begin, valid);
        if (rest <= 0) continue;
        QK_UNROLL for (int i = 0; i < 16; ++i) {
          values[i] = _mm512_castps_si512(factors[1].apply(lower, i));
        }
        store_features(task, values, first_row, second, rest);
      }
    }
  }
}

template <bool kGated>
void tiles_linear(const LinearTask& task, int64_t begin, int64_t end, float* scratch) {
  const int64_t step = tiles_step(task, kGated);
  for (int64_t feature = begin; feature < end; feature += step) {
    const int64_t last = at_most(feature + step, end);
    switch (task.weight.format) {
      case WeightFormat::kE4M3: panel_features<E4M3, kGated>(task, feature, last, scratch); break;
      case WeightFormat::kE5M2: panel_features<E5M2, kGated>(task, feature, last, scratch); break;
      case WeightFormat::kE3M4: panel_features<E3M4, kGated>(task, feature, last, scratch); break;
      default: panel_features<BFloat16, kGated>(task, feature, last, scratch);
    }
  }
}

constexpr TileKernels kTileKernels{
    .fewest_rows = 4,
    .takes = tiles_take,
    .max_batch = tiles_max_batch,
    .packed_size = tiles_packed_size,
    .pack = pack_tile,
    .scratch_size = tiles_scratch_size,
    .step = tiles_step,
    .linear = tiles_linear<false>,
    .gated_linear = tiles_linear<true>,
};

}  // namespace
}  // namespace quantkit
