"""What compute-sanitizer is given on a GPU, run here on the kernels for CPUs: it calls every op."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.extension import EXTENSION_LOADED
from tests.gpu import small_calls

BINDINGS = Path(__file__).parents[2] / "csrc" / "cuda" / "bindings.cpp"
MEASURED_ONLY = {"scaled_mm_tile"}  # the kernels of scaled_mm, by name


class Noted(TorchDispatchMode):
    """Notes the ops of quantkit that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "quantkit":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_every_kernel_is_called() -> None:
    assert EXTENSION_LOADED
    bound = set(re.findall(r'impl\("(\w+)"', BINDINGS.read_text(encoding="utf-8")))
    assert len(bound) > 20
    with Noted() as noted:
        for job in (*small_calls.JOBS, small_calls.products):
            job(torch.device("cpu"))
    assert bound - MEASURED_ONLY <= noted.names
