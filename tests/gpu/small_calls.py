"""Calls every kernel of ours once or twice with few rows: what compute-sanitizer can get through.

compute-sanitizer --tool memcheck python -m tests.gpu.small_calls
"""

from __future__ import annotations

import torch

from quantkit import ops, row_ops
from quantkit.attention_ops import paged_attention, rms_norm, rotary
from quantkit.cache_ops import kv_gather, rotary_append
from quantkit.extension import load_cuda_kernels
from quantkit.gate_ops import gate_mul
from quantkit.qkv_ops import fp8_qkv_append

DEVICE = torch.device("cuda")
E4M3 = torch.float8_e4m3fn


def linears() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for rows, columns, group in ((40, 144, 144), (4240, 256, 256), (40, 256, 128), (7, 33, 33)):
            for codes_dtype in (E4M3, torch.float8_e5m2, torch.uint8):
                bits = torch.randint(0, 0x60, (rows, columns), dtype=torch.uint8, device=DEVICE)
                codes = bits.view(codes_dtype)
                scale = torch.rand(rows, -(-columns // group), device=DEVICE)
                ops.dequantize_weight(codes, scale, group, dtype)
                for count in (1, 9, 17):
                    x = torch.randn(count, columns, device=DEVICE).to(dtype)
                    torch.ops.quantkit.fp8_linear(x, codes, scale, None, group)
                    if rows % 2 == 0:
                        torch.ops.quantkit.fp8_gated_linear(x, codes, scale, None, group, "silu")


def projections() -> None:
    """q, k and v into the cache: both splits of K, groups, every format."""
    for heads, kv_heads, dim, group in ((4, 2, 64, 256), (60, 4, 64, 256), (4, 2, 64, 128)):
        rows, columns = (heads + 2 * kv_heads) * dim, 256
        scale = torch.rand(rows, columns // group, device=DEVICE) * 1e-3
        for codes_dtype in (E4M3, torch.float8_e5m2, torch.uint8):
            bits = torch.randint(0, 0x60, (rows, columns), dtype=torch.uint8, device=DEVICE)
            weights = (bits.view(codes_dtype), scale, None, group)
            for kind in (E4M3, torch.bfloat16):
                caches = [torch.zeros(2, 16, kv_heads, dim, device=DEVICE).to(kind) for _ in "kv"]
                one = torch.ones(1, device=DEVICE) if kind == E4M3 else None
                for count in (1, 8):
                    x = torch.randn(count, columns, device=DEVICE).bfloat16()
                    angles = tuple(torch.randn(2, count, dim // 2, device=DEVICE).bfloat16())
                    slots = torch.arange(count, device=DEVICE)
                    fp8_qkv_append(x, *weights, angles, *caches, one, one, slots, heads)


def rows() -> None:
    for width in (8, 333, 4096):
        x, delta = torch.randn(2, 3, width, device=DEVICE).bfloat16()
        weight, scale = torch.ones(width, device=DEVICE).bfloat16(), torch.ones(1, device=DEVICE)
        rms_norm(x, weight, 1e-5)
        row_ops.add_rms_norm(x, delta, weight, 1e-5)
        for given in (None, scale):
            row_ops.quantize_rows(x, given)
            row_ops.rms_norm_quantize(x, weight, 1e-5, given)
            row_ops.add_rms_norm_quantize(x, delta, weight, 1e-5, given)
            both = torch.randn(3, 2 * width, device=DEVICE).bfloat16()
            row_ops.gate_mul_quantize(both, "gelu", given)
            gate_mul(both, "silu")


def attention() -> None:
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64), (3, 1, 10)):
        lengths, new = [5, 300, 700], [1, 3, 20]
        tokens = sum(new)
        shape = (3 * 48, 16, kv_heads, dim)
        scale = torch.full((1,), 0.01, device=DEVICE)
        tables = torch.randperm(3 * 48, device=DEVICE).int().view(3, 48)
        seen = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, 1, 4, 24], dtype=torch.int32, device=DEVICE)
        slots = torch.arange(tokens, device=DEVICE)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=DEVICE).bfloat16()
        angles = tuple(torch.randn(2, tokens, dim, device=DEVICE).bfloat16())
        norm = torch.ones(dim, device=DEVICE).bfloat16()
        rotary(qkv, *angles)
        for kind in (E4M3, torch.bfloat16):
            caches = [torch.randn(shape, device=DEVICE).to(kind) for _ in range(2)]
            both = (scale, scale) if kind == E4M3 else (None, None)
            query = rotary_append(qkv, norm, norm, 1e-6, angles, *caches, *both, slots, heads)
            paged_attention(query, *caches, *both, tables, seen, starts, 0.1)
            paged_attention(query, *caches, *both, tables, seen, starts, 0.1, 100)
            kv_gather(caches[0], both[0], tables[1], 300, torch.bfloat16)


if __name__ == "__main__":
    if not load_cuda_kernels():
        raise SystemExit("needs quantkit/_cuda*.so (make cuda)")
    for job in (linears, projections, rows, attention):
        job()
        torch.cuda.synchronize()
        print(job.__name__, "done", flush=True)
