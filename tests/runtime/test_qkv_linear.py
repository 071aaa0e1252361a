"""Steps whose q, k and v go straight into the cache have the bits of others, where that is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import qkv_ops
from quantkit.bench.random_weights import LLAMA_3_8B, RandomWeights, random_decoder
from quantkit.qkv_ops import MOST_ROWS, fits
from quantkit.runtime import kv_cache, qkv_linear
from quantkit.runtime.decoder import Decoder

SMALL = replace(
    LLAMA_3_8B, vocab_size=64, hidden_size=64, intermediate_size=64, num_heads=4, num_kv_heads=2,
    head_dim=16, windows=(None, 8, None), rotary=(0, 0, None), qkv_bias=True,
)  # fmt: skip


def new_decoder(quantized: bool = True, **changes: Any) -> Decoder:
    weights = RandomWeights(torch.device("cpu"), torch.bfloat16, quantized)
    decoder = random_decoder(replace(SMALL, **changes), weights, quantized_kv=True)
    decoder._fused = None  # as on a GPU, which runs one op after another
    return decoder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the CPU do what a GPU would; return the rows of every call of the op."""
    counts: list[int] = []
    op: Any = qkv_ops.fp8_qkv_append

    def counted(x: Tensor, *arguments: object) -> Tensor:
        counts.append(len(x))
        query: Tensor = op(x, *arguments)
        return query

    monkeypatch.setattr(kv_cache, "fp8_qkv_append", counted)
    monkeypatch.setattr(qkv_linear, "fused_rows", lambda device: MOST_ROWS)
    return counts


def logits_of(decoder: Decoder, widths: list[list[int]]) -> Tensor:
    """Run steps of so many new tokens of each sequence."""
    made = torch.Generator().manual_seed(0)
    cache = decoder.new_cache(len(widths[0]), 16)
    rows = []
    for counts in widths:
        ids = torch.randint(64, (sum(counts),), generator=made)
        rows.append(decoder.forward(ids, list(range(len(counts))), counts, cache, last_only=False))
    return torch.cat(rows)


def test_equal_bits(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of rows up to the limit, one row more, and several sequences."""
    widths = [[5, 4], [1, 1], [2, 3], [7, 1], [8, 1], [1, 2]]
    decoder = new_decoder()
    got = logits_of(decoder, widths)
    layers = len(SMALL.windows)
    assert calls == [rows for rows in (2, 5, 8, 3) for _ in range(layers)]
    monkeypatch.undo()
    assert torch.equal(got, logits_of(decoder, widths))


@pytest.mark.parametrize("case", ["norms of heads", "plain weights", "odd heads"])
def test_where_it_is_not_done(calls: list[int], case: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "norms of heads": {"qk_norm": True},
        "plain weights": {"quantized": False},
        "odd heads": {"head_dim": 24},
    }
    logits_of(new_decoder(**changes[case]), [[1], [1]])
    assert not calls


def test_not_by_default() -> None:
    """Until a GPU has shown that it is faster."""
    assert qkv_linear.fused_rows(torch.device("cuda")) == 0
    assert qkv_linear.fused_rows(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4096, 1, 4096, 128, 128), True),
        ((4096, 32, 128, 128, 64), True),
        ((4096, 64, 64, 64, 0), True),
        ((4096, 128, 32, 128, 128), False),  # groups shorter than a chunk of 64 columns
        ((4096, 22, 192, 128, 128), False),
        ((4096 + 8, 1, 4104, 128, 128), False),
        ((4096, 1, 4096, 72, 64), False),
        ((4096, 1, 4096, 128, 24), False),
    ],
)
def test_fits(sizes: tuple[int, ...], expected: bool) -> None:
    assert fits(*sizes) == expected
