"""Each CUDA kernel alone, at the shapes of a model, beside the GPU's limits and torch's kernels.

A measurement is a recorded graph of many launches over inputs that together are several times the
L2 cache, replayed between events: no launch gaps, no warm caches. Medians over replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quantkit.attention_ops import paged_attention
from quantkit.bench.gpu_linears import LinearKernels
from quantkit.bench.gpu_timing import (
    CACHE_BLOCK,
    COLD_BYTES,
    GpuKernelSpeed,
    GpuLimits,
    random_codes,
    seconds_of,
)
from quantkit.numerics import E4M3
from quantkit.ops import CUDA_FEW_ROWS
from quantkit.qkv_ops import MOST_ROWS
from quantkit.row_ops import add_rms_norm, gate_mul_quantize
from quantkit.runtime.shapes import ModelShape


def measure_gpu_kernels(
    shape: ModelShape,
    limits: GpuLimits,
    device: torch.device,
    rows: Sequence[int],
    contexts: Sequence[tuple[int, int]],
    repeats: int,
) -> Iterator[GpuKernelSpeed]:
    """Measure the linears for each number of rows, and attention for each (batch, context)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    layers = {
        "q/k/v": (shape.query_size + 2 * shape.kv_size, hidden),
        "attention out": (hidden, shape.query_size),
        "gate/up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    for name, (out, columns) in layers.items():
        weights = LinearKernels(out, columns, device)
        for count in rows:
            if count <= CUDA_FEW_ROWS:
                yield weights.few_rows(name, count, limits, repeats)
            yield weights.scaled_mm(name, count, limits, repeats)
            if count > CUDA_FEW_ROWS and torch.cuda.get_device_capability(device) == (9, 0):
                yield from weights.gated(name, count, limits, repeats)
                yield from weights.in_blocks(name, count, limits, repeats)
        if name == "q/k/v":
            for count in (count for count in rows if count <= MOST_ROWS):
                yield from weights.appending(shape, count, limits, repeats)
        del weights
    for count in rows:
        yield from _row_kernels(shape, count, limits, device, repeats)
    for batch, context in contexts:
        for kind in (E4M3.dtype, torch.bfloat16):
            yield _attention(shape, batch, context, kind, limits, device, repeats)


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
