"""How long CUDA kernels take, and what a GPU does at best.

A measurement is a recorded graph of many launches over inputs that together are several times the
L2 cache, replayed between events: no launch gaps, no warm caches. Medians over replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.numerics import E4M3
from quantkit.row_ops import QuantizedRows, quantize_rows

COLD_BYTES: Final = 1 << 30
"""What the inputs of one measurement add up to, where memory is the limit."""
MIN_LAUNCHES: Final = 8
WARM_SECONDS: Final = 0.02
CACHE_BLOCK: Final = 16
"""Tokens of a block of keys and values, as in the runtime."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What the GPU does at best here."""

    name: str
    copy_gb_per_second: float  # bytes read plus bytes written
    bf16_tflops: float  # torch's product of two 8192 squares
    fp8_tflops: float  # the same by torch._scaled_mm


@dataclass(frozen=True, slots=True)
class GpuKernelSpeed:
    """One kernel; `of_limit` is its share of the copy's bandwidth, or of the fp8 rate.

    `torch_microseconds` is what torch takes for the same job: `torch._scaled_mm` for 8-bit inputs,
    a bf16 linear for 16-bit inputs; None where it has no such kernel.
    """

    kernel: str
    shape: str
    microseconds: float
    gb_per_second: float | None
    tflops: float | None
    of_limit: float
    torch_microseconds: float | None = None

    @property
    def times_torch(self) -> float | None:
        """How many times as long torch takes."""
        taken = self.torch_microseconds
        return None if taken is None else taken / self.microseconds


def seconds_of(runs: Sequence[Callable[[], object]], repeats: int) -> float:
    """Return the median time of one of `runs`, all recorded into one graph and replayed.

    A GPU takes a while to raise its clocks: replays before that do not count.
    """
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    times = [_replay_seconds(graph) / len(runs) for _ in range(repeats)]
    return median(times)


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


def measure_limits(device: torch.device, repeats: int) -> GpuLimits:
    """Measure copying two gigabytes and multiplying large matrices."""
    source = torch.zeros(1 << 29, device=device)
    target = torch.empty_like(source)
    # A kernel: a recorded copy_ would go to the slower copy engine.
    copy = seconds_of([lambda: torch.mul(source, 1.5, out=target)] * 4, repeats)
    size = 8192
    a = torch.randn(size, size, device=device).bfloat16()
    rows = quantize_rows(a)
    products = 2 * size**3 / 1e12
    bf16 = seconds_of([lambda: F.linear(a, a)] * 4, repeats)
    fp8 = seconds_of([lambda: torch_scaled_mm(rows, rows.codes, rows.scales)] * 4, repeats)
    name = torch.cuda.get_device_name(device)
    return GpuLimits(name, 2 * source.nbytes / copy / 1e9, products / bf16, products / fp8)


def random_codes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return E4M3 codes of normal values, about 100 in size."""
    values = torch.randn(shape, device=device, dtype=torch.bfloat16) * 100
    return values.clamp_(-E4M3.max, E4M3.max).to(E4M3.dtype)


def torch_scaled_mm(rows: QuantizedRows, weight: Tensor, scale: Tensor) -> Tensor:
    """Return what `scaled_ops.scaled_mm` does, by torch's own kernel."""
    return torch._scaled_mm(
        rows.codes,
        weight.t(),
        scale_a=rows.scales.view(-1, 1),
        scale_b=scale.view(1, -1),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
