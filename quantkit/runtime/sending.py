"""From the host to a device without waiting for what runs there.

A copy from ordinary memory waits until the GPU has done all that was asked of it before, because
the memory might change; from pinned memory it is one more thing asked.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on `device`; it must not be written to afterwards."""
    if device.type != "cuda" or tensor.is_cuda or not torch.cuda.is_available():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_numbers(numbers: Iterable[int], device: torch.device) -> Tensor:
    """Return int64 numbers on `device`."""
    return send(torch.from_numpy(np.array(list(numbers), np.int64)), device)
