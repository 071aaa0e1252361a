"""The header of one safetensors file, read without trusting it.

The library's own reader stops at the first fault and says little of it; a checker says what is
wrong and goes on with what can still be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from quantkit.lint.documents import whole_number
from quantkit.tensor_file import ITEM_BYTES, TensorEntry

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
ITEM_BITS = {name: 8 * size for name, size in ITEM_BYTES.items()} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "C64": 64,
}
"""Every dtype that the library knows, also those that no checkpoint of ours has."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says it holds. `problem` is empty where the library would open the file."""

    entries: tuple[TensorEntry, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def read_header(path: Path) -> Header:
    """Read a file's header; whatever is wrong with the file becomes `Header.problem`."""
    try:
        fields, start, size = _read_fields(path)
    except OSError as fault:
        return Header(problem=f"cannot be read: {fault.strerror or fault}")
    except (ValueError, RecursionError) as fault:
        return Header(problem=str(fault))
    metadata = fields.pop("__metadata__", None)
    entries, problems = [], []
    for name, value in fields.items():
        entry = _entry(name, value, path, start)
        if isinstance(entry, str):
            problems.append(f"tensor {name} {entry}")
        else:
            entries.append(entry)
    problems += _layout_problems(entries, start, size)
    metadata = metadata if isinstance(metadata, dict) else {}
    return Header(tuple(entries), metadata, problems[0] if problems else "")


def _read_fields(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header's JSON object, where the data starts, and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"is truncated: {size} bytes, and its header alone should have {length}"
            )
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"claims a header of {length} bytes, above {MAX_HEADER_BYTES}")
        text = file.read(length)
    try:
        fields = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as fault:
        raise ValueError(f"has a header that is no JSON: {fault}") from None
    if not isinstance(fields, dict):
        raise ValueError("has a header that is no JSON object")
    return fields, 8 + length, size


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return fields


def _entry(name: str, value: Any, path: Path, start: int) -> TensorEntry | str:
    """Return a tensor, or what is wrong with its fields."""
    value = value if isinstance(value, dict) else {}
    dtype, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        return f"has the dtype {dtype!r}, which safetensors does not know"
    if not isinstance(shape, list) or any(whole_number(size) is None for size in shape):
        return f"has the shape {shape!r}"
    if not isinstance(span, list) or [whole_number(end) for end in span] != span or len(span) != 2:
        return f"has the offsets {span!r}"
    begin, end = span
    bits = prod(shape) * ITEM_BITS[dtype]
    if 8 * (end - begin) != bits:
        return f"has {end - begin} bytes, not the {bits // 8} of {dtype} {shape}"
    return TensorEntry(name, dtype, tuple(shape), end - begin, path, start + begin)


def _layout_problems(entries: list[TensorEntry], start: int, size: int) -> Iterator[str]:
    """Say where tensors do not follow each other, or do not end where the file does."""
    end = start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != end:
            yield f"tensor {entry.name} starts at byte {entry.offset}, expected {end}"
            return
        end += entry.nbytes
    if end != size:
        state = "is truncated" if end > size else "has bytes that belong to no tensor"
        yield f"{state}: {size} bytes, and its tensors end at {end}"
