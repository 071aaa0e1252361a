"""What the machine can do: how fast it reads memory and multiplies matrices. The best of a few."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quantkit.probe_ops import read_memory

READ_BYTES = 1 << 28
"""More than caches hold."""
MATRIX_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits that kernels are compared with."""

    threads: int
    read_gb_per_second: float  # plain reading of memory, all threads
    matrix_gflops: float  # torch's bfloat16 product of two MATRIX_SIZE squares


def measure_machine(repeats: int) -> Machine:
    """Return the best of `repeats` measurements: what else runs only makes them worse."""
    memory = torch.zeros(READ_BYTES // 8, dtype=torch.int64)
    a = torch.randn(MATRIX_SIZE, MATRIX_SIZE).bfloat16()
    read = best_seconds(lambda: read_memory(memory), repeats)
    multiply = best_seconds(lambda: F.linear(a, a), repeats)
    return Machine(
        torch.get_num_threads(), READ_BYTES / read / 1e9, 2 * MATRIX_SIZE**3 / multiply / 1e9
    )


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the fewest seconds of `run`, after one call that does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
