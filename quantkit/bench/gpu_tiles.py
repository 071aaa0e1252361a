"""Every tile of scaled_mm by number of rows: what csrc/cuda/scaled_mm_dispatch.h chooses by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from quantkit.bench.gpu_timing import COLD_BYTES, random_codes, seconds_of
from quantkit.row_ops import quantize_rows

SM90_TILES: Final = (
    "swap_64x16x256", "swap_64x32x256", "swap_64x64x256", "64x128x128", "128x128x128",
)  # fmt: skip

torch.library.define(
    "quantkit::scaled_mm_tile",
    "(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
    " ScalarType dtype, str activation, str tile) -> Tensor",
)


@dataclass(frozen=True, slots=True)
class TileSpeed:
    """One tile at one size: microseconds."""

    tile: str
    rows: int
    out_features: int
    in_features: int
    microseconds: float


def measure_tiles(
    sizes: Sequence[tuple[int, int]], rows: Sequence[int], device: torch.device, repeats: int
) -> Iterator[TileSpeed]:
    """Measure every tile for each weight (out_features, in_features) and number of rows."""
    op = torch.ops.quantkit.scaled_mm_tile
    for out, columns in sizes:
        copies = max(8, min(64, COLD_BYTES // (2 * out * columns)))
        weights = [random_codes((out, columns), device) for _ in range(copies)]
        scale = torch.rand(out, device=device)
        for count in rows:
            x = quantize_rows(torch.randn(count, columns, device=device).bfloat16())
            for tile in SM90_TILES:
                if count > 64 * int(tile.removeprefix("swap_").split("x")[1]):
                    continue
                runs = [
                    partial(op, *x, weight, scale, None, torch.bfloat16, "none", tile)
                    for weight in weights[: 8 if count > 512 else None]
                ]
                taken = 1e6 * seconds_of(runs, repeats)
                yield TileSpeed(tile, count, out, columns, taken)
