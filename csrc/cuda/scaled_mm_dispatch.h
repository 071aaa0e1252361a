// Which scaled_mm kernel takes which problem: data, and one function that reads it. Plain C++, so
// that tests/cuda can ask it everything on any machine.
#pragma once

#include <cstdint>

namespace quantkit::cuda {

enum class ScaledMmTile {
  kSwap64x16x256Sm90,
  kSwap64x32x256Sm90,
  kSwap64x64x256Sm90,
  k64x128x128Sm90,
  k128x128x128Sm90,
  k16x64x128Sm89,
  k64x64x128Sm89,
  k64x128x128Sm89,
  k128x128x64Sm89,
  kSwap128x32x128Sm100,
  k128x128x128Sm100,
  k256x128x128Sm100,
  k64x64x128Sm120,
  k128x128x128Sm120,
};

// `rows` x `columns` are a block's part of the matrix that the kernel computes: of the output, or,
// where `swap` is set, of its transpose; `depth` is what it loads of K at a time.
struct ScaledMmTileShape {
  ScaledMmTile tile;
  const char* name;
  int architecture;  // 10 * major + minor of the only compute capability that runs it
  bool swap;
  int rows;
  int columns;
  int depth;
};

inline constexpr ScaledMmTileShape kScaledMmTiles[] = {
    {ScaledMmTile::kSwap64x16x256Sm90, "swap_64x16x256", 90, true, 64, 16, 256},
    {ScaledMmTile::kSwap64x32x256Sm90, "swap_64x32x256", 90, true, 64, 32, 256},
    {ScaledMmTile::kSwap64x64x256Sm90, "swap_64x64x256", 90, true, 64, 64, 256},
    {ScaledMmTile::k64x128x128Sm90, "64x128x128", 90, false, 64, 128, 128},
    {ScaledMmTile::k128x128x128Sm90, "128x128x128", 90, false, 128, 128, 128},
    {ScaledMmTile::k16x64x128Sm89, "16x64x128", 89, false, 16, 64, 128},
    {ScaledMmTile::k64x64x128Sm89, "64x64x128", 89, false, 64, 64, 128},
    {ScaledMmTile::k64x128x128Sm89, "64x128x128", 89, false, 64, 128, 128},
    {ScaledMmTile::k128x128x64Sm89, "128x128x64", 89, false, 128, 128, 64},
    {ScaledMmTile::kSwap128x32x128Sm100, "swap_128x32x128", 100, true, 128, 32, 128},
    {ScaledMmTile::k128x128x128Sm100, "128x128x128", 100, false, 128, 128, 128},
    {ScaledMmTile::k256x128x128Sm100, "256x128x128", 100, false, 256, 128, 128},
    {ScaledMmTile::k64x64x128Sm120, "64x64x128", 120, false, 64, 64, 128},
    {ScaledMmTile::k128x128x128Sm120, "128x128x128", 120, false, 128, 128, 128},
};

// A rule holds for up to `max_rows` rows of activations, as long as the tile's blocks number at
// most `max_waves` times the multiprocessors. The first rule that holds decides.
struct ScaledMmRule {
  int architecture;
  int64_t max_rows;
  double max_waves;
  ScaledMmTile tile;
};

inline constexpr int64_t kAnyRows = INT64_MAX;
inline constexpr double kAnyWaves = 1e30;

// Those of sm_90 were chosen by measurement on an H200 (quantkit/bench/gpu_tiles.py, the four
// layers of Llama 3 8B at 1 to 4096 rows); the others are estimates.
inline constexpr ScaledMmRule kScaledMmRules[] = {
    {90, 16, kAnyWaves, ScaledMmTile::kSwap64x16x256Sm90},
    {90, 32, kAnyWaves, ScaledMmTile::kSwap64x32x256Sm90},
    {90, 64, kAnyWaves, ScaledMmTile::kSwap64x64x256Sm90},
    {90, 384, kAnyWaves, ScaledMmTile::k64x128x128Sm90},
    {90, kAnyRows, kAnyWaves, ScaledMmTile::k128x128x128Sm90},

    {89, 16, kAnyWaves, ScaledMmTile::k16x64x128Sm89},
    {89, 64, kAnyWaves, ScaledMmTile::k64x64x128Sm89},
    {89, 256, kAnyWaves, ScaledMmTile::k64x128x128Sm89},
    {89, kAnyRows, kAnyWaves, ScaledMmTile::k128x128x64Sm89},

    {100, 64, kAnyWaves, ScaledMmTile::kSwap128x32x128Sm100},
    {100, 256, kAnyWaves, ScaledMmTile::k128x128x128Sm100},
    {100, kAnyRows, kAnyWaves, ScaledMmTile::k256x128x128Sm100},

    {120, 256, kAnyWaves, ScaledMmTile::k64x64x128Sm120},
    {120, kAnyRows, kAnyWaves, ScaledMmTile::k128x128x128Sm120},
};

constexpr const ScaledMmTileShape& scaled_mm_shape(ScaledMmTile tile) {
  return kScaledMmTiles[static_cast<int>(tile)];
}

// Blocks that a tile cuts an output [m, n] into.
constexpr int64_t scaled_mm_blocks(const ScaledMmTileShape& shape, int64_t m, int64_t n) {
  const int64_t rows = shape.swap ? n : m;
  const int64_t columns = shape.swap ? m : n;
  return ((rows + shape.rows - 1) / shape.rows) * ((columns + shape.columns - 1) / shape.columns);
}

// The tile for an output [m, n] on a device, or null where there is none for its architecture.
constexpr const ScaledMmTileShape* choose_scaled_mm_tile(int architecture, int multiprocessors,
                                                         int64_t m, int64_t n) {
  for (const ScaledMmRule& rule : kScaledMmRules) {
    if (rule.architecture != architecture || m > rule.max_rows) continue;
    const ScaledMmTileShape& shape = scaled_mm_shape(rule.tile);
    const double limit = rule.max_waves * multiprocessors;
    if (static_cast<double>(scaled_mm_blocks(shape, m, n)) <= limit) return &shape;
  }
  return nullptr;
}

// Up to so many rows scaled_gated_mm swaps its operands.
inline constexpr int64_t kGatedSwapRows = 64;

// Large outputs are taken in bands of eight tiles: what runs at one time then needs fewer rows of
// either operand, where neither stays in L2.
constexpr int scaled_mm_band(int64_t m, int64_t n) { return m >= 4096 && n >= 4096 ? 8 : 1; }

// All tables are constants, so their consistency is checked where they are compiled.
constexpr bool scaled_mm_tables_hold() {
  int i = 0;
  for (const ScaledMmTileShape& shape : kScaledMmTiles) {
    if (static_cast<int>(shape.tile) != i++) return false;
  }
  for (const ScaledMmRule& rule : kScaledMmRules) {
    if (scaled_mm_shape(rule.tile).architecture != rule.architecture) return false;
  }
  return true;
}
static_assert(scaled_mm_tables_hold());

}  // namespace quantkit::cuda
