"""The files beside the weights of a model: tokenizer, templates, licence, code, and the rest.

They go with a model wherever it goes, byte for byte; weights and what describes them do not.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from quantkit.staging import MARKER

WEIGHT_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "consolidated*.pth",
    "*.gguf",
    "*.onnx*",
    "tf_model*.h5*",
    "flax_model*.msgpack*",
)
"""Weights in any form; every other file is carried over."""


def copy_side_files(
    source: Path, destination: Path, without: Collection[str] = ("config.json",)
) -> None:
    """Copy every file below `source` but weights, hidden files and those named in `without`.

    Names in `without` are relative to `source`. What quantkit wrote into a folder below, an earlier
    result, is left alone.
    """
    for file in _side_files(source):
        relative = file.relative_to(source)
        if relative.as_posix() in without:
            continue
        target = destination / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _side_files(source: Path) -> Iterator[Path]:
    results = {marker.parent for marker in source.rglob(MARKER)} - {source}
    for file in sorted(source.rglob("*")):
        relative = file.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or not file.is_file() or results.intersection(file.parents):
            continue
        if not any(file.match(pattern) for pattern in WEIGHT_PATTERNS):
            yield file
