"""The tensors of the new checkpoint: some as calibrated, all others as the source has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.calibrate.plan import redundant_head
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
        names = [name for name in self._left if name.startswith(prefix)]
        taken = set(names)
        self._left = [name for name in self._left if name not in taken]
        for name in sorted(taken | set(calibrated)):
            found = calibrated.get(name)
            self._writer.add(name, self._copy(name) if found is None else found)

    def finish(self) -> int:
        """Complete the shards and write the index; return the bytes of all tensors."""
        return self._writer.finish()

    def _copy(self, name: str) -> Tensor:
        tensor = self._source.tensor(name)
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        cast = tensor.to(self._dtype)
        if not bool(cast.isfinite().all()):
            raise SourceError(
                f"tensor {name} reaches {tensor.abs().max().item():g}, which {self._dtype} cannot "
                "hold; choose --dtype bfloat16 or auto"
            )
        return cast
