"""A Hugging Face folder as a model source: safetensors, or pickles read as weights only."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.calibrate.source import (
    HEAD_BYTES,
    check_finite,
    refuse_quantized,
    refuse_quantized_tensors,
)
from quantkit.config_sizes import check_sizes
from quantkit.errors import SourceError, first_line
from quantkit.shards import INDEX_NAME, SINGLE_NAME, ShardReader, read_json, read_weight_map
from quantkit.side_files import copy_side_files
from quantkit.tokenizer_check import usable

logger = logging.getLogger("quantkit")

BIN_NAME = "pytorch_model.bin"


class _Tensors(Protocol):
    @property
    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> Tensor: ...


class BinReader:
    """Tensors of `pytorch_model*.bin` files, memory-mapped. Never runs code from the pickle."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{BIN_NAME}.index.json"
        index = read_weight_map(path) if path.is_file() else {}
        self._tensors: dict[str, Tensor] = {}
        for file in sorted(set(index.values())) or [BIN_NAME]:
            self._tensors.update(self._load(folder / file))
        for name, file in index.items():
            if name not in self._tensors:
                raise SourceError(
                    f"{path} says that tensor {name} is in {file}, which does not have it; "
                    "download the folder again"
                )

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        return self._tensors[name]

    @staticmethod
    def _load(path: Path) -> dict[str, Tensor]:
        if not path.is_file():
            raise SourceError(f"{path} is missing; download the folder again")
        try:
            # Files from before torch 1.6 are no zip archives, and cannot be mapped.
            mmap = zipfile.is_zipfile(path)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # its interpreter raises of every kind on broken programs
            raise SourceError(
                f"{path} cannot be read as plain weights ({first_line(error)}); nothing in it was "
                "run. Convert it to safetensors with a tool you trust"
            ) from None
        if not isinstance(state, dict):
            raise SourceError(f"{path} holds {type(state).__name__}, expected tensors by name")
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise SourceError(f"{path} names a tensor {name!r}, expected text")
            if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
                raise SourceError(f"{path} has tensor {name} in a form that is no plain array")
            if tensor.nbytes > tensor.untyped_storage().nbytes():
                raise SourceError(
                    f"{path} has tensor {name} of {tensor.nbytes} bytes; it holds less"
                )
        return tensors


class FolderSource:
    """A local folder in Hugging Face layout. Raises SourceError on opening if it is unusable."""

    def __init__(self, path: Path, name: str, trust_remote_code: bool = False) -> None:
        self.path = path
        self.name = name
        self.trust_remote_code = trust_remote_code
        self.config_dict = read_json(path / "config.json")
        check_sizes(self.config_dict, path / "config.json")
        refuse_quantized(path / "config.json", self.config_dict)
        self._tensors = self._open_tensors()
        refuse_quantized_tensors(path, ((name, self.dtype(name)) for name in self.names))

    def _open_tensors(self) -> _Tensors:
        has_bin = any(self.path.glob("pytorch_model*.bin"))
        if (self.path / INDEX_NAME).is_file() or (self.path / SINGLE_NAME).is_file():
            if has_bin:
                logger.info("%s has .safetensors and .bin files; using .safetensors", self.path)
            return ShardReader(self.path)
        if has_bin:
            return BinReader(self.path)
        raise SourceError(
            f"{self.path} has no {SINGLE_NAME}, {INDEX_NAME} or {BIN_NAME}; expected the weights "
            "of a Hugging Face model"
        )

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return self._tensors.names

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as stored."""
        return self._tensors.tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._tensors.tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored dtype."""
        return self._tensors.tensor(name).dtype

    def head(self, name: str) -> bytes:
        """Return the first bytes of a tensor."""
        tensor = self.tensor(name).flatten()
        part = tensor[: HEAD_BYTES // tensor.element_size()].contiguous()
        return part.view(torch.uint8).numpy().tobytes()

    def config(self) -> Any:
        """Return the transformers config."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
        except Exception as error:  # its own checks of a config raise of every kind
            reason = first_line(error)
            raise SourceError(f"{self.path / 'config.json'} cannot be used: {reason}") from error

    def tokenizer(self) -> Any:
        """Return the tokenizer of the folder."""
        from transformers import AutoTokenizer

        try:
            return usable(
                AutoTokenizer.from_pretrained(
                    self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
                )
            )
        except Exception as error:  # the library of tokenizers raises plain ones
            reason = first_line(error)
            raise SourceError(f"{self.path} has no usable tokenizer: {reason}") from error

    def write_side_files(self, folder: Path) -> None:
        """Copy every file that is neither config.json nor weights, byte for byte."""
        copy_side_files(self.path, folder)

    def load_model(self, dtype: torch.dtype) -> Any:
        """Load the whole model through transformers; raises SourceError if a tensor is missing."""
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(
            self.path,
            dtype=dtype,
            trust_remote_code=self.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
        missing = sorted(info["missing_keys"])
        if missing:  # transformers would go on with random values
            raise SourceError(
                f"{self.path} has no tensor {missing[0]} ({len(missing)} missing in all); download "
                "the folder again"
            )
        return model

    def scan(self, advance: Callable[[], None]) -> None:
        """Raise SourceError if any tensor is not finite."""
        for name in self.names:
            check_finite(name, self.tensor(name))
            advance()
