"""The CUDA kernels of one linear layer, by number of rows, beside torch's; see `gpu_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.bench.gpu_timing import (
    CACHE_BLOCK,
    COLD_BYTES,
    MIN_LAUNCHES,
    GpuKernelSpeed,
    GpuLimits,
    random_codes,
    seconds_of,
    torch_scaled_mm,
)
from quantkit.block_ops import BLOCK, block_scaled_mm, quantize_groups
from quantkit.cache_ops import rotary_append
from quantkit.numerics import E4M3
from quantkit.ops import fp8_gated_linear, fp8_linear
from quantkit.qkv_ops import fits, fp8_qkv_append
from quantkit.row_ops import QuantizedRows, gate_mul_quantize, quantize_rows
from quantkit.runtime.shapes import ModelShape
from quantkit.scaled_ops import MULTIPLE, scaled_gated_mm, scaled_mm


class LinearKernels:
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
        theirs = [partial(torch_scaled_mm, rows, w, scale) for w in chosen]
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

        def codes(weight: Tensor) -> Tensor:
            return block_scaled_mm(quantize_groups(x), weight, blocks, None, x.dtype)

        def decoded(weight: Tensor) -> Tensor:
            return fp8_linear(x, weight, scale, None, BLOCK)

        return [
            self._speed(f"blocks, codes: {name}", count, codes, limits, repeats),
            self._speed(f"blocks, decoded: {name}", count, decoded, limits, repeats),
        ]

    def gated(self, name: str, count: int, limits: GpuLimits, repeats: int) -> list[GpuKernelSpeed]:
        """Measure both ways from 8-bit inputs to those of the layer after the gate.

        Gating in a kernel that also rounds, and where the product is; see `runtime.scaled_linear`.
        """
        if name != "gate/up":
            return []
        rows = quantize_rows(torch.randn(count, self.columns, device=self.device).bfloat16())
        scale = self._scale

        def two_kernels(weight: Tensor) -> QuantizedRows:
            return gate_mul_quantize(scaled_mm(rows, weight, scale, None, torch.bfloat16), "silu")

        def fused(weight: Tensor) -> QuantizedRows:
            gated = scaled_gated_mm(rows, weight, scale, None, torch.bfloat16, "silu")
            return quantize_rows(gated)

        return [
            self._speed(f"{name}, then gate + quantize", count, two_kernels, limits, repeats),
            self._speed(f"{name} + gate, then quantize", count, fused, limits, repeats),
        ]

    def _speed(
        self,
        kernel: str,
        count: int,
        run: Callable[[Tensor], object],
        limits: GpuLimits,
        repeats: int,
    ) -> GpuKernelSpeed:
        """Measure `run` on this weight, for inputs of `count` rows."""
        chosen = self._codes[: MIN_LAUNCHES if count >= 512 else None]
        taken = seconds_of([partial(run, weight) for weight in chosen], repeats)
        rate = self.out * self.columns / taken / 1e9
        tflops = 2 * count * self.out * self.columns / taken / 1e12
        share = max(rate / limits.copy_gb_per_second, tflops / limits.fp8_tflops)
        text = f"{count} x {self.columns} x {self.out}"
        return GpuKernelSpeed(kernel, text, 1e6 * taken, rate, tflops, share)


def _if_torch_can(runs: Sequence[Callable[[], object]], repeats: int) -> float | None:
    """Return `seconds_of`, or None where torch has no kernel for these sizes."""
    try:
        runs[0]()
    except RuntimeError:
        return None
    return seconds_of(runs, repeats)
