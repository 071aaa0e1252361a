"""Each CUDA kernel alone, at the shapes of a model, beside the GPU's limits and torch's kernels.

A measurement is a recorded graph of many launches over inputs that together are several times the
L2 cache, replayed between events: no launch gaps, no warm caches. Medians over replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.attention_ops import paged_attention
from quantkit.block_ops import BLOCK, block_scaled_mm, quantize_groups
from quantkit.cache_ops import rotary_append
from quantkit.numerics import E4M3
from quantkit.ops import CUDA_FEW_ROWS, fp8_gated_linear, fp8_linear
from quantkit.qkv_ops import MOST_ROWS, fits, fp8_qkv_append
from quantkit.row_ops import QuantizedRows, add_rms_norm, gate_mul_quantize, quantize_rows
from quantkit.runtime.shapes import ModelShape
from quantkit.scaled_ops import MULTIPLE, scaled_mm

COLD_BYTES: Final = 1 << 30
"""What the inputs of one measurement add up to, where memory is the limit."""
MIN_LAUNCHES: Final = 8
WARM_SECONDS: Final = 0.02
CACHE_BLOCK: Final = 16


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
    fp8 = seconds_of([lambda: _torch_scaled_mm(rows, rows.codes, rows.scales)] * 4, repeats)
    name = torch.cuda.get_device_name(device)
    return GpuLimits(name, 2 * source.nbytes / copy / 1e9, products / bf16, products / fp8)


def measure_gpu_kernels(
    shape: ModelShape,
    limits: GpuLimits,
    device: torch.device,
    rows: Sequence[int],
    contexts: Sequence[tuple[int, int]],
    repeats: int,
) -> list[GpuKernelSpeed]:
    """Measure the linears for each number of rows, and attention for each (batch, context)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    layers = {
        "q/k/v": (shape.query_size + 2 * shape.kv_size, hidden),
        "attention out": (hidden, shape.query_size),
        "gate/up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    speeds = []
    for name, (out, columns) in layers.items():
        weights = _Weights(out, columns, device)
        for count in rows:
            if count <= CUDA_FEW_ROWS:
                speeds.append(weights.few_rows(name, count, limits, repeats))
            speeds.append(weights.scaled_mm(name, count, limits, repeats))
            if count > CUDA_FEW_ROWS and torch.cuda.get_device_capability(device) == (9, 0):
                speeds += weights.in_blocks(name, count, limits, repeats)
        if name == "q/k/v":
            for count in (count for count in rows if count <= MOST_ROWS):
                speeds += weights.appending(shape, count, limits, repeats)
        del weights
    for count in rows:
        speeds += _row_kernels(shape, count, limits, device, repeats)
    for batch, context in contexts:
        for kind in (E4M3.dtype, torch.bfloat16):
            speeds.append(_attention(shape, batch, context, kind, limits, device, repeats))
    return speeds


class _Weights:
    """Copies of one weight that no cache holds, with a bf16 twin for torch's kernel."""

    def __init__(self, out: int, columns: int, device: torch.device) -> None:
        self.out, self.columns, self.device = out, columns, device
        self._copies = max(MIN_LAUNCHES, min(256, COLD_BYTES // (out * columns)))
        self._scale = torch.rand(out, device=device) * 0.01
        self._codes = [random_codes((out, columns), device) for _ in range(self._copies)]
        half = max(2, self._copies // 2)
        self._plain = [torch.randn(out, columns, device=device).bfloat16() for _ in range(half)]

    def few_rows(self, name: str, count: int, limits: GpuLimits, repeats: int) -> GpuKernelSpeed:
        """Measure 16-bit inputs against torch's bf16 linear, which reads twice the bytes."""
        x = torch.randn(count, self.columns, device=self.device).bfloat16()
        scale, columns = self._scale.view(-1, 1), self.columns

        def ours(codes: Tensor) -> Callable[[], Tensor]:
            if name == "gate/up":
                return lambda: fp8_gated_linear(x, codes, scale, None, columns, "silu")
            return lambda: fp8_linear(x, codes, scale, None, columns)

        taken = seconds_of([ours(codes) for codes in self._codes], repeats)
        theirs = seconds_of([partial(F.linear, x, w) for w in self._plain], repeats)
        rate = self.out * self.columns / taken / 1e9
        share = rate / limits.copy_gb_per_second
        text = f"{count} x {self.columns} x {self.out}"
        return GpuKernelSpeed(f"w8a16 {name}", text, 1e6 * taken, rate, None, share, 1e6 * theirs)

    def scaled_mm(self, name: str, count: int, limits: GpuLimits, repeats: int) -> GpuKernelSpeed:
        """Measure 8-bit inputs against `torch._scaled_mm` with the same scales."""
        rows = quantize_rows(torch.randn(count, self.columns, device=self.device).bfloat16())
        scale = self._scale
        many = count >= 512
        chosen = self._codes[: MIN_LAUNCHES if many else None]
        ours = [partial(scaled_mm, rows, w, scale, None, torch.bfloat16) for w in chosen]
        theirs = [partial(_torch_scaled_mm, rows, w, scale) for w in chosen]
        taken, torch_taken = seconds_of(ours, repeats), _if_torch_can(theirs, repeats)
        rate = self.out * self.columns / taken / 1e9
        tflops = 2 * count * self.out * self.columns / taken / 1e12
        share = max(rate / limits.copy_gb_per_second, tflops / limits.fp8_tflops)
        text = f"{count} x {self.columns} x {self.out}"
        torch_us = None if torch_taken is None else 1e6 * torch_taken
        return GpuKernelSpeed(f"w8a8 {name}", text, 1e6 * taken, rate, tflops, share, torch_us)

    def appending(
        self, shape: ModelShape, count: int, limits: GpuLimits, repeats: int
    ) -> list[GpuKernelSpeed]:
        """Measure q, k and v into the cache: by two kernels, and by one; see `qkv_linear`."""
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        if not fits(self.columns, 1, self.columns, head_dim, head_dim):
            return []
        x = torch.randn(count, self.columns, device=self.device).bfloat16()
        scale, columns = self._scale.view(-1, 1), self.columns
        cos, sin = torch.randn(2, count, head_dim, device=self.device).bfloat16()
        size = (1, CACHE_BLOCK, kv_heads, head_dim)
        keys, values = (torch.zeros(size, device=self.device).to(E4M3.dtype) for _ in range(2))
        one, slots = torch.ones(1, device=self.device), torch.arange(count, device=self.device)
        into = ((cos, sin), keys, values, one, one, slots, heads)

        def two(codes: Tensor) -> Tensor:
            qkv = fp8_linear(x, codes, scale, None, columns).view(count, -1, head_dim)
            return rotary_append(qkv, None, None, 0.0, *into)

        speeds = []
        for kind, run in (
            ("two", two),
            ("one", lambda codes: fp8_qkv_append(x, codes, scale, None, columns, *into)),
        ):
            taken = seconds_of([partial(run, codes) for codes in self._codes], repeats)
            rate = self.out * self.columns / taken / 1e9
            text = f"{count} x {self.columns} x {self.out}"
            share = rate / limits.copy_gb_per_second
            name = f"q/k/v into cache, {kind}"
            speeds.append(GpuKernelSpeed(name, text, 1e6 * taken, rate, None, share))
        return speeds

    def in_blocks(
        self, name: str, count: int, limits: GpuLimits, repeats: int
    ) -> list[GpuKernelSpeed]:
        """Measure both ways for weights in blocks of 128 x 128; see `runtime.block_linear`.

        Codes times codes, rounding the inputs included; and a bf16 product after decoding.
        """
        if self.columns % BLOCK or self.out % MULTIPLE:
            return []
        x = torch.randn(count, self.columns, device=self.device).bfloat16()
        blocks = torch.rand(-(-self.out // BLOCK), self.columns // BLOCK, device=self.device) * 0.01
        scale = blocks.repeat_interleave(BLOCK, dim=0)[: self.out].contiguous()
        chosen = self._codes[: MIN_LAUNCHES if count >= 512 else None]

        def codes(weight: Tensor) -> Tensor:
            return block_scaled_mm(quantize_groups(x), weight, blocks, None, x.dtype)

        speeds = []
        for kind, run in (
            ("codes", codes),
            ("decoded", lambda weight: fp8_linear(x, weight, scale, None, BLOCK)),
        ):
            taken = seconds_of([partial(run, weight) for weight in chosen], repeats)
            rate = self.out * self.columns / taken / 1e9
            tflops = 2 * count * self.out * self.columns / taken / 1e12
            share = max(rate / limits.copy_gb_per_second, tflops / limits.fp8_tflops)
            text = f"{count} x {self.columns} x {self.out}"
            kernel = f"blocks, {kind}: {name}"
            speeds.append(GpuKernelSpeed(kernel, text, 1e6 * taken, rate, tflops, share))
        return speeds


def _row_kernels(
    shape: ModelShape, count: int, limits: GpuLimits, device: torch.device, repeats: int
) -> list[GpuKernelSpeed]:
    """Measure what lies between linears; at few rows launching is all the time."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    x, delta = torch.randn(2, count, hidden, device=device).bfloat16()
    both = torch.randn(count, 2 * inner, device=device).bfloat16()
    weight = torch.ones(hidden, device=device).bfloat16()
    jobs: list[tuple[str, Callable[[], object], int, int]] = [
        ("add + norm", lambda: add_rms_norm(x, delta, weight, 1e-5), hidden, 8 * count * hidden),
        ("gate + quantize", lambda: gate_mul_quantize(both, "silu"), inner, 5 * count * inner),
    ]
    speeds = []
    for name, run, width, moved in jobs:
        taken = seconds_of([run] * 16, repeats)
        rate = moved / taken / 1e9
        share = rate / limits.copy_gb_per_second
        speeds.append(GpuKernelSpeed(name, f"{count} x {width}", 1e6 * taken, rate, None, share))
    return speeds


def _attention(
    shape: ModelShape,
    batch: int,
    context: int,
    kind: torch.dtype,
    limits: GpuLimits,
    device: torch.device,
    repeats: int,
) -> GpuKernelSpeed:
    """Measure one decode step of attention over a cold cache."""
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    blocks = -(-context // CACHE_BLOCK)
    quantized = kind == E4M3.dtype
    size = batch * blocks * CACHE_BLOCK * kv_heads * head_dim * kind.itemsize
    copies = max(2, min(64, COLD_BYTES // (2 * size)))
    cache_shape = (batch * blocks, CACHE_BLOCK, kv_heads, head_dim)

    def new() -> Tensor:
        if quantized:
            return random_codes(cache_shape, device)
        return torch.randn(cache_shape, device=device, dtype=kind)

    caches = [(new(), new()) for _ in range(copies)]
    scale = torch.full((1,), 0.01, device=device) if quantized else None
    tables = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    query = torch.randn(batch, heads, head_dim, device=device).bfloat16()

    def run(pair: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
        return lambda: paged_attention(
            query, *pair, scale, scale, tables, lengths, starts, head_dim**-0.5
        )

    taken = seconds_of([run(pair) for pair in caches], repeats)
    rate = 2 * size / taken / 1e9
    name = f"attention, {'fp8' if quantized else 'bf16'} cache"
    text = f"{batch} x {context} keys, {heads}/{kv_heads} heads of {head_dim}"
    return GpuKernelSpeed(name, text, 1e6 * taken, rate, None, rate / limits.copy_gb_per_second)


def random_codes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return E4M3 codes of normal values, about 100 in size."""
    values = torch.randn(shape, device=device, dtype=torch.bfloat16) * 100
    return values.clamp_(-E4M3.max, E4M3.max).to(E4M3.dtype)


def _if_torch_can(runs: Sequence[Callable[[], object]], repeats: int) -> float | None:
    """Return `seconds_of`, or None where torch has no kernel for these sizes."""
    try:
        runs[0]()
    except RuntimeError:
        return None
    return seconds_of(runs, repeats)


def _torch_scaled_mm(rows: QuantizedRows, weight: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(
        rows.codes,
        weight.t(),
        scale_a=rows.scales.view(-1, 1),
        scale_b=scale.view(1, -1),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
