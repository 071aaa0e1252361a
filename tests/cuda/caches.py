"""What must be in a paged KV cache after an append, by the oracles of tests/reference.py."""

from __future__ import annotations

import torch
from torch import Tensor

from tests import reference

E4M3 = torch.float8_e4m3fn
E3M4 = torch.uint8  # its codes
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODES = {E4M3: "e4m3", E3M4: "e3m4"}
NAMES = {E4M3: "E4M3", E3M4: "E3M4", BF16: "BFloat16", FP16: "Half", FP32: "float"}
"""Types as the kernels call them."""


def poisoned(slots: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return memory of a cache that nothing has been written to, full of a pattern."""
    memory = torch.full((slots, heads, head_dim * dtype.itemsize), 0xA5, dtype=torch.uint8)
    return memory.view(dtype)


def stored_of(x: Tensor, cache: torch.dtype, scale: Tensor | None) -> Tensor:
    """What a cache must hold of x [tokens, heads, head_dim]."""
    if scale is None:
        return x.to(cache)
    quotient = (x.float() / scale.view(-1, 1)).double().numpy()
    return torch.from_numpy(reference.float8_encode(quotient, CODES[cache])).view(cache)


def scales_of(cache: torch.dtype, count: int) -> Tensor | None:
    """Return random scales of that many heads, None for a cache of plain values."""
    least = {E4M3: 0.001, E3M4: 0.05}.get(cache)
    return None if least is None else torch.rand(count) * 20 * least + least


def bits_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    return x.contiguous().view(torch.uint8)


def assert_stored(cache: Tensor, slots: list[int], x: Tensor, scale: Tensor | None) -> None:
    """Compare every byte: tokens are where their slots are, nothing is written elsewhere."""
    slot_count, heads, head_dim = cache.shape
    expected = poisoned(slot_count, heads, head_dim, cache.dtype)
    for token, slot in enumerate(slots):
        if 0 <= slot < slot_count:
            expected[slot].view(torch.uint8)[:] = bits_of(stored_of(x, cache.dtype, scale)[token])
    assert torch.equal(bits_of(cache), bits_of(expected))
