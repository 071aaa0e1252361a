"""What a rule looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.lint.engines import CHECKED_METHODS, ENGINES, KNOWN_BY
from quantkit.lint.folder import Folder, open_folder
from quantkit.lint.linears import Linears
from quantkit.lint.quantization import Quantization, read_quantization


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint, read; and the number of GPUs that are to share it."""

    folder: Folder
    quantization: Quantization
    linears: Linears
    tensor_parallel: int = 1

    @property
    def is_checked(self) -> bool:
        """Whether there are rules for how it is quantized."""
        return self.quantization.method in CHECKED_METHODS

    def loaders(self, *among: str) -> tuple[str, ...]:
        """Return the engines (of `among`, default all) that know the quantization method."""
        known = KNOWN_BY.get(self.quantization.method, ())
        return tuple(engine for engine in among or ENGINES if engine in known)

    def key(self, *path: str) -> str:
        """Return the place of a key of the quantization's configuration."""
        return ".".join((self.quantization.place, *path))


def open_subject(path: Path, tensor_parallel: int = 1) -> Subject:
    """Read a checkpoint; raises CheckpointError where the folder is none."""
    folder = open_folder(path)
    quantization = read_quantization(folder)
    return Subject(folder, quantization, Linears(folder, quantization), tensor_parallel)
