"""The table by which scaled_mm chooses a kernel, asked on the host; and the kernels' files.

What takes a minute to compile, CUTLASS's side of it, is in check_scaled_mm.py (`make cuda-check`).
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "csrc" / "cuda"
SOURCE = """
#include "scaled_mm_dispatch.h"
using namespace quantkit::cuda;

extern "C" int tile_count() { return sizeof(kScaledMmTiles) / sizeof(kScaledMmTiles[0]); }
extern "C" const char* tile_name(int i) { return kScaledMmTiles[i].name; }
extern "C" void tile_numbers(int i, int* out) {
  const ScaledMmTileShape& shape = kScaledMmTiles[i];
  const int numbers[] = {shape.architecture, shape.swap, shape.rows, shape.columns, shape.depth};
  for (int j = 0; j < 5; ++j) out[j] = numbers[j];
}
extern "C" int choose(int architecture, int multiprocessors, long m, long n) {
  const ScaledMmTileShape* shape =
      choose_scaled_mm_tile(architecture, multiprocessors, m, n);
  return shape == nullptr ? -1 : static_cast<int>(shape->tile);
}
"""
MULTIPROCESSORS = {89: (58, 128, 142), 90: (78, 114, 132), 100: (148,), 120: (84, 170, 188)}
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096, 131072)
COLUMNS = (16, 32, 48, 576, 1024, 1280, 4096, 6144, 14336, 28672, 128256, 262144)


@dataclass(frozen=True)
class Tile:
    """A row of kScaledMmTiles."""

    name: str
    architecture: int
    swap: bool
    rows: int
    columns: int
    depth: int

    @property
    def tokens(self) -> int:
        """Rows of activations that a block takes."""
        return self.columns if self.swap else self.rows

    @property
    def channels(self) -> int:
        """Rows of weights that a block takes."""
        return self.rows if self.swap else self.columns


class Table:
    """The compiled table."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.tile_name.restype = ctypes.c_char_p
        self.tiles = [self._tile(i) for i in range(self._library.tile_count())]

    def _tile(self, i: int) -> Tile:
        numbers = (ctypes.c_int * 5)()
        self._library.tile_numbers(i, numbers)
        architecture, swap, rows, columns, depth = numbers
        name = self._library.tile_name(i).decode()
        return Tile(name, architecture, bool(swap), rows, columns, depth)

    def choose(self, architecture: int, multiprocessors: int, m: int, n: int) -> Tile | None:
        """Return the tile for an output [m, n]."""
        rows, columns = ctypes.c_long(m), ctypes.c_long(n)
        i = self._library.choose(architecture, multiprocessors, rows, columns)
        return None if i < 0 else self.tiles[i]

    def chosen(self) -> Iterator[tuple[int, int, int, Tile]]:
        """Yield (multiprocessors, m, n, tile) over architectures and sizes around every edge."""
        for architecture, counts in MULTIPROCESSORS.items():
            for count, m, n in itertools.product(counts, ROWS, COLUMNS):
                tile = self.choose(architecture, count, m, n)
                assert tile is not None, (architecture, count, m, n)
                assert tile.architecture == architecture
                yield count, m, n, tile


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder = tmp_path_factory.mktemp("dispatch")
    source, library = folder / "dispatch.cpp", folder / "dispatch.so"
    source.write_text(SOURCE)
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{CUDA}"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    return Table(library)


def test_every_problem_has_a_tile(table: Table) -> None:
    used = {tile for _, _, _, tile in table.chosen()}
    assert used == set(table.tiles), "a tile that nothing chooses"


@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 87, 103, 110, 121])
def test_other_architectures_have_none(table: Table, architecture: int) -> None:
    assert table.choose(architecture, 100, 64, 4096) is None


def test_operands_are_swapped_for_few_rows_only(table: Table) -> None:
    for _, m, _, tile in table.chosen():
        assert tile.swap <= (m <= 64)
        if tile.architecture in (90, 100):
            assert tile.swap == (m <= 64), "a tile of 64 rows or more for few rows"


def test_blocks_grow_with_the_output(table: Table) -> None:
    for architecture, counts in MULTIPROCESSORS.items():
        for count in counts:
            for n in COLUMNS:
                _assert_ascending(table, [(architecture, count, m, n) for m in ROWS])
            for m in ROWS:
                _assert_ascending(table, [(architecture, count, m, n) for n in COLUMNS])


def _assert_ascending(table: Table, problems: list[tuple[int, int, int, int]]) -> None:
    tiles = [table.choose(*problem) for problem in problems]
    areas = [tile.rows * tile.columns for tile in tiles if tile is not None]
    assert areas == sorted(areas), problems


def test_tiles_are_not_much_larger_than_the_rows(table: Table) -> None:
    for _, m, _, tile in table.chosen():
        assert tile.tokens <= max(64, 2 * m), (m, tile)


def test_tiles_suit_the_instructions(table: Table) -> None:
    for tile in table.tiles:
        rows, columns = {89: (16, 8), 90: (64, 8), 100: (64, 16), 120: (64, 8)}[tile.architecture]
        assert tile.rows % rows == 0
        assert tile.columns % columns == 0
        assert tile.depth % 32 == 0, "32 codes are multiplied at a time"
        assert tile.depth * (tile.rows + tile.columns) * 2 <= 99 * 1024, "two stages fit anywhere"


def test_every_tile_has_a_file_and_is_named_in_the_op(table: Table) -> None:
    names = {path.stem for path in CUDA.glob("scaled_mm_*_sm*.cu")}
    op = (CUDA / "scaled_mm.cu").read_text()
    for tile in table.tiles:
        pattern = re.compile(rf"scaled_mm_{tile.name}(_[a-z]+)?_sm{tile.architecture}a?")
        matching = {name for name in names if pattern.fullmatch(name)}
        assert len(matching) == 1, (tile, names)
        name = matching.pop()
        names.remove(name)
        assert f"return {name}();" in op
        text = (CUDA / f"{name}.cu").read_text().replace("_", "")
        separator = ", "
        shape = separator.join(map(str, (tile.rows, tile.columns, tile.depth)))
        assert f"Shape<{shape}>" in text, "the file's shape is not the table's"
    assert not names, "files that no tile names"
