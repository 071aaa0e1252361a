"""Reading a GGUF file: its metadata, and its tensors one by one, dequantized.

The header is parsed here because the reference reader spends seconds on the vocabulary of a small
model; block formats are left to the `gguf` package. Layout: the GGUF specification, version 3
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import SourceError, first_line

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
MAX_DIMS = 4
"""As in ggml."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: shape in torch's order, ggml type, byte offset and size."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


class GgufFile:
    """A memory-mapped GGUF file. Raises SourceError when it is not one, or ends too early."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise SourceError(f"{path} is empty; download it again") from None
        self._position = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, RecursionError) as error:
            raise SourceError(f"{path} is not a readable GGUF file: {first_line(error)}") from None
        if not isinstance(self.metadata.get("general.architecture"), str):
            raise SourceError(f"{path} does not name its architecture; download it again")
        size = len(self._bytes)
        for name, tensor in self.tensors.items():
            if tensor.offset + tensor.nbytes > size:
                raise SourceError(
                    f"{path} is truncated: tensor {name} ends at byte "
                    f"{tensor.offset + tensor.nbytes}, the file at {size}; download it again"
                )

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`, "llama" for instance."""
        return str(self.metadata["general.architecture"])

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return one tensor, dequantized to float32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        info = self.tensors[name]
        kind = GGMLQuantizationType(info.ggml_type)
        raw = np.frombuffer(self._bytes, np.uint8, count=info.nbytes, offset=info.offset)
        if kind is GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(info.shape)
        if kind is GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(info.shape).astype(np.float32)
        blocks = raw.reshape(quant_shape_to_byte_shape(info.shape, kind))
        values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(blocks, kind)
        return values.reshape(info.shape)

    def head(self, name: str, limit: int) -> bytes:
        """Return the first bytes of one tensor as stored."""
        info = self.tensors[name]
        return self._bytes[info.offset : info.offset + min(info.nbytes, limit)]

    def _parse(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise SourceError(f"{self.path} is not a GGUF file: it does not start with 'GGUF'")
        self._position = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise SourceError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self.tensors = self._tensor_table(num_tensors)

    def _tensor_table(self, num_tensors: int) -> dict[str, GgufTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        entries = []
        for _ in range(num_tensors):
            name, num_dims = self._string(), self._scalar("I")
            if num_dims > MAX_DIMS:
                raise SourceError(f"{self.path}: tensor {name} has {num_dims} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]  # fastest first on disk
            entries.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise SourceError(f"{self.path} has general.alignment {str(alignment)[:80]}")
        start = -(-self._position // alignment) * alignment
        table = {}
        for name, shape, kind, offset in entries:
            try:
                elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise SourceError(f"{self.path}: tensor {name} has unknown type {kind}") from None
            if shape[-1:] and shape[-1] % elements:
                raise SourceError(
                    f"{self.path}: tensor {name} has rows of {shape[-1]}, which are no whole "
                    f"blocks of {elements}"
                )
            table[name] = GgufTensor(shape, kind, start + offset, prod(shape) // elements * size)
        return table

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self._position)
        self._position += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._bytes[self._position : self._position + length]
        if len(raw) != length:
            raise SourceError(f"{self.path} is truncated inside its header; download it again")
        self._position += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        element, count = self._scalar("I"), self._scalar("Q")
        if element in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[element]}", self._bytes, self._position)
            self._position += struct.calcsize(f"<{count}{_SCALARS[element]}")
            return list(values)
        return [self._value(element) for _ in range(count)]
