"""Containers: one file for each format of quantized checkpoints that quantkit writes or reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.containers.compressed_tensors import CompressedTensors
from quantkit.containers.container import Container, Names, Shape
from quantkit.containers.fp8 import Fp8
from quantkit.containers.ignored import IgnoreList
from quantkit.containers.modelopt import SIDE_FILE, ModelOpt
from quantkit.containers.native import Native
from quantkit.errors import CheckpointError
from quantkit.scheme import Scheme
from quantkit.shards import read_json

CONTAINERS: dict[str, Container] = {
    container.name: container for container in (CompressedTensors(), Fp8(), ModelOpt(), Native())
}
"""By what `quantkit export --format` calls them."""

__all__ = [
    "CONTAINERS",
    "Container",
    "IgnoreList",
    "Names",
    "Shape",
    "container_of",
    "default_container",
    "is_quantized",
    "read_scheme",
]


def default_container(scheme: Scheme) -> Container:
    """Return the container that `calibrate` writes a scheme in."""
    return CONTAINERS["native" if scheme.native else "compressed-tensors"]


def container_of(config: Mapping[str, Any], folder: Path | None = None) -> Container:
    """Return the container of the checkpoint with this config.json; see `read_scheme`."""
    return _container_of(_block_of(config, folder))


def read_scheme(config: Mapping[str, Any], folder: Path | None = None) -> tuple[Container, Scheme]:
    """Return container and scheme of the checkpoint with this config.json.

    `folder` is where files beside config.json are looked for. Raises CheckpointError if none of
    them says that the checkpoint is quantized, or if it is so in a way that quantkit does not read.
    """
    block = _block_of(config, folder)
    container = _container_of(block)
    return container, container.from_config(block)


def is_quantized(config: Mapping[str, Any], folder: Path | None = None) -> bool:
    """Tell whether the checkpoint with this config.json says that it is quantized, somehow."""
    return _find_block(config, folder) is not None


def _find_block(config: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any] | None:
    """Return `quantization_config`, wherever a tool has put it, if there is one."""
    for level in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            block = level.get(key) if isinstance(level, Mapping) else None
            if isinstance(block, Mapping) and block:
                return block
    if folder is not None and (folder / SIDE_FILE).is_file():
        return {"quant_method": ModelOpt.method, **read_json(folder / SIDE_FILE)}
    return None


def _block_of(config: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    block = _find_block(config, folder)
    if block is not None:
        return block
    where = "config.json" if folder is None else folder / "config.json"
    raise CheckpointError(
        f"{where} has no quantization_config; quantize the model first with 'quantkit calibrate'"
    )


def _container_of(block: Mapping[str, Any]) -> Container:
    method = str(block.get("quant_method"))
    for container in CONTAINERS.values():
        if method == container.method:
            return container
    if method.startswith(ModelOpt.method):  # modelopt_fp4 and others, which it refuses by name
        return CONTAINERS[ModelOpt.name]
    known = ", ".join(repr(container.method) for container in CONTAINERS.values())
    raise CheckpointError(
        f"quantization_config has quant_method={method!r}; quantkit reads {known}"
    )
