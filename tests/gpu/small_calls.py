"""Calls every kernel of ours once or twice with few rows: what compute-sanitizer can get through.

    compute-sanitizer --tool memcheck python -m tests.gpu.small_calls [--products]

`--products` calls CUTLASS's kernels too; memcheck alone understands how these move data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from quantkit import ops, row_ops, sampling_ops
from quantkit.attention_ops import kv_append, paged_attention, rms_norm, rotary
from quantkit.block_ops import BLOCK, block_scaled_mm, quantize_groups
from quantkit.cache_ops import kv_gather, rotary_append
from quantkit.extension import load_cuda_kernels
from quantkit.gate_ops import gate_mul
from quantkit.qkv_ops import fp8_qkv_append
from quantkit.scaled_ops import scaled_gated_mm, scaled_mm

E4M3 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
FORMATS = (E4M3, torch.float8_e5m2, torch.uint8)


def random_codes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randint(0, 0x60, shape, dtype=torch.uint8, device=device).view(dtype)


def linears(device: torch.device) -> None:
    for dtype in HALVES:
        for rows, columns, group in ((40, 144, 144), (4240, 256, 256), (40, 256, 128), (7, 33, 33)):
            for codes_dtype in FORMATS:
                codes = random_codes((rows, columns), codes_dtype, device)
                scale = torch.rand(rows, -(-columns // group), device=device)
                ops.dequantize_weight(codes, scale, group, dtype)
                for count in (1, 9, 17):
                    x = torch.randn(count, columns, device=device).to(dtype)
                    few_rows(x, codes, scale, group)


def projections(device: torch.device) -> None:
    """q, k and v into the cache: both splits of K, groups, every format."""
    for heads, kv_heads, dim, group in ((4, 2, 64, 256), (60, 4, 64, 256), (4, 2, 64, 128)):
        rows, columns = (heads + 2 * kv_heads) * dim, 256
        scale = torch.rand(rows, columns // group, device=device) * 1e-3
        for codes_dtype in FORMATS:
            weights = (random_codes((rows, columns), codes_dtype, device), scale, None, group)
            for kind in (E4M3, torch.bfloat16):
                caches = [torch.zeros(2, 16, kv_heads, dim, device=device).to(kind) for _ in "kv"]
                one = torch.ones(1, device=device) if kind == E4M3 else None
                for count in (1, 8):
                    x = torch.randn(count, columns, device=device).bfloat16()
                    angles = tuple(torch.randn(2, count, dim // 2, device=device).bfloat16())
                    slots = torch.arange(count, device=device)
                    fp8_qkv_append(x, *weights, angles, *caches, one, one, slots, heads)


def few_rows(x: Tensor, codes: Tensor, scale: Tensor, group: int) -> None:
    """Gated too where it divides; E4M3 also with outlier columns, the last of them at the edge."""
    rows, columns = codes.shape
    numbers = torch.tensor([0, 5, columns - 1], dtype=torch.int32, device=x.device)
    beside = torch.randn(3, rows, device=x.device).bfloat16()
    bias = torch.randn(rows, device=x.device).to(x.dtype)
    for outliers in ((None, None), (numbers, beside))[: 2 if codes.dtype == E4M3 else 1]:
        torch.ops.quantkit.fp8_linear(x, codes, scale, bias, group, None, *outliers)
        if rows % 2 == 0:
            torch.ops.quantkit.fp8_gated_linear(x, codes, scale, bias, group, "silu", *outliers)


def products(device: torch.device) -> None:
    """8-bit inputs; counts on both sides of every tile's rows, sizes that no tile divides."""
    for dtype in HALVES:
        for rows, columns in ((48, 144), (272, 384)):
            codes = random_codes((rows, columns), E4M3, device)
            scale, bias = torch.rand(rows, device=device), torch.randn(rows, device=device)
            for count in (1, 17, 33, 65, 129, 400):
                x = torch.randn(count, columns, device=device).to(dtype)
                for given in (None, torch.ones(1, device=device)):
                    inputs = row_ops.quantize_rows(x, given)
                    scaled_mm(inputs, codes, scale, bias, dtype, "gelu")
                    if on_sm90(device):
                        scaled_gated_mm(inputs, codes, scale, bias, dtype, "silu")
                if columns % BLOCK == 0 and on_sm90(device):
                    blocks = torch.rand(-(-rows // BLOCK), columns // BLOCK, device=device)
                    block_scaled_mm(quantize_groups(x), codes, blocks, bias, dtype)


def on_sm90(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def rows(device: torch.device) -> None:
    for width in (8, 333, 4096):
        x, delta = torch.randn(2, 3, width, device=device).bfloat16()
        weight, scale = torch.ones(width, device=device).bfloat16(), torch.ones(1, device=device)
        for norm in (weight, weight.float()):
            rms_norm(x, norm, 1e-5)
            row_ops.add_rms_norm(x, delta, norm, 1e-5)
        for given in (None, scale):
            row_ops.quantize_rows(x, given)
            row_ops.rms_norm_quantize(x, weight, 1e-5, given)
            row_ops.add_rms_norm_quantize(x, delta, weight, 1e-5, given)
            both = torch.randn(3, 2 * width, device=device).bfloat16()
            row_ops.gate_mul_quantize(both, "gelu", given)
            gate_mul(both, "silu")


def attention(device: torch.device) -> None:
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64), (3, 1, 10)):
        for kind in (E4M3, torch.uint8, *HALVES):
            attend(device, heads, kv_heads, dim, kind)


def attend(device: torch.device, heads: int, kv_heads: int, dim: int, kind: torch.dtype) -> None:
    """Append to caches of one kind and read them; decode, verification and a short prefill."""
    lengths, new = [5, 300, 700], [1, 3, 20]
    tokens, half = sum(new), kind if kind in HALVES else torch.bfloat16
    shape = (3 * 48, 16, kv_heads, dim)
    scale = None if kind in HALVES else torch.full((1,), 0.01, device=device)
    tables = torch.randperm(3 * 48, device=device).int().view(3, 48)
    seen = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1, 4, 24], dtype=torch.int32, device=device)
    slots = torch.arange(tokens, device=device)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(half)
    angles = tuple(torch.randn(2, tokens, dim, device=device).to(half))
    norm = torch.ones(dim, device=device).to(half)
    rotary(qkv, *angles)
    caches = [
        torch.randn(shape, device=device).to(kind)
        if kind in HALVES
        else random_codes(shape, kind, device)
        for _ in range(2)
    ]
    _, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    kv_append(key.contiguous(), value.contiguous(), *caches, scale, scale, slots)
    query = rotary_append(qkv, norm, norm, 1e-6, angles, *caches, scale, scale, slots, heads)
    given = (query, *caches, scale, scale, tables, seen, starts, 0.1)
    for window, softcap in ((None, None), (100, None), (None, 30.0)):
        paged_attention(*given, window, softcap)
    kv_gather(caches[0], scale, tables[1], 300, half)


def choices(device: torch.device) -> None:
    for vocab in (1, 31, 50257):
        scores = torch.randn(3, vocab, device=device)
        sampling_ops.argmax_rows(scores)
        sampling_ops.sample_gumbel(scores, torch.arange(3, device=device))
        for probabilities in (scores.softmax(-1), torch.zeros_like(scores).softmax(-1)):
            sampling_ops.nucleus_bound(probabilities, 0.9)


JOBS: tuple[Callable[[torch.device], None], ...] = (
    rows,
    choices,
    linears,
    projections,
    attention,
)


if __name__ == "__main__":
    if not load_cuda_kernels():
        raise SystemExit("needs quantkit/_cuda*.so (make cuda)")
    for job in (*JOBS, *([products] if "--products" in sys.argv else [])):
        job(torch.device("cuda"))
        torch.cuda.synchronize()
        print(job.__name__, "done", flush=True)
