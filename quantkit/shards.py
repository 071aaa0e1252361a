"""A folder of safetensors shards: find them, check them, read and write tensors by name.

Knows the Hub's file names and the index, and nothing about what the tensors mean.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.staging import where_it_was_set_aside
from quantkit.tensor_file import TensorEntry, read_entries, write_entries, write_tensors

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
"""The Hub's own limit for comfortable transfers."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError that names the file when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = where_it_was_set_aside(path.parent)
        raise CheckpointError(f"{path} does not exist{hint}") from None
    except (OSError, ValueError, RecursionError) as error:  # nested too deeply, a number too long
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with two-space indent and a final newline; the order of keys is kept."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_weight_map(path: Path) -> dict[str, str]:
    """Return {tensor: file} of an index; raises CheckpointError for files outside its folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; download the index again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise CheckpointError(f"{path} maps tensor {name} to {file!r}, outside the folder")
    return weight_map


class ShardReader:
    """Read-only view of all tensors in a folder; tensors are memory-mapped, not loaded.

    Opening checks that every shard is there and complete, that the index and the shards agree,
    and raises CheckpointError that names the file and the tensor where they do not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = self._read_index()
        for file in sorted(set(index.values())) if index else [SINGLE_NAME]:
            self._open(file)
        if index:
            self._check_index(index)

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX_NAME
        if not path.is_file():
            return {}
        return read_weight_map(path)

    def _open(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; download the folder again")
        try:
            handle: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size
            raise CheckpointError(
                f"{path} ({size} bytes) is truncated or not a safetensors file ({error}); "
                "download it again"
            ) from None
        self._handles[file] = handle
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no dict
            if name in self._file_of:
                raise CheckpointError(
                    f"tensor {name} is in both {self._file_of[name]} and {file} of {self.folder}"
                )
            self._file_of[name] = file

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            if self._file_of.get(name) != file:
                raise CheckpointError(
                    f"{self.folder / INDEX_NAME} says that tensor {name} is in {file}, which does "
                    "not have it; download the folder again"
                )
        for name, file in self._file_of.items():
            if name not in index:
                raise CheckpointError(f"tensor {name} of {self.folder / file} is not in the index")

    @property
    def files(self) -> list[str]:
        """Names of the shard files."""
        return list(self._handles)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def file_of(self, name: str) -> str:
        """Return the name of the shard that holds a tensor."""
        return self._file_of[name]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, backed by the file until it is touched."""
        handle = self._handles[self._located(name)]
        tensor: Tensor = handle.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype in safetensors' words ("BF16", "F8_E4M3") without reading it."""
        return str(self._slice(name).get_dtype())

    def _slice(self, name: str) -> Any:
        return self._handles[self._located(name)].get_slice(name)

    def _located(self, name: str) -> str:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self._file_of[name]


class ShardWriter:
    """Write tensors one by one into as few shards as the size limit allows.

    Tensors gather in memory until they fill a shard, or until `flush` brings them to the disk as a
    piece. `finish` makes shards of the pieces by copying bytes, gives the files their final names
    and, when there is more than one, writes the index; until then the folder has no file a loader
    would open. The same tensors in the same order give the same bytes, however often they were
    flushed.

    Pieces lie in `work` (default: the folder itself). A process that is killed at any time leaves
    there what it takes to go on: a writer with the `num_pieces` that `flush` told last, given the
    same tensors from there on, ends with the same folder. Another `work` is left for the caller to
    remove; its shards become hard links in the folder, or copies where there are none.
    """

    def __init__(
        self,
        folder: Path,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        work: Path | None = None,
        num_pieces: int = 0,
    ) -> None:
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._work = work or folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._num_pieces = num_pieces
        for path in sorted(self._work.glob("piece-*.incomplete")):
            if path.name >= self._piece(num_pieces).name:
                path.unlink()
        if not self._shard(1).exists():  # or pieces may be in shards already
            for path in map(self._piece, range(num_pieces)):
                if not path.exists():
                    raise CheckpointError(
                        f"{path} is missing, so what was finished is lost; start over"
                    )

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, flushing what is in memory first when it would grow beyond a shard."""
        if self._pending and self._pending_bytes + tensor.nbytes > self.max_shard_bytes:
            self.flush()
        # A copy: the caller may change or free its tensor.
        self._pending[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes

    def flush(self) -> int:
        """Bring what is in memory to the disk; return how many pieces have been written in all."""
        if self._pending:
            write_tensors(self._piece(self._num_pieces), self._pending)
            self._pending, self._pending_bytes = {}, 0
            self._num_pieces += 1
        return self._num_pieces

    def finish(self) -> int:
        """Make the shards, name them, write the index; return the bytes of all tensors."""
        self.flush()
        shards = self._merge()
        weight_map: dict[str, str] = {}
        for number, entries in enumerate(shards, start=1):
            one = len(shards) == 1
            file = SINGLE_NAME if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._place(self._shard(number), self.folder / file)
            weight_map.update({entry.name: file for entry in entries})
        total = sum(entry.nbytes for entries in shards for entry in entries)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_json(self.folder / INDEX_NAME, index)
        return total

    def _merge(self) -> list[list[TensorEntry]]:
        """Write the shards that are not there yet; a piece goes once shards have all of it."""
        shards: list[list[TensorEntry]] = []
        while self._shard(len(shards) + 1).exists():
            shards.append(read_entries(self._shard(len(shards) + 1)))
        done = {entry.name for entries in shards for entry in entries}
        pieces = {
            path: read_entries(path)
            for path in map(self._piece, range(self._num_pieces))
            if path.exists()
        }
        left = [e for entries in pieces.values() for e in entries if e.name not in done]
        for entries in _split(left, self.max_shard_bytes):
            shard, source = self._shard(len(shards) + 1), entries[0].source
            if isinstance(source, Path) and pieces[source] == entries:
                source.rename(shard)
                del pieces[source]
            else:
                write_entries(shard, entries)
            shards.append(entries)
            done.update(entry.name for entry in entries)
            for path in [p for p, found in pieces.items() if all(e.name in done for e in found)]:
                path.unlink()
                del pieces[path]
        return shards

    def _place(self, shard: Path, path: Path) -> None:
        if self._work == self.folder:
            shard.rename(path)
            return
        try:
            os.link(shard, path)
        except OSError:  # not every file system has links
            shutil.copyfile(shard, path)

    def _piece(self, number: int) -> Path:
        return self._work / f"piece-{number:05d}.incomplete"

    def _shard(self, number: int) -> Path:
        return self._work / f"shard-{number:05d}.incomplete"


def _split(entries: Iterable[TensorEntry], max_bytes: int) -> Iterator[list[TensorEntry]]:
    """Group entries in their order, each group as large as the limit allows; one may exceed it."""
    group: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if group and size + entry.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.nbytes
    if group:
        yield group
