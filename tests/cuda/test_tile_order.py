"""A model in numpy of which block computes which output, for the grids of weight_linear, qkv_linear
and scaled_mm: every output exactly once, whatever the sizes, swapped or not.

The kernels of weight_linear and qkv_linear run on the emulator too. Those of scaled_mm come from
CUTLASS, whose scheduler this follows (gemm/kernel/static_tile_scheduler.hpp); their tiles are asked
of the project's table.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda.emulator import INCLUDE

SOURCE = """
#include "scaled_mm_dispatch.h"
using namespace quantkit::cuda;

extern "C" int tile_count() { return sizeof(kScaledMmTiles) / sizeof(kScaledMmTiles[0]); }
extern "C" void tile_numbers(int i, long m, long n, long* out) {
  const ScaledMmTileShape& shape = kScaledMmTiles[i];
  const long numbers[] = {shape.swap, shape.rows, shape.columns, scaled_mm_blocks(shape, m, n),
                          scaled_mm_band(m, n)};
  for (int j = 0; j < 5; ++j) out[j] = numbers[j];
}
"""
Counts = NDArray[np.int32]


class Tiles:
    """The table of scaled_mm, as the library is built with it."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.count: int = self._library.tile_count()

    def numbers(self, tile: int, m: int, n: int) -> list[int]:
        """Return swap, rows, columns, blocks and band of a tile for an output [m, n]."""
        found = (ctypes.c_long * 5)()
        self._library.tile_numbers(tile, ctypes.c_long(m), ctypes.c_long(n), found)
        return list(found)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Tiles:
    folder = tmp_path_factory.mktemp("tiles")
    source, library = folder / "tiles.cpp", folder / "tiles.so"
    source.write_text(SOURCE)
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", *INCLUDE]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    return Tiles(library)


def around(*edges: int) -> list[int]:
    """Return both sides of every edge, and 1."""
    return sorted({1, *(edge + step for edge in edges for step in (-1, 0, 1) if edge + step > 0)})


def covered(shape: tuple[int, int], blocks: Iterator[tuple[slice, slice]]) -> Counts:
    """Return how often each element of an output is written."""
    counts = np.zeros(shape, dtype=np.int32)
    for rows, columns in blocks:
        counts[rows, columns] += 1
    return counts


def weight_linear_blocks(
    tokens: int, features: int, row_tiles: int, token_tiles: int
) -> Iterator[tuple[slice, slice]]:
    """Yield what each block of weight_linear writes: grid (blocks of tokens, of features).

    A block is `row_tiles` of 16 features by `token_tiles` of 8 tokens; writes beyond the last of
    either are left out, as numpy's slices do.
    """
    wide, high = 16 * row_tiles, 8 * token_tiles
    for x, y in itertools.product(range(-(-tokens // high)), range(-(-features // wide))):
        yield slice(x * high, (x + 1) * high), slice(y * wide, (y + 1) * wide)


@pytest.mark.parametrize(("row_tiles", "token_tiles"), [(1, 1), (1, 2), (2, 2), (1, 4), (2, 4)])
def test_weight_linear(row_tiles: int, token_tiles: int) -> None:
    wide, high = 16 * row_tiles, 8 * token_tiles
    for tokens, features in itertools.product(around(high, 2 * high), around(wide, 3 * wide)):
        blocks = weight_linear_blocks(tokens, features, row_tiles, token_tiles)
        assert (covered((tokens, features), blocks) == 1).all()


def head_rows(tile: int, head_dim: int, rotary_dim: int) -> list[int]:
    """Return the 16 rows of a tile of qkv_linear in the order in which the instruction has them."""
    head, within = divmod(16 * tile, head_dim)
    if within < rotary_dim:
        first, apart = within // 2, rotary_dim // 2
    else:
        first, apart = within, 8
    low = [head * head_dim + first + g for g in range(8)]
    return low + [row + apart for row in low]


HEADS = [(16, 16), (16, 0), (64, 64), (64, 48), (64, 16), (80, 80), (80, 32), (128, 128), (256, 64)]


@pytest.mark.parametrize(("head_dim", "rotary_dim"), HEADS)
def test_qkv_linear(head_dim: int, rotary_dim: int) -> None:
    """Every row of every head once, a rotated row in one tile with its partner, in place g + 8."""
    rows = 5 * head_dim
    tiles = [head_rows(tile, head_dim, rotary_dim) for tile in range(rows // 16)]
    assert sorted(itertools.chain(*tiles)) == list(range(rows))
    for tile in tiles:
        for low, high in zip(tile[:8], tile[8:], strict=True):
            assert low // head_dim == high // head_dim
            if low % head_dim < rotary_dim:
                assert high - low == rotary_dim // 2
            else:
                assert high % head_dim >= rotary_dim


def log_swizzle(high: int, wide: int, band: int) -> int:
    """Return the power of two that CUTLASS makes of a band for so many tiles."""
    for power, least, tiles in ((3, 8, 6), (2, 4, 3), (1, 2, 2)):
        if band >= least and min(high, wide) >= tiles:
            return power
    return 0


def scheduled(
    high: int, wide: int, cluster: tuple[int, int], band: int
) -> Iterator[tuple[int, int]]:
    """Yield tiles (row, column) in the order of CUTLASS's persistent scheduler for sm_90 and later.

    The longer side of the matrix is the inner loop, but for bands of tiles across it. Grids are
    whole clusters and bands: tiles beyond the matrix come too, and do nothing.
    """
    power = log_swizzle(high, wide, band)
    rows, columns = (
        -(-count // (size << power)) * (size << power)
        for count, size in zip((high, wide), cluster, strict=True)
    )
    along_columns = columns <= rows  # the inner loop: "AlongN"
    inner, outer = (1, 0) if along_columns else (0, 1)
    majors = (rows, columns)[inner] // cluster[inner]
    for number in range(rows * columns):
        rest, minor = divmod(number, cluster[outer])
        rest, major = divmod(rest, cluster[inner])
        bands, offset = divmod(rest, 1 << power)
        band_number, place = divmod(bands, majors)
        across = ((band_number << power) + offset) * cluster[outer] + minor
        along = place * cluster[inner] + major
        yield (across, along) if along_columns else (along, across)


def scaled_mm_blocks(
    m: int, n: int, swap: bool, tile: tuple[int, int], cluster: tuple[int, int], band: int
) -> Iterator[tuple[slice, slice]]:
    """Yield what each tile writes of the output [m, n], which is the transpose where swapped."""
    rows, columns = (n, m) if swap else (m, n)
    high, wide = -(-rows // tile[0]), -(-columns // tile[1])
    for row, column in scheduled(high, wide, cluster, band):
        part = slice(row * tile[0], (row + 1) * tile[0])
        other = slice(column * tile[1], (column + 1) * tile[1])
        yield (other, part) if swap else (part, other)


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (4, 1)])
@pytest.mark.parametrize("band", [1, 8])
def test_scaled_mm_writes_every_output_once(
    tiles: Tiles, cluster: tuple[int, int], band: int
) -> None:
    for number in range(tiles.count):
        swap, rows, columns, _, _ = tiles.numbers(number, 1, 16)
        edges = (columns, rows) if swap else (rows, columns)
        for m, n in itertools.product(around(edges[0], 2 * edges[0]), (1, 7)):
            for features in {16, *(n * edges[1] + step for step in (-16, 0, 16))} - {0}:
                blocks = scaled_mm_blocks(m, features, bool(swap), (rows, columns), cluster, band)
                assert (covered((m, features), blocks) == 1).all()


@pytest.mark.parametrize("swap", [False, True])
def test_the_table_counts_the_tiles_that_write(tiles: Tiles, swap: bool) -> None:
    for number in range(tiles.count):
        found, rows, columns, _, _ = tiles.numbers(number, 1, 16)
        if bool(found) != swap:
            continue
        for m, n in itertools.product(around(rows, columns), (16, 16 * 9, 16 * 17)):
            blocks = scaled_mm_blocks(m, n, swap, (rows, columns), (1, 1), 1)
            writing = [None for part, other in blocks if part.start < m and other.start < n]
            assert len(writing) == tiles.numbers(number, m, n)[3]


@pytest.mark.parametrize("running", [1, 7, 132])
def test_blocks_that_stay_share_all_tiles(running: int) -> None:
    """Block b of those that run at one time takes tiles b, b + running, and so on."""
    order = list(scheduled(9, 20, (2, 1), 8))
    taken = [order[block::running] for block in range(running)]
    assert sorted(itertools.chain(*taken)) == sorted(order)
    assert len(set(order)) == len(order)


def test_large_outputs_are_taken_in_bands(tiles: Tiles) -> None:
    """What runs at one time then needs fewer rows of either operand."""
    sizes = {(4096, 4096): 8, (4095, 4096): 1, (4096, 4080): 1, (64, 28672): 1}
    assert {size: tiles.numbers(0, *size)[4] for size in sizes} == sizes

    def operands(band: int) -> int:
        """Tiles of both operands that 132 blocks read, of an output of 4096 x 6144."""
        wave = list(itertools.islice(scheduled(32, 48, (2, 1), band), 132))
        return len({row for row, _ in wave}) + len({column for _, column in wave})

    assert operands(8) < operands(1)
