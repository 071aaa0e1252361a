"""Ops run on the GPU of their tensors, whichever is the current one; layers on two GPUs."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
import torch

from quantkit import ops, row_ops
from quantkit.attention_ops import kv_append, paged_attention, rms_norm
from quantkit.bench.random_weights import LLAMA_3_8B, RandomWeights, random_decoder
from quantkit.runtime.placement import Placement

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


@torch.inference_mode()
@pytest.mark.parametrize("prompt", [7, 200])
def test_a_decoder_over_two_gpus_gives_the_bits_of_one(prompt: int) -> None:
    """The same weights, read on one device and moved: 16-bit steps, and a prefill in 8 bits."""
    shape = replace(LLAMA_3_8B, vocab_size=512, hidden_size=256, intermediate_size=512,
                    num_heads=8, num_kv_heads=2, head_dim=64, max_context=4096,
                    windows=(None, 64, None), rotary=(0, 0, None))  # fmt: skip
    first, second = (torch.device("cuda", index) for index in (0, 1))
    split = Placement(first, (first, second, second), second, second)
    alone = random_decoder(shape, Moved(first), True)
    both = random_decoder(shape, Moved(first), True, placement=split)
    ids = torch.randint(512, (prompt + 6,))
    caches = alone.new_cache(1, prompt), both.new_cache(1, prompt)
    for at in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, prompt + 6))):
        expected, got = (
            decoder.forward(ids[at], [0], [at.stop - at.start], cache)
            for decoder, cache in zip((alone, both), caches, strict=True)
        )
        assert got.device == second
        assert torch.equal(got.cpu(), expected.cpu())


class Moved(RandomWeights):
    """Random weights that are the same on whichever device they are asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"), torch.bfloat16, quantized=True)
        self.device = device

    def on(self, device: torch.device) -> Moved:
        other = copy(self)
        other.device = device
        return other

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=self.dtype).to(self.device)
