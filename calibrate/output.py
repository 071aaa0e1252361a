"""The tensors of the new checkpoint: some as calibrated, all others as the source has them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from quantkit.calibrate.plan import Plan, redundant_head
from quantkit.calibrate.skeleton import Skeleton
from quantkit.checkpoint import check_scale
from quantkit.errors import SourceError
from quantkit.shards import ShardWriter


class CheckpointOutput:
    """Writes every tensor exactly once, in a fixed order, as soon as it is known.

    `dtype` is for tensors that are not quantized; None keeps the source's, bit for bit.
    """

    def __init__(self, skeleton: Skeleton, writer: ShardWriter, dtype: torch.dtype | None) -> None:
        self._source = skeleton.source
        self._writer = writer
        self._dtype = dtype
        copy = redundant_head(skeleton)
        self._left = [name for name in self._source.names if not copy or name != copy[0]]

    def write(self, prefix: str, calibrated: Mapping[str, Tensor]) -> None:
        """Write all tensors of the source below `prefix`, with the calibrated ones in place.

        `calibrated` also holds scales, which the source lacks; each is checked first. Raises
        CheckpointError for a scale that is not finite and positive.
        """
        for name, tensor in calibrated.items():
            if name.endswith("_scale"):
                check_scale(name, tensor)
        taken = {name for name in self._left if name.startswith(prefix) or name in calibrated}
        self._left = [name for name in self._left if name not in taken]
        for name in sorted(taken | set(calibrated)):
            found = calibrated.get(name)
            if found is None:
                found = self._cast(name, self._source.tensor(name), self._dtype)
            elif name in taken and found.dtype.itemsize > 1:  # smoothed, not quantized
                found = self._cast(name, found, self._dtype or self._source.dtype(name))
            self._writer.add(name, found)

    def skip(self, prefix: str) -> None:
        """Pass over the tensors below `prefix`: an earlier process has written them."""
        self._left = [name for name in self._left if not name.startswith(prefix)]

    def flush(self) -> int:
        """Bring all that was written to the disk; return how many pieces the writer has made."""
        return self._writer.flush()

    def finish(self) -> int:
        """Complete the shards and write the index; return the bytes of all tensors."""
        return self._writer.finish()

    def _cast(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if dtype is None or not tensor.is_floating_point():
            return tensor
        cast = tensor.to(dtype)
        if not bool(cast.isfinite().all()):
            raise SourceError(
                f"tensor {name} reaches {tensor.abs().max().item():g}, which {dtype} cannot "
                "hold; choose --dtype bfloat16 or auto"
            )
        return cast


def bytes_of_dtype(skeleton: Skeleton, plan: Plan, dtype: torch.dtype | None) -> int:
    """Return how many bytes `dtype` adds to (or takes from) a plan, which keeps the source's."""
    if dtype is None:
        return 0
    source, copy = skeleton.source, redundant_head(skeleton)
    replaced = {f"{module.name}.weight" for module in plan.quantized} | {copy[0] if copy else ""}
    kept = [name for name in source.names if name not in replaced]
    return sum(
        prod(source.shape(name)) * (dtype.itemsize - source.dtype(name).itemsize)
        for name in kept
        if source.dtype(name).is_floating_point
    )


def peak_bytes(target_bytes: int, hidden_bytes: int, max_shard_bytes: int) -> int:
    """Return what a run needs on the disk at its fullest.

    While layers are calibrated that is their tensors and two sets of hidden states, of which one
    replaces the other; at the end, the result and one more shard, which is made of layers.
    """
    return target_bytes + max(2 * hidden_bytes, min(target_bytes, max_shard_bytes))
