"""A folder of safetensors shards: find them, check them, read and write tensors by name.

Knows the Hub's file names and the index, and nothing about what the tensors mean.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
"""The Hub's own limit for comfortable transfers."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError that names the file when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with two-space indent and a final newline; the order of keys is kept."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path} has no weight_map; download the index again")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{path} maps tensor {name} to {file!r}, outside the folder")
        return weight_map

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

    Holds at most one shard in memory. `finish` gives the files their final names and, when there
    is more than one, writes the index; until then the folder has no file a loader would open.
    The same tensors in the same order give the same bytes.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, flushing the current shard first when it would grow too large."""
        if self._pending and self._pending_bytes + tensor.nbytes > self.max_shard_bytes:
            self._flush()
        # Contiguous, and a storage of its own: safetensors refuses tensors that share memory.
        self._pending[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes

    def finish(self) -> int:
        """Write what is pending, name the shards, write the index; return the bytes of tensors."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            file = SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._temporary(number).rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_json(self.folder / INDEX_NAME, index)
        return self._total_bytes

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self._temporary(len(self._shards) + 1)
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write {path} ({self._pending_bytes} bytes): {error}; free space or choose "
                "another output folder, then run again"
            ) from None
        os.chmod(path, 0o666 & ~current_umask())  # safetensors creates files as 0600
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.incomplete"


def current_umask() -> int:
    """Return the process's umask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
