"""A folder that appears complete or not at all.

Everything is written into a hidden folder beside the destination, which is renamed when the work is
done. A failure or Ctrl-C removes it; a killed process leaves a folder that is named `.incomplete`
and is replaced by the next run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType

from quantkit.errors import CheckpointError

MARKER = "quantkit.json"
"""Only a folder with this file is ours to replace."""


class StagedFolder:
    """Context manager: `with StagedFolder(out) as stage: ... write to stage.path; stage.commit()`.

    Raises CheckpointError before any work when the destination is not ours to replace or its
    parent cannot be written.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination.absolute()
        self.path = self.destination.with_name(f".{self.destination.name}.incomplete")
        check_destination(self.destination)

    def __enter__(self) -> StagedFolder:
        try:
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"cannot create {self.path}: {error.strerror}; choose another output folder"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"cannot write {error.filename or self.path}: {error.strerror}; "
                f"{self.destination} is as it was"
            ) from error

    def commit(self) -> Path:
        """Move the finished folder to its destination, replacing an earlier one of ours."""
        previous = self.destination.with_name(f".{self.destination.name}.previous")
        if self.destination.exists():
            shutil.rmtree(previous, ignore_errors=True)
            self.destination.rename(previous)
        try:
            self.path.rename(self.destination)
        except OSError:
            if previous.exists():
                previous.rename(self.destination)
            raise
        shutil.rmtree(previous, ignore_errors=True)
        return self.destination


def check_destination(destination: Path) -> None:
    """Raise CheckpointError unless `destination` is new, empty, or an earlier result of ours."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise CheckpointError(f"{destination} exists and is not a folder; choose another output")
    foreign = destination.is_dir() and any(destination.iterdir())
    if foreign and not (destination / MARKER).is_file():
        raise CheckpointError(
            f"{destination} is not empty and has no {MARKER}, so it is not a quantkit "
            "checkpoint; choose another output folder"
        )
    parent = next(p for p in (destination, *destination.parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{parent} is not a writable folder; choose another output folder")


def check_free_space(destination: Path, needed_bytes: int) -> None:
    """Raise CheckpointError when the disk of `destination` has less than `needed_bytes` free."""
    parent = next(p for p in destination.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{destination} needs {needed_bytes:,} bytes and the disk has {free:,} free; "
            "free space or choose another output folder"
        )
