"""The model to be quantized: its config, tokenizer and tensors, wherever they come from.

A source hands out tensors by their checkpoint names, one at a time and memory-mapped, so a model
larger than memory can be read. What cannot be quantized is refused here, before any work starts.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.errors import SourceError

logger = logging.getLogger("quantkit")

HEAD_BYTES = 4096
"""How much of each tensor identifies a model."""


class ModelSource(Protocol):
    """What calibration needs of a model on disk."""

    name: str  # for messages and reports; never a full path
    config_dict: dict[str, Any]  # config.json as the source has it

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in the dtype that it is stored in; finite, or SourceError."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored dtype without reading it."""
        ...

    def head(self, name: str) -> bytes:
        """Return the first bytes of a tensor as stored, at most HEAD_BYTES."""
        ...

    def config(self) -> Any:
        """Return the transformers config."""
        ...

    def tokenizer(self) -> Any:
        """Return the transformers tokenizer; raises SourceError when the source has none."""
        ...

    def write_side_files(self, folder: Path) -> None:
        """Write everything but config.json and the weights into `folder`."""
        ...

    def load_model(self, dtype: torch.dtype) -> Any:
        """Load the whole model through transformers, for names that it converts on the way."""
        ...

    def scan(self, advance: Callable[[], None]) -> None:
        """Raise SourceError if a tensor is not finite, where that can be told ahead of time."""
        ...


def open_source(model: str | Path, trust_remote_code: bool = False) -> ModelSource:
    """Open a local Hugging Face folder, a `.gguf` file, or a Hub id (a folder of that name wins).

    Raises SourceError naming what is missing, truncated or already quantized.
    """
    from quantkit.calibrate.folder_source import FolderSource
    from quantkit.calibrate.gguf_source import GgufSource
    from quantkit.calibrate.hub import download

    path, name = Path(model), str(model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise SourceError(f"{path} is a file; expected a model folder or a .gguf file")
        return GgufSource(path)
    if path.is_dir():
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
            logger.info("%s is a local folder; a Hub model of that name is not looked for", name)
        return FolderSource(path, path.resolve().name, trust_remote_code)
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and not name.endswith(".gguf"):
        return FolderSource(download(name), name, trust_remote_code)
    raise SourceError(
        f"{name} does not exist; expected a local folder, a .gguf file or a Hub id like org/model"
    )


def refuse_quantized(where: Path, config: Mapping[str, Any]) -> None:
    """Raise SourceError if a config says that the weights are quantized already."""
    for block in (config, config.get("text_config") or {}):
        found = block.get("quantization_config") or block.get("compression_config")
        if found:
            named = isinstance(found, Mapping) and found.get("quant_method")
            method = named or "an unnamed method"
            raise SourceError(
                f"{where} declares quantization_config with quant_method {method!r}: the model is "
                "already quantized; use the original, or remove the block if the weights are not"
            )


def refuse_quantized_tensors(where: Path, dtypes: Iterable[tuple[str, torch.dtype]]) -> None:
    """Raise SourceError naming the first tensor that is stored in a quantized form."""
    for name, dtype in dtypes:
        scaled = name.endswith((".weight_scale", ".weight_scale_inv", ".qweight", ".weight_packed"))
        if scaled or (dtype.is_floating_point and dtype.itemsize == 1):
            kind = str(dtype).removeprefix("torch.")
            raise SourceError(
                f"{where} has tensor {name} ({kind}): the model is already quantized; use the "
                "original or dequantize it first"
            )


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise SourceError with count and first index if a float tensor holds NaN or infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)  # NaN and infinity both reach one of the two
    if bool(low.isfinite()) and bool(high.isfinite()):
        return
    bad = ~tensor.isfinite()
    index = [int(i) for i in bad.nonzero()[0]]
    nans = int(tensor.isnan().sum())
    raise SourceError(
        f"tensor {name} has {nans} NaN and {int(bad.sum()) - nans} Inf of {tensor.numel()} values, "
        f"the first at {index}; repair the model, or use another copy"
    )


def fingerprint(source: ModelSource) -> str:
    """Return a hash that changes with the names, shapes, types or (sampled) bytes of a model.

    Reads the head of every tensor only, so it stays fast for models of any size.
    """
    digest = hashlib.sha256()
    for name in source.names:
        digest.update(f"{name}{source.shape(name)}{source.dtype(name)}".encode())
        digest.update(source.head(name))
    return digest.hexdigest()
