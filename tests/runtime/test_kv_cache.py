"""The paged cache: which blocks a sequence gets, keeps and gives back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.errors import CheckpointError, GenerationError
from quantkit.runtime.kv_cache import BLOCK_SIZE, CacheLayout, CacheStep, PagedCache

HEADS, HEAD_DIM = 2, 8


def layout(kv: str = "none", layers: int = 1) -> CacheLayout:
    pair = (torch.tensor([2.0**-6]), torch.tensor([2.0**-5, 2.0**-7]))
    return CacheLayout(
        num_layers=layers,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        scales=(pair,) * layers if kv == "fp8" else None,
    )


def append(cache: PagedCache, layer: int, key: Tensor, value: Tensor, step: CacheStep) -> None:
    """Store keys and values as they are: without norms and rotation."""
    cache.append_rotary(
        layer, torch.cat((key, key, value), 1), (None, None, 0.0), None, step, HEADS
    )


def add(cache: PagedCache, sequences: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
    """Append random tokens in all layers; return keys and values as given."""
    step = cache.plan(sequences, counts)
    key, value = torch.randn(2, sum(counts), HEADS, HEAD_DIM)
    for layer in range(cache.layout.num_layers):
        append(cache, layer, key, value, step)
    cache.commit(step)
    return key, value


def newest(cache: PagedCache, sequence: int, seed: int = 3) -> Tensor:
    """Return what a fixed query sees in a sequence, after adding one fixed token to it."""
    step = cache.plan([sequence], [1])
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 1, HEADS, HEAD_DIM, generator=generator)
    append(cache, 0, key, value, step)
    return cache.attend(0, query, step, HEAD_DIM**-0.5, None)


def test_a_step_says_where_packed_tokens_go() -> None:
    cache = PagedCache(layout(), 3, 40)
    add(cache, [0, 2], [3, 17])
    step = cache.plan([2, 0], [2, 1])
    assert step.positions.tolist() == [17, 18, 3]
    assert step.lengths.tolist() == [19, 4]
    assert step.query_starts.tolist() == [0, 2, 3]
    assert step.last_rows == (1, 2)
    blocks = step.block_tables[0].tolist()
    assert step.slots.tolist()[:2] == [blocks[1] * BLOCK_SIZE + 1, blocks[1] * BLOCK_SIZE + 2]
    assert cache.lengths == [3, 0, 17]  # until the step is committed


def test_no_two_sequences_own_a_block() -> None:
    cache = PagedCache(layout(), 4, 16)
    for counts in ([1, 16, 17, 5], [40, 1, 1, 90], [1, 1, 1, 1]):
        add(cache, [0, 1, 2, 3], counts)
    owned = [block for blocks in cache._owned for block in blocks]
    assert len(owned) == len(set(owned))
    assert len(owned) + cache.num_free_blocks == cache.num_blocks
    for sequence, length in enumerate(cache.lengths):
        blocks = cache._owned[sequence]
        assert len(blocks) == -(-length // BLOCK_SIZE)
        assert cache._tables[sequence, : len(blocks)].tolist() == blocks


@pytest.mark.parametrize("kv", ["none", "fp8"])
def test_growing_keeps_what_is_stored(kv: str) -> None:
    roomy, tight = PagedCache(layout(kv, 2), 2, 400), PagedCache(layout(kv, 2), 2, 1)
    for cache in (roomy, tight):
        torch.manual_seed(0)
        add(cache, [0, 1], [10, 3])
        for _ in range(4):
            add(cache, [0, 1], [50, 7])
    assert tight.num_blocks > 2
    assert torch.equal(newest(roomy, 0), newest(tight, 0))
    assert torch.equal(newest(roomy, 1), newest(tight, 1))


@pytest.mark.parametrize("kv", ["none", "fp8"])
def test_truncating_and_refilling_equals_never_having_stored_the_rest(kv: str) -> None:
    straight, rolled = PagedCache(layout(kv), 1, 4), PagedCache(layout(kv), 1, 4)
    add(rolled, [0], [30])
    rolled.truncate(0, 0)
    for cache in (straight, rolled):
        torch.manual_seed(5)
        add(cache, [0], [20])
    add(rolled, [0], [15])
    rolled.truncate(0, 20)
    assert rolled.lengths == [20]
    assert torch.equal(newest(straight, 0), newest(rolled, 0))


def test_released_blocks_serve_another_sequence() -> None:
    cache = PagedCache(layout(), 2, 64)
    add(cache, [0, 1], [60, 60])
    blocks = cache.num_blocks
    assert cache.num_free_blocks == 0
    cache.release(0)
    assert cache.lengths == [0, 60]
    add(cache, [1], [60])
    assert cache.num_blocks == blocks
    add(cache, [0], [5])  # a released sequence may be used again
    assert cache.lengths == [5, 120]


@pytest.mark.parametrize("length", [-1, 6])
def test_truncating_beyond_what_is_stored_is_refused(length: int) -> None:
    cache = PagedCache(layout(), 1, 8)
    add(cache, [0], [5])
    with pytest.raises(
        GenerationError, match=f"holds 5 tokens and cannot be truncated to {length}"
    ):
        cache.truncate(0, length)


def test_fp8_takes_one_byte_per_value() -> None:
    cache = PagedCache(layout("fp8"), 1, 100)
    assert cache._keys[0].dtype == torch.float8_e4m3fn
    assert cache._keys[0].nbytes == 7 * BLOCK_SIZE * HEADS * HEAD_DIM


def test_a_scale_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match="v_scale of layer 0 has 3 elements, expected 1 or 2"):
        CacheLayout(
            num_layers=1,
            num_kv_heads=2,
            head_dim=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
            scales=((torch.ones(1), torch.ones(3)),),
        )
