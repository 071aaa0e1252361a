"""What is in a checkpoint's folder: documents, index, shards, tensors. Read, not judged.

Only a folder without a config.json raises; every other fault is kept for the rules to find.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.lint.documents import mapping, read_document
from quantkit.lint.headers import Header, read_header
from quantkit.lint.numbers import NumberReader, Numbers
from quantkit.shards import INDEX_NAME, SINGLE_NAME
from quantkit.tensor_file import TensorEntry

CONFIG_NAME = "config.json"
QUANT_CONFIG_NAME = "hf_quant_config.json"
GENERATION_NAME = "generation_config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
DOCUMENTS = (QUANT_CONFIG_NAME, GENERATION_NAME, TOKENIZER_CONFIG_NAME, INDEX_NAME)


@dataclass(slots=True)
class Folder:
    """A checkpoint's files.

    `config` is config.json; `documents` the other JSON files that could be read, `unreadable` what
    is wrong with the others. `weight_map` is the index, as far as it names files of the folder;
    `outside` holds its other entries. `shards` are the headers of the files that loaders open, by
    name; `tensors` all that these hold, a tensor of two files as the first has it (`twice`: name
    and both files).
    """

    path: Path
    files: frozenset[str]
    config: dict[str, Any]
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    outside: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, Header] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)
    twice: list[tuple[str, str, str]] = field(default_factory=list)
    reader: NumberReader = field(default_factory=NumberReader)

    @property
    def has_index(self) -> bool:
        """Whether there is an index that can be read."""
        return INDEX_NAME in self.documents

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the configuration that describes the language model."""
        return mapping(self.config.get("text_config")) or self.config

    def numbers(self, name: str) -> Numbers | None:
        """Return the values of a tensor, flat, or None where they cannot be read."""
        return self.reader.read(self.tensors[name]) if name in self.tensors else None


def open_folder(path: Path) -> Folder:
    """Read a checkpoint's folder; raises CheckpointError where it has no readable config.json."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the folder of a checkpoint")
    try:
        files = frozenset(os.listdir(path))
    except OSError as fault:
        raise CheckpointError(f"{path} cannot be read: {fault.strerror or fault}") from None
    if CONFIG_NAME not in files:
        raise CheckpointError(
            f"{path} has no {CONFIG_NAME}; give the folder of a checkpoint in the Hub's format"
        )
    folder = Folder(path, files, read_document(path / CONFIG_NAME))
    for name in DOCUMENTS:
        if name in files:
            _read(folder, name)
    _take_index(folder)
    _take_shards(folder)
    return folder


def _read(folder: Folder, name: str) -> None:
    try:
        folder.documents[name] = read_document(folder.path / name)
    except CheckpointError as fault:
        folder.unreadable[name] = str(fault).removeprefix(f"{folder.path / name} ")


def _take_index(folder: Folder) -> None:
    entries = mapping(folder.documents.get(INDEX_NAME, {}).get("weight_map"))
    for name, file in entries.items():
        if isinstance(file, str) and file and os.path.basename(file) == file != "..":
            folder.weight_map[name] = file
        else:
            folder.outside[name] = file


def _take_shards(folder: Folder) -> None:
    for file in _shard_names(folder):
        header = folder.shards[file] = read_header(folder.path / file)
        for entry in header.entries:
            if entry.name in folder.tensors:
                folder.twice.append((entry.name, folder.file_of[entry.name], file))
                continue
            folder.tensors[entry.name] = entry
            folder.file_of[entry.name] = file


def _shard_names(folder: Folder) -> Iterable[str]:
    """Return the files that loaders open: those of the index, else model.safetensors, else all."""
    if folder.weight_map:
        names = set(folder.weight_map.values())
    elif SINGLE_NAME in folder.files:
        names = {SINGLE_NAME}
    else:
        names = {file for file in folder.files if file.endswith(".safetensors")}
    return sorted(name for name in names & folder.files if (folder.path / name).is_file())
