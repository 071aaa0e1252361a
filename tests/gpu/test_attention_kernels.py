"""Attention and the KV cache on the GPU against float64 and against the reference kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.attention_ops import kv_append, paged_attention, rms_norm, rotary
from quantkit.cache_ops import kv_gather, rotary_append
from tests.gpu import oracles

DEVICE = torch.device("cuda")
E4M3 = torch.float8_e4m3fn
NEVER_WRITTEN = 0x7F  # a NaN


def new_cache(
    lengths: list[int], kv_heads: int, dim: int, kind: torch.dtype, block: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values [blocks, block, kv_heads, dim] and tables; free slots hold NaN."""
    width = -(-max(lengths) // block) + 3
    tables = torch.randperm(len(lengths) * width, device=DEVICE).int().view(-1, width)
    shape = (len(lengths) * width, block, kv_heads, dim)
    caches = []
    for _ in range(2):
        cache = torch.randn(shape, device=DEVICE)
        cache = (cache * 100).clamp(-448, 448).to(E4M3) if kind == E4M3 else cache.to(kind)
        bits = cache.view(torch.uint8) if kind == E4M3 else cache
        for table, length in zip(tables, lengths, strict=True):
            used = torch.zeros(width * block, dtype=torch.bool, device=DEVICE)
            used[:length] = True
            rows = bits[table.long()].flatten(0, 1)
            rows[~used] = NEVER_WRITTEN if kind == E4M3 else float("nan")
            bits[table.long()] = rows.view(width, block, kv_heads, dim)
        caches.append(cache)
    return *caches, tables


def stored(cache: Tensor, table: Tensor, length: int, scale: Tensor | None) -> Tensor:
    if scale is None:
        return cache[table.long()].flatten(0, 1)[:length].double()
    codes = cache.view(torch.uint8)[table.long()].flatten(0, 1)[:length]
    return oracles.code_values(codes, "e4m3") * scale.double().view(-1, 1)


BATCHES = {
    "decode": ([1, 15, 16, 17, 255, 256, 257, 1000, 3001], [1] * 9),
    "verify": ([5, 300, 1030], [5, 3, 17]),
    "prefill": ([70, 33], [70, 20]),
}


@pytest.mark.parametrize("kind", [E4M3, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(32, 8, 128), (9, 3, 64), (8, 8, 128), (20, 1, 64), (4, 2, 256), (4, 2, 80), (3, 1, 10)],
)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (100, None), (None, 3.0), (100, 30.0)])
def test_paged_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    batch: str,
    kind: torch.dtype,
    window: int | None,
    cap: float | None,
) -> None:
    lengths, new = BATCHES[batch]
    keys, values, tables = new_cache(lengths, kv_heads, dim, kind)
    dtype = torch.bfloat16 if kind == E4M3 else kind
    query = torch.randn(sum(new), heads, dim, device=DEVICE).to(dtype)
    k_scale = v_scale = None
    if kind == E4M3:
        k_scale = torch.rand(kv_heads, device=DEVICE) * 0.01 + 0.005
        v_scale = torch.rand(1, device=DEVICE) * 0.01 + 0.005
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32, device=DEVICE)
    arguments = (keys, values, k_scale, v_scale)
    seen = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def run(query: Tensor, tables: Tensor, seen: Tensor, starts: Tensor) -> Tensor:
        return paged_attention(query, *arguments, tables, seen, starts, dim**-0.5, window, cap)

    actual = run(query, tables, seen, starts)
    assert torch.equal(actual, run(query, tables, seen, starts))
    for number, (length, part) in enumerate(zip(lengths, query.split(new), strict=True)):
        key = stored(keys, tables[number], length, k_scale)
        value = stored(values, tables[number], length, v_scale)
        exact = oracles.attention(part.double(), key, value, dim**-0.5, window, cap)
        got = actual[int(starts[number]) : int(starts[number + 1])].double()
        # One rounding of the result, and of every weight to 11 or 8 bits.
        unit = 2.0**-11 if dtype == torch.float16 else 2.0**-8
        weight_unit = 2.0**-8 if kind == torch.bfloat16 else 2.0**-10
        allowed = unit * exact.abs() + weight_unit * value.abs().max()
        assert ((got - exact).abs() <= allowed).all()
        # Alone, with the narrowest table: the same bits.
        one = torch.tensor([0, len(part)], dtype=torch.int32, device=DEVICE)
        width = -(-length // 16)
        table = tables[number : number + 1, :width].contiguous()
        alone = run(part.contiguous(), table, seen[number : number + 1], one)
        assert torch.equal(alone.double(), got)


@pytest.mark.parametrize("kind", [E4M3, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (32, 8, 128), (3, 1, 10)])
@pytest.mark.parametrize("norm", [False, True])
def test_append_and_gather(
    heads: int, kv_heads: int, dim: int, kind: torch.dtype, norm: bool
) -> None:
    tokens = 37
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).bfloat16() * 3
    half = torch.randn(2, tokens, dim // 2).bfloat16()
    angles = tuple(torch.cat((half, half), dim=-1))
    norms = tuple((torch.rand(2, dim) + 0.5).bfloat16()) if norm else (None, None)
    scales = (torch.rand(1) * 0.05, torch.rand(kv_heads) * 0.05) if kind == E4M3 else (None, None)
    slots = torch.randperm(64)[:tokens]
    caches = [torch.zeros(4, 16, kv_heads, dim).to(kind) for _ in range(2)]
    on_gpu = [cache.to(DEVICE) for cache in caches]

    def move(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if tensor is None else tensor.to(DEVICE) for tensor in tensors)

    expected = rotary_append(qkv, *norms, 1e-6, angles, *caches, *scales, slots, heads)
    gpu_scales = move(scales)
    actual = rotary_append(
        qkv.to(DEVICE), *move(norms), 1e-6, move(angles), *on_gpu, *gpu_scales, slots.to(DEVICE),
        heads,
    )  # fmt: skip
    # With norms, the mean of squares is summed in another order: a tie may round the other way.
    loose = 0.01 if norm else 0.0
    assert (actual.cpu() != expected).float().mean() <= loose
    for cache, other in zip(on_gpu, caches, strict=True):
        view = torch.uint8 if kind == E4M3 else torch.int16
        assert (cache.cpu().view(view) != other.view(view)).float().mean() <= loose
    blocks = torch.tensor([2, 0, 3], dtype=torch.int32)
    for cache, scale in zip(on_gpu, gpu_scales, strict=True):
        got = kv_gather(cache, scale, blocks.to(DEVICE), 41, torch.bfloat16)
        scale = None if scale is None else scale.cpu()
        assert torch.equal(got.cpu(), kv_gather(cache.cpu(), scale, blocks, 41, torch.bfloat16))


def test_append_saturates() -> None:
    x = torch.tensor([1e5, -1e5, 447.9, 0.001] * 4, device=DEVICE).bfloat16().view(1, 2, 8)
    caches = [torch.zeros(1, 16, 2, 8, device=DEVICE).to(E4M3) for _ in range(2)]
    scale = torch.ones(1, device=DEVICE)
    kv_append(x, x, *caches, scale, scale, torch.tensor([3], device=DEVICE))
    assert caches[0][0, 3].float().abs().max() == 448


@pytest.mark.parametrize("kind", [E4M3, torch.uint8], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 10])
def test_caches_of_codes(kind: torch.dtype, dim: int) -> None:
    """Append, gather and attention, against float64; what is no number is none in the result."""
    name = "e4m3" if kind == E4M3 else "e3m4"
    length, kv_heads, heads = 300, 2, 6
    key, value = torch.randn(2, length, kv_heads, dim, device=DEVICE).bfloat16()
    caches = [torch.zeros(20, 16, kv_heads, dim, device=DEVICE).to(kind) for _ in range(2)]
    scale = torch.full((1,), 0.01 if kind == E4M3 else 0.3, device=DEVICE)
    kv_append(key, value, *caches, scale, scale, torch.arange(length, device=DEVICE))
    blocks = torch.arange(20, dtype=torch.int32, device=DEVICE)
    read = [kv_gather(cache, scale, blocks, length, torch.float32) for cache in caches]
    for got, cache, given in zip(read, caches, (key, value), strict=True):
        codes = cache.view(torch.uint8).flatten(0, 1)[:length]
        assert torch.equal(
            got.double(), (oracles.code_values(codes, name) * scale.double()).float().double()
        )
        # Half a step: 2^-4 of an E4M3, 2^-5 of an E3M4; subnormal ones 2^-10 and 2^-7 of the scale.
        relative, absolute = (2.0**-4, 2.0**-10) if kind == E4M3 else (2.0**-5, 2.0**-7)
        allowed = given.abs().double() * relative + absolute * scale.double() * 1.01
        assert ((got.double() - given.double()).abs() <= allowed).all()
    query = torch.randn(1, heads, dim, device=DEVICE).bfloat16()
    seen = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)

    def run() -> Tensor:
        return paged_attention(query, *caches, scale, scale, blocks[None], seen, starts, dim**-0.5)

    exact = oracles.attention(query.double(), read[0].double(), read[1].double(), dim**-0.5)
    allowed = 2.0**-8 * exact.abs() + 2.0**-10 * read[1].abs().max()
    assert ((run().double() - exact).abs() <= allowed).all()
    caches[1].view(torch.uint8)[2, 3, 0, 5] = 0x7F
    assert run().isnan()[0].nonzero().tolist() == [[0, 5], [1, 5], [2, 5]]
    caches[0].view(torch.uint8)[2, 3, 1, 5] = 0xFF
    assert run()[0, 3:].isnan().all()


@pytest.mark.parametrize("kind", [E4M3, torch.uint8, torch.bfloat16], ids=str)
def test_rotary_append_of_a_part_with_float32_norms(kind: torch.dtype) -> None:
    """The bits of its steps one after another."""
    tokens, heads, kv_heads, dim = 9, 4, 2, 128
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=DEVICE).bfloat16()
    norms = tuple(torch.rand(2, dim, device=DEVICE) + 0.5)
    angles = tuple(torch.randn(2, tokens, 64, device=DEVICE).bfloat16())
    scale = None if kind == torch.bfloat16 else torch.full((1,), 0.3, device=DEVICE)
    slots = torch.arange(tokens, device=DEVICE)
    caches, other = (
        [torch.zeros(1, 16, kv_heads, dim, device=DEVICE).to(kind) for _ in range(2)]
        for _ in range(2)
    )
    actual = rotary_append(qkv, *norms, 1e-6, angles, *caches, scale, scale, slots, heads)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    query, key = (
        rotary(rms_norm(x.contiguous(), norm, 1e-6), *angles)
        for x, norm in zip((query, key), norms, strict=True)
    )
    kv_append(key, value, *other, scale, scale, slots)
    assert torch.equal(actual, query)
    for cache, expected in zip(caches, other, strict=True):
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
