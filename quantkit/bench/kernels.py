"""Each kernel alone, at the shapes of a model: bytes or products a second beside the machine's.

Kernels that few rows make wait for memory are given weights that no cache holds: as many copies as
fill COLD_BYTES, in turn, with the machine's reading measured between the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from quantkit.attention_ops import paged_attention
from quantkit.bench.machine import READ_BYTES, Machine
from quantkit.dense_ops import linear
from quantkit.numerics import E4M3
from quantkit.ops import fp8_gated_linear, fp8_linear
from quantkit.probe_ops import read_memory
from quantkit.runtime.shapes import ModelShape

COLD_BYTES = 1 << 29
MANY_ROWS = 512
ATTENTION_CONTEXT = 4096
BLOCK = 16


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """One kernel; `of_limit` is its share of the machine's reading or multiplying."""

    kernel: str
    shape: str
    microseconds: float
    gb_per_second: float | None  # where memory is the limit
    gflops: float | None  # where arithmetic is
    of_limit: float


def measure_kernels(shape: ModelShape, machine: Machine, repeats: int) -> list[KernelSpeed]:
    """Measure the linear layers for one and for many rows, the output head, and attention."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    qkv = shape.query_size + 2 * shape.kv_size
    layers = {
        "q/k/v": (qkv, hidden),
        "attention out": (hidden, shape.query_size),
        "gate/up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    speeds = [_few_rows(f"fp8 {name}", *size, repeats) for name, size in layers.items()]
    speeds.append(_head(shape.vocab_size, hidden, repeats))
    speeds.append(_attention(shape, repeats))
    for name, size in layers.items():
        speeds.append(_many_rows(f"fp8 {name}", *size, machine, repeats))
    return speeds


def _few_rows(name: str, rows: int, columns: int, repeats: int) -> KernelSpeed:
    scale, x = torch.ones(rows, 1), torch.randn(1, columns).bfloat16()

    def run(weight: Tensor) -> Tensor:
        if name.endswith("gate/up"):
            return fp8_gated_linear(x, weight, scale, None, columns, "silu")
        return fp8_linear(x, weight, scale, None, columns)

    copies = _copies(rows * columns)
    weights = [_codes(rows, columns) for _ in range(copies)]
    return _reading(name, f"1 x {columns} x {rows}", rows * columns, weights, run, repeats)


def _head(vocab: int, hidden: int, repeats: int) -> KernelSpeed:
    x = torch.randn(1, hidden).bfloat16()
    size = 2 * vocab * hidden
    weights = [torch.randn(vocab, hidden).bfloat16() for _ in range(_copies(size))]

    def run(weight: Tensor) -> Tensor:
        return linear(x, weight, None, torch.float32)

    return _reading("bf16 output head", f"1 x {hidden} x {vocab}", size, weights, run, repeats)


def _attention(shape: ModelShape, repeats: int) -> KernelSpeed:
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    blocks, scale = ATTENTION_CONTEXT // BLOCK, torch.ones(1)
    table = torch.arange(blocks, dtype=torch.int32).view(1, -1)
    length, starts = torch.tensor([ATTENTION_CONTEXT]).int(), torch.tensor([0, 1]).int()
    query = torch.randn(1, heads, head_dim).bfloat16()
    size = 2 * ATTENTION_CONTEXT * kv_heads * head_dim
    caches = [
        _codes(2 * blocks * BLOCK, kv_heads * head_dim).view(2, blocks, BLOCK, kv_heads, head_dim)
        for _ in range(_copies(size))
    ]

    def run(cache: Tensor) -> Tensor:
        return paged_attention(
            query, cache[0], cache[1], scale, scale, table, length, starts, head_dim**-0.5
        )

    text = f"1 x {ATTENTION_CONTEXT} keys, {heads}/{kv_heads} heads of {head_dim}"
    return _reading("attention, fp8 cache", text, size, caches, run, repeats)


def _many_rows(name: str, rows: int, columns: int, machine: Machine, repeats: int) -> KernelSpeed:
    weight, scale = _codes(rows, columns), torch.ones(rows, 1)
    x = torch.randn(MANY_ROWS, columns).bfloat16()
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        fp8_linear(x, weight, scale, None, columns)
        seconds.append(time.perf_counter() - begin)
    taken = median(seconds[1:])
    gflops = 2 * MANY_ROWS * rows * columns / taken / 1e9
    shape = f"{MANY_ROWS} x {columns} x {rows}"
    return KernelSpeed(name, shape, 1e6 * taken, None, gflops, gflops / machine.matrix_gflops)


def _reading(
    name: str,
    shape: str,
    size: int,
    weights: list[Tensor],
    run: Callable[[Tensor], Tensor],
    repeats: int,
) -> KernelSpeed:
    """Run over all `weights`, `size` bytes each, between readings of the machine's memory."""
    memory = torch.zeros(READ_BYTES // 8, dtype=torch.int64)
    run(weights[0])
    rounds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        read_memory(memory)
        middle = time.perf_counter()
        for weight in weights:
            run(weight)
        end = time.perf_counter()
        taken = (end - middle) / len(weights)
        limit = READ_BYTES / (middle - begin)
        rounds.append((taken, size / taken / limit))
    taken, share = (median(values) for values in zip(*rounds, strict=True))
    return KernelSpeed(name, shape, 1e6 * taken, size / taken / 1e9, None, share)


def _copies(size: int) -> int:
    return max(2, min(4096, COLD_BYTES // size))


def _codes(rows: int, columns: int) -> Tensor:
    """Return random finite E4M3 codes."""
    bits = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8)
    return bits.view(E4M3.dtype)
