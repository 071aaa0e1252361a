"""The numbers of small tensors, from the file's own pages: nothing is loaded as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.tensor_file import TensorEntry

Numbers = NDArray[np.float32]
_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


class NumberReader:
    """Reads tensors of floats; each file is mapped once."""

    def __init__(self) -> None:
        self._maps: dict[Path, NDArray[np.uint8] | None] = {}

    def read(self, entry: TensorEntry) -> Numbers | None:
        """Return a tensor's values, flat, or None where they are no floats or not in the file."""
        data = self._mapped(entry.source) if isinstance(entry.source, Path) else None
        if data is None or entry.nbytes == 0 or entry.offset + entry.nbytes > len(data):
            return None
        raw = data[entry.offset : entry.offset + entry.nbytes]
        if entry.dtype in _FLOATS:
            with np.errstate(over="ignore"):
                return np.frombuffer(raw, _FLOATS[entry.dtype]).astype(np.float32)
        if entry.dtype == "BF16":
            return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        if entry.dtype == "F8_E8M0":
            return np.exp2(raw.astype(np.float32) - 127)
        return None

    def _mapped(self, path: Path) -> NDArray[np.uint8] | None:
        if path not in self._maps:
            try:
                self._maps[path] = np.memmap(path, dtype=np.uint8, mode="r")
            except (OSError, ValueError):
                self._maps[path] = None
        return self._maps[path]


def is_bfloat16(values: Numbers) -> NDArray[np.bool_]:
    """Say for each value whether bfloat16 holds it exactly."""
    low_half = np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFF)
    exact: NDArray[np.bool_] = np.equal(low_half, 0)
    return exact
