"""The processes that share one run, under torchrun; without it, this one alone.

Owns who has which block of sequences, and how values get from one process to another. Knows nothing
of models. Blocks go around: process r of N has the blocks r, r + N, and so on, and a *round* is one
block for each. Whatever is summed over sequences is summed within a block first, and then over
blocks in their order, so that the sums do not depend on how many processes there are.

Tensors travel as bytes, on their own device: over gloo from a CPU, over NCCL from a GPU. Everything
else is pickled. The first process alone writes and prints.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from quantkit.errors import CalibrationError, QuantKitError, first_line

BLOCK_SEQUENCES = 8
"""Sequences that are summed up, stored and handed to a process together."""
TIMEOUT = timedelta(hours=2)
"""How long to wait for a process that neither answers nor ends: some wait while one reads data."""
LINGER_SECONDS = 1.0
"""How long those stay that have nothing to say: when one ends, torchrun ends them all."""
_PIECE_BYTES = 1 << 30
_JOINED, _FAILED = "quantkit/joined", "quantkit/failed"

Value = TypeVar("Value")


class LostProcessError(CalibrationError):
    """Another process of the run has ended, or does not answer."""


class Ranks:
    """This process among those of the run: number `rank` of `size`, from 0.

    Use as a context manager. `Ranks()` is a process by itself, for which every method is trivial.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._store = store

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes, decides and prints."""
        return self.rank == 0

    def has_block(self, number: int) -> bool:
        """Whether a block of sequences is this process's."""
        return number % self.size == self.rank

    def num_rounds(self, num_blocks: int) -> int:
        """Return how many rounds it takes until every block has had its turn."""
        return -(-num_blocks // self.size)

    def device(self, asked: torch.device) -> torch.device:
        """Return the device of this process: with several on a machine, a GPU for each."""
        if asked.type != "cuda" or self.size == 1:
            return asked
        number = int(os.environ.get("LOCAL_RANK", "0"))
        if number >= torch.cuda.device_count():
            raise CalibrationError(
                f"process {self.rank + 1} of {self.size} finds no GPU of its own: this machine has "
                f"{torch.cuda.device_count()}; start that many with --nproc-per-node"
            )
        torch.cuda.set_device(number)
        return torch.device("cuda", number)

    @staticmethod
    def num_on_this_machine() -> int:
        """Return how many processes of the run share this machine's memory."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_initialized() else 1

    def send(self, value: Value | None, source: int, target: int) -> Value | None:
        """Hand `value` of process `source` to process `target`, which gets it returned.

        To be called by these two, in the same order among all processes; others get None.
        """
        if source == target:
            return value if self.rank == target else None
        if self.rank == source:
            with self._contact():
                _transmit(value, lambda tensor: dist.send(tensor, target))
        elif self.rank == target:
            with self._contact():
                received: Value = _receive(lambda tensor: dist.recv(tensor, source))
            return received
        return None

    def broadcast(self, value: Value | None, source: int = 0) -> Value:
        """Return the value of process `source` in every process."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        with self._contact():
            if self.rank == source:
                _transmit(value, lambda tensor: dist.broadcast(tensor, source))
                return value  # type: ignore[return-value]
            received: Value = _receive(lambda tensor: dist.broadcast(tensor, source))
            return received

    def share(self, value: Value) -> list[Value]:
        """Return the values of all processes, in their order, in every process."""
        return [self.broadcast(value, source) for source in range(self.size)]

    def gather(self, value: Value | None) -> list[Value]:
        """Return the values of all processes, but None, in order, in the first; elsewhere none."""
        found = [self.send(value, source, 0) for source in range(self.size)]
        return [each for each in found if each is not None] if self.is_first else []

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Do something in every process: a QuantKitError in one ends it in all.

        It is raised where it came first, and in the others a LostProcessError.
        """
        error: QuantKitError | None = None
        try:
            yield
        except QuantKitError as failed:
            error = failed
        messages = self.share(None if error is None else str(error))
        first = next((rank for rank, each in enumerate(messages) if each is not None), None)
        if first == self.rank and error is not None:
            raise error
        if first is not None:
            raise LostProcessError(f"process {first + 1} of {self.size}: {messages[first]}")

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            with self._contact():
                dist.barrier()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.size == 1:
            return
        if isinstance(error, LostProcessError) and not self.is_first:
            time.sleep(LINGER_SECONDS)
        elif error is not None and not isinstance(error, LostProcessError):
            self._leave_word(error)
        dist.destroy_process_group()

    def _leave_word(self, error: BaseException) -> None:
        """Tell the others, who will find this process gone, what ended it."""
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else first_line(error)
        try:
            self._store.set(_FAILED, f"process {self.rank + 1} of {self.size}: {reason}")
        except RuntimeError:
            return  # the launcher is gone as well

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Turn what the libraries make of a lost process into an error that says so."""
        try:
            yield
        except RuntimeError as error:
            raise LostProcessError(self._what_happened(error)) from error

    def _what_happened(self, error: RuntimeError) -> str:
        try:
            if self._store.check([_FAILED]):
                return f"another process failed: {self._store.get(_FAILED).decode()}"
        except RuntimeError:
            pass
        return f"another process of this run has ended or does not answer ({first_line(error)})"


ALONE = Ranks()


def is_launched() -> bool:
    """Whether torchrun has started this process with others."""
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_helper() -> bool:
    """Whether another process of the run writes and prints."""
    return is_launched() and os.environ.get("RANK", "0") != "0"


def join_ranks() -> Ranks:
    """Return this process's place among those that torchrun started; `Ranks()` without it.

    Raises CalibrationError if they cannot be reached.
    """
    if not is_launched():
        return Ranks()
    if dist.is_initialized():
        raise CalibrationError(
            "torch.distributed is in use in this process already; calibrate() sets it up by itself"
        )
    backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    try:
        shared, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        # Runs of these processes follow one another, and the addresses of one must not be taken for
        # those of the next. Nobody joins the next before all have joined this one.
        run = (shared.add(_JOINED, 1) - 1) // size
        store = dist.PrefixStore(f"quantkit/{run}", shared)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise CalibrationError(
            f"the other processes of this run cannot be reached ({first_line(error)})"
        ) from error
    return Ranks(rank, size, store)


class _Packer(pickle.Pickler):
    """Pickles a value, but for its tensors, which it sets aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        """See `pickle.Pickler`."""
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        """See `pickle.Unpickler`."""
        return self._tensors[number]


_Move = Any
"""Sends, or fills, one tensor of bytes."""


def _transmit(value: Any, move: _Move) -> None:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    shapes = [(t.shape, t.dtype, t.device.type) for t in packer.tensors]
    header = pickle.dumps((file.getvalue(), shapes))
    move(torch.tensor([len(header)]))
    move(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    for tensor in packer.tensors:
        for piece in _pieces(tensor.contiguous()):
            move(piece)


def _receive(move: _Move) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    move(size)
    header = torch.empty(int(size.item()), dtype=torch.uint8)
    move(header)
    packed, shapes = pickle.loads(header.numpy().tobytes())  # of our own processes
    tensors = []
    for shape, dtype, kind in shapes:
        tensor = torch.empty(shape, dtype=dtype, device=_here(kind))
        for piece in _pieces(tensor):
            move(piece)
        tensors.append(tensor)
    return _Unpacker(io.BytesIO(packed), tensors).load()


def _here(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return the bytes of a contiguous tensor, a view, in pieces that any library takes."""
    if not tensor.numel():
        return ()
    return torch.split(tensor.reshape(-1).view(torch.uint8), _PIECE_BYTES)
