"""Ops run on the GPU of their tensors, whichever is the current one."""

from __future__ import annotations

import pytest
import torch

from quantkit import ops, row_ops
from quantkit.attention_ops import kv_append, paged_attention, rms_norm

E4M3 = torch.float8_e4m3fn
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def results(device: torch.device) -> list[torch.Tensor]:
    """Call one op of every family with the same numbers."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(4, 256, generator=made).bfloat16().to(device)
    codes = torch.randint(0, 0x60, (64, 256), dtype=torch.uint8, generator=made).to(device)
    scale = torch.full((64, 1), 0.01, device=device)
    weight = torch.ones(256, device=device).bfloat16()
    rows = row_ops.quantize_rows(x, None)
    heads = x.view(4, 4, 64)
    caches = [torch.zeros(1, 16, 4, 64, device=device).to(E4M3) for _ in range(2)]
    one = torch.full((1,), 0.01, device=device)
    kv_append(heads, heads, *caches, one, one, torch.arange(4, device=device))
    table, length, starts = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([[0]], [4], [0, 4])
    )
    return [
        torch.ops.quantkit.fp8_linear(x, codes.view(E4M3), scale, None, 256),
        ops.dequantize_weight(codes.view(E4M3), scale, 256, torch.bfloat16),
        rms_norm(x, weight, 1e-5),
        rows.codes.view(torch.uint8),
        rows.scales,
        paged_attention(heads, *caches, one, one, table, length, starts, 0.125),
    ]


def test_ops_on_the_second_gpu() -> None:
    torch.cuda.set_device(0)
    first, second = (results(torch.device("cuda", index)) for index in (0, 1))
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    for here, there in zip(first, second, strict=True):
        assert there.device.index == 1
        assert torch.equal(here.cpu(), there.cpu())
