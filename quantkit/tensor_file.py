"""One safetensors file, written tensor by tensor: from memory, or from the bytes of other files.

The library's own writer holds a second copy of a file in memory; this one holds none, so a shard
costs no memory, and what it has written is on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.staging import staged_file

COPY_BYTES = 1 << 23
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls the dtypes that a checkpoint may have."""
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: its fields in the header, and what holds it: memory, or an open file.

    `offset` is where it starts in a source that is a file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: Tensor | Path
    offset: int = 0

    def chunks(self) -> Iterator[memoryview | bytes]:
        """Yield the tensor's bytes in order, a few at a time."""
        if isinstance(self.source, Tensor):
            flat = self.source.detach().cpu().contiguous().reshape(-1)
            yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            return
        with self.source.open("rb") as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                chunk = file.read(min(left, COPY_BYTES))
                if not chunk:
                    raise CheckpointError(f"{self.source} is truncated in tensor {self.name}")
                left -= len(chunk)
                yield chunk


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, complete or not at all, without a copy of it in memory.

    Raises CheckpointError with the path and the bytes, caused by the OSError; and for a dtype that
    a checkpoint may not have.
    """
    entries = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {name} is {tensor.dtype}, which cannot be stored")
        dtype = DTYPE_NAMES[tensor.dtype]
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), tensor.nbytes, tensor))
    write_entries(path, entries)


def write_entries(path: Path, entries: Sequence[TensorEntry]) -> None:
    """Write the tensors of `entries` as one file; as `write_tensors`."""
    # Wide types first, so that every tensor is aligned to its type: the header keeps their order.
    ordered = sorted(entries, key=lambda entry: -ITEM_BYTES[entry.dtype])
    starts: dict[str, int] = {}
    total = 0
    for entry in ordered:
        starts[entry.name] = total
        total += entry.nbytes
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        span = [starts[entry.name], starts[entry.name] + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": span}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with staged_file(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for entry in ordered:
                file.writelines(entry.chunks())
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({total} bytes): {error.strerror}; free space or choose another "
            "output folder, then run again"
        ) from error


def read_entries(path: Path) -> list[TensorEntry]:
    """Read the header of a file that `write_entries` wrote."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    del header["__metadata__"]
    return [
        TensorEntry(name, f["dtype"], tuple(f["shape"]), end - start, path, 8 + size + start)
        for name, f in header.items()
        for start, end in [f["data_offsets"]]
    ]
