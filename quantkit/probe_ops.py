"""The op that measures how fast memory can be read: it reads, and does next to nothing else.

Schema, fake kernel and a reference kernel in torch; the C++ kernel reads with all threads, several
requests ahead. What the figure is compared with is in `quantkit.bench`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import quantkit.extension  # noqa: F401 - adds the C++ kernels


def read_memory(x: Tensor) -> Tensor:
    """Read all of `x` once and return the sum of its elements, modulo 2^64.

    Shapes: x int64, contiguous -> int64 [1].
    """
    out: Tensor = torch.ops.quantkit.read_memory(x)
    return out


torch.library.define("quantkit::read_memory", "(Tensor x) -> Tensor")


@torch.library.impl("quantkit::read_memory", "default")
def _read_memory_reference(x: Tensor) -> Tensor:
    return x.sum().reshape(1)


def _read_memory_fake(x: Tensor) -> Tensor:
    return x.new_empty(1)


torch.library.register_fake("quantkit::read_memory", _read_memory_fake)
