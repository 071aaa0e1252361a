"""Files and folders that appear complete or not at all.

A folder is written beside its destination under a hidden name and renamed when the work is done; a
lock keeps a second process from writing the same destination. A failure or Ctrl-C removes the
hidden folder; what a killed process left is replaced, or put back in place, by the next run.

Beside a destination NAME there may be: `.NAME.lock` (some process writes NAME), `.NAME.incomplete`
(what it has written), `.NAME.previous` (the earlier result, between the two renames of a commit).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from quantkit.errors import CheckpointError

logger = logging.getLogger("quantkit")

MARKER = "quantkit.json"
"""Only a folder with this file is ours to replace."""
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of a disk, whatever was being done."""


@contextmanager
def staged_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the name `path` when the block ends, its bytes being on the disk.

    Until then, and if the block raises, `path` is as it was. The new name itself outlasts a power
    failure only after `sync_folder`.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlast a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StagedFolder:
    """Context manager: `with StagedFolder(out) as stage: ... write to stage.path; stage.commit()`.

    Raises CheckpointError before any work when the destination is not ours to replace, its parent
    cannot be written, or another process is writing it. An error of the disk inside the block
    becomes a CheckpointError that names the file.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination.absolute()
        self.path = beside(self.destination, "incomplete")
        self._lock = _Lock(self.destination)
        self._new_parents: list[Path] = []
        check_destination(self.destination)

    def __enter__(self) -> StagedFolder:
        parent = self.destination.parent
        self._new_parents = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._recover()
            self.path.mkdir()
        except OSError as error:
            self._leave()
            raise CheckpointError(
                f"cannot create {error.filename or self.path}: {error.strerror}; choose another "
                "output folder"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._leave()
        if isinstance(error, OSError) and self._is_of_disk(error):
            raise CheckpointError(
                f"cannot write {error.filename or self.path}: {error.strerror}; "
                f"{self.destination} is as it was"
            ) from error

    def commit(self) -> Path:
        """Move the finished folder to its destination, replacing an earlier one of ours."""
        _sync_tree(self.path)
        previous = beside(self.destination, "previous")
        if self.destination.exists():
            self.destination.rename(previous)
        try:
            self.path.rename(self.destination)
        except BaseException:  # Ctrl-C too
            if previous.exists() and not self.destination.exists():
                previous.rename(self.destination)
            raise
        sync_folder(self.destination.parent)
        shutil.rmtree(previous, ignore_errors=True)
        return self.destination

    def _recover(self) -> None:
        """Clear up after a process that was killed, wherever that was."""
        previous = beside(self.destination, "previous")
        if previous.exists():
            if self.destination.exists() and any(self.destination.iterdir()):
                shutil.rmtree(previous)
            else:
                previous.replace(self.destination)
                logger.warning(
                    "%s is the earlier result again: a run was killed while replacing it",
                    self.destination,
                )
        if self.path.exists():
            shutil.rmtree(self.path)

    def _leave(self) -> None:
        """Release the lock, and remove the parents that were made for nothing."""
        self._lock.release()
        for folder in self._new_parents:
            with suppress(OSError):  # not empty, as a rule
                folder.rmdir()

    def _is_of_disk(self, error: OSError) -> bool:
        ours = isinstance(error.filename, str | Path) and self.path in Path(error.filename).parents
        return ours or error.errno in DISK_ERRORS


class _Lock:
    """Says that this process writes a destination, until `release` or the end of the process.

    The operating system drops the lock of a killed process; the file it leaves means nothing.
    """

    def __init__(self, destination: Path) -> None:
        self._destination = destination
        self._path = beside(destination, "lock")
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raise CheckpointError if another process has the lock."""
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._descriptor = self._try(descriptor)
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def _try(self, descriptor: int) -> int | None:
        """Lock an open file; None if its last owner has just removed it."""
        import fcntl  # here, so that files can be read where it does not exist

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode(errors="replace").strip()
            raise CheckpointError(
                f"another process ({owner or 'just started'}) is writing {self._destination}; "
                "wait until it ends, or choose another output folder"
            ) from None
        try:
            current = os.stat(self._path).st_ino
        except FileNotFoundError:
            return None
        if current != os.fstat(descriptor).st_ino:
            return None
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor

    def release(self) -> None:
        """Give the lock back; without one this does nothing."""
        if self._descriptor is None:
            return
        with suppress(OSError):
            self._path.unlink()  # while it is still ours
        os.close(self._descriptor)
        self._descriptor = None


def beside(destination: Path, role: str) -> Path:
    """Return the hidden path beside a destination that has a role in writing it."""
    return destination.with_name(f".{destination.name}.{role}")


def where_it_was_set_aside(folder: Path) -> str:
    """Say where a folder's contents are if a run was killed while replacing it, else nothing."""
    if not folder.exists() and beside(folder.absolute(), "previous").exists():
        previous = beside(folder.absolute(), "previous")
        return f"; a run was killed while replacing it: rename {previous} to have it back"
    return ""


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


def _sync_tree(folder: Path) -> None:
    """Bring every file of a folder, and their names, to the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
