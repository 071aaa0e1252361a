"""The batches of this process on their way through the layers: in memory, or in files.

Owns the files `hidden-LAYER-BLOCK.safetensors`, which hold what enters a layer, a block of
sequences each. Batches that do not fit in memory live there, and are read a block at a time
whenever they pass a layer; those that do fit are written too, for a run that is killed. Either way
the layers get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantkit.calibrate.batches import Batch
from quantkit.calibrate.ranks import ALONE, BLOCK_SEQUENCES, Ranks
from quantkit.errors import CheckpointError
from quantkit.tensor_file import write_tensors

Block = list[Batch]


class Moving:
    """Blocks of batches, all at the door of one layer.

    num_rounds: how many blocks a process has at most. num_batches: of all processes. folder: where
    batches live between layers; None keeps them in memory. begins_at: the layer that a resumed run
    goes on with, whose files are there already. holds: whether there is memory for what the batches
    carry inside a layer.
    """

    def __init__(
        self,
        num_rounds: int,
        num_batches: int,
        ranks: Ranks = ALONE,
        folder: Path | None = None,
        begins_at: int = 0,
        holds: bool = True,
    ) -> None:
        self.holds = holds
        self.num_rounds = num_rounds
        self.num_batches = num_batches
        self._ranks = ranks
        self._folder = folder
        self._layer = begins_at
        self._blocks: list[Block] = []
        self._device = torch.device("cpu")

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Moving:
        """Return batches as one block, in memory."""
        moving = cls(1 if batches else 0, len(batches))
        if batches:
            moving.append(list(batches))
        return moving

    def __bool__(self) -> bool:
        """Whether there is anything on its way, in any process."""
        return self.num_rounds > 0

    def append(self, block: Block) -> None:
        """Add this process's next block, which is at the door of layer 0."""
        self._device = block[0].hidden.device
        for batch in block:
            _make_contiguous(batch)
        self._blocks.append(block)
        if self._folder is not None:
            if self._layer == 0:
                _write(self._path(self._folder, 0, block), block)
            _drop(block)

    def rounds(self, moves: bool = False) -> Iterator[Block]:
        """Yield this process's blocks, and empty ones up to as many as every process has.

        With `moves` the batches' hidden states are exchanged meanwhile for those that enter the
        next layer, which are kept.
        """
        for number in range(self.num_rounds):
            block = self._blocks[number] if number < len(self._blocks) else []
            if self._folder is None or not block:
                yield block
                continue
            self._read(self._folder, block)
            yield block
            if moves:
                _write(self._path(self._folder, self._layer + 1, block), block)
            _drop(block)
        self._layer += moves

    @contextmanager
    def first_batch(self) -> Iterator[Batch]:
        """Give the first batch of all for a while; the first process has it."""
        block = self._blocks[0]
        if self._folder is not None:
            self._read(self._folder, block)
        yield block[0]
        if self._folder is not None:
            _drop(block)

    def save(self, folder: Path, layer: int) -> None:
        """Have a file of everything that enters `layer`, from every process.

        Makes what is in memory contiguous, as it will be when read back: kernels may sum in another
        order where strides differ.
        """
        for block in self._blocks if self._folder is None else ():
            for batch in block:
                _make_contiguous(batch)
            _write(self._path(folder, layer, block), block)
        self._ranks.wait()

    def restore(self, folder: Path, layer: int) -> None:
        """Put in place what enters `layer`, as an unfinished run has left it.

        Raises CheckpointError for a file that is damaged.
        """
        self._layer = layer
        for block in self._blocks if self._folder is None else ():
            self._read(folder, block)

    @staticmethod
    def forget(folder: Path, layer: int) -> None:
        """Remove all files, of all processes, but those of what enters `layer`."""
        for path in sorted(folder.glob("hidden-*")):
            if not path.name.startswith(_prefix(layer)):
                path.unlink(missing_ok=True)

    @staticmethod
    def _path(folder: Path, layer: int, block: Block) -> Path:
        return folder / f"{_prefix(layer)}{block[0].first // BLOCK_SEQUENCES:05d}.safetensors"

    def _read(self, folder: Path, block: Block) -> None:
        path = self._path(folder, self._layer, block)
        try:
            with safe_open(path, framework="pt") as file:
                for number, batch in enumerate(block):
                    _restore(batch, file, f"{number}.", self._device)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}), so the unfinished run is lost; start over"
            ) from None


def _prefix(layer: int) -> str:
    return f"hidden-{layer:05d}-"


def _write(path: Path, block: Block) -> None:
    for batch in block:
        _make_contiguous(batch)
    states = {
        f"{place}.{name}": tensor
        for place, batch in enumerate(block)
        for name, tensor in _states(batch)
    }
    write_tensors(path, states)


def _drop(block: Block) -> None:
    """Free what a file holds; the shape stays."""
    for batch in block:
        batch.hidden = batch.hidden.to("meta")
        for shared in batch.shared_states():
            shared.clear()


def _make_contiguous(batch: Batch) -> None:
    batch.hidden = batch.hidden.contiguous()
    for shared in batch.shared_states():
        for key, tensors in shared.items():
            shared[key] = tuple(tensor.contiguous() for tensor in tensors)


def _states(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors that the next layers need, by the names that `_restore` looks for."""
    yield "hidden", batch.hidden
    for place, shared in enumerate(batch.shared_states()):
        for key, tensors in shared.items():
            for part, tensor in enumerate(tensors):
                yield f"shared.{place}.{part}.{key}", tensor


def _restore(batch: Batch, file: Any, prefix: str, device: torch.device) -> None:
    """Read back what `_states` yielded."""
    # Copies: the file goes, and its pages are not aligned as kernels like them.
    batch.hidden = file.get_tensor(f"{prefix}hidden").to(device, copy=True)
    names = set(file.keys())
    for place, shared in enumerate(batch.shared_states()):
        first = f"{prefix}shared.{place}.0."
        for key in sorted(n.removeprefix(first) for n in names if n.startswith(first)):
            parts: list[Tensor] = []
            while (name := f"{prefix}shared.{place}.{len(parts)}.{key}") in names:
                parts.append(file.get_tensor(name).to(device, copy=True))
            shared[key] = tuple(parts)
