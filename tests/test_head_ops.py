"""A drafter head's pass in one op: the same bits as the ops that it replaces, and clear errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import head_ops
from quantkit.attention_ops import rms_norm
from quantkit.decoder_ops import StepLayers, StepLinear, apply_linear, decoder_step
from quantkit.errors import UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.head_ops import StepHead, head_step

REJECTED = (UnsupportedError, RuntimeError)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, COLUMNS = 72, 96, 6, 2, 24, 50, 40
ONLY_COMPILED = pytest.mark.skipif(not EXTENSION_LOADED, reason="the reference is all there is")
BATCHES = {
    "one token": ([1], [7]),
    "catching up": ([3], [3]),
    "reading a prompt": ([12], [12]),
    "several": ([1, 1, 1], [20, 1, 31]),
    "several, one catching up": ([2, 1], [17, 9]),
    "several, catching up": ([2, 1, 4, 1], [17, 9, 4, 32]),
    **{f"{rows} rows": ([1] * rows, list(range(3, 3 + rows))) for rows in (2, 4, 8, 9)},
}


def fp8(rows: int, columns: int, group_size: int) -> StepLinear:
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return StepLinear(codes, torch.rand(rows, -(-columns // group_size)) * 0.2, None, group_size)


def arguments(dtype: torch.dtype, counts: list[int], lengths: list[int]) -> dict[str, Any]:
    """A random head and the tokens of a pass; each sequence has 32 slots of the cache."""
    torch.manual_seed(0)

    def norm() -> Tensor:
        return (torch.rand(HIDDEN) + 0.5).to(dtype)

    layer = StepLayers()
    parts = (
        fp8((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, HIDDEN),
        fp8(HIDDEN, HEADS * HEAD_DIM, 64),
        fp8(2 * INNER, HIDDEN, 32),
        fp8(HIDDEN, INNER, INNER),
    )
    layer.add(norm(), None, None, norm(), *parts, None, 1)
    head = StepHead.of(
        (norm(), norm(), norm()),
        fp8(HIDDEN, 2 * HIDDEN, 2 * HIDDEN),
        layer,
        fp8(COLUMNS, HIDDEN, HIDDEN),
    )
    tokens, sequences = sum(counts), len(counts)
    positions = [
        at
        for count, length in zip(counts, lengths, strict=True)
        for at in range(length - count, length)
    ]
    owners = [sequence for sequence, count in enumerate(counts) for _ in range(count)]
    angles = torch.randn(40, HEAD_DIM).to(dtype)
    return {
        "known": torch.randn(tokens, HIDDEN).to(dtype),
        "token_ids": torch.randint(VOCAB, (tokens,)),
        "embedding": torch.randn(VOCAB, HIDDEN).to(dtype),
        "head": head,
        "caches": [
            *torch.randn(2, 2 * sequences, 16, KV_HEADS, HEAD_DIM).to(dtype),
            torch.empty(0),
            torch.empty(0),
        ],
        "angles": (angles.cos(), angles.sin()),
        "positions": torch.tensor(positions),
        "slots": torch.tensor(positions) + 32 * torch.tensor(owners),
        "block_tables": torch.arange(2 * sequences).int().view(-1, 2),
        "lengths": torch.tensor(lengths).int(),
        "query_starts": torch.tensor([0, *torch.tensor(counts).cumsum(0)]).int(),
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "eps": 1e-5,
        "softmax_scale": 0.2,
        "activation": "silu",
    }


def copied(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"caches": [cache.clone() for cache in values["caches"]]}


def reference(values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Run the ops that the op replaces."""
    known, ids, embedding, head, caches, angles, *rest = values.values()
    return head_ops.head_step_reference(
        known, ids, embedding, head.weights, caches, head.numbers, *angles, *rest
    )


def through_decoder_step(values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Run all tokens to the end, and then choose the last of each sequence."""
    weights, numbers = values["head"].weights, values["head"].numbers
    normed = [
        rms_norm(x, weight, values["eps"])
        for x, weight in zip(
            (values["known"], values["embedding"][values["token_ids"]]), weights[:2], strict=True
        )
    ]
    layer = StepLayers(weights[7:33], numbers[2:])
    hidden = decoder_step(
        apply_linear(weights[2:7], numbers[0], torch.cat(normed, -1)),
        layer,
        values["caches"],
        weights[33],
        tuple(table[values["positions"]] for table in values["angles"]),
        *list(values.values())[7:],
    )[values["query_starts"][1:].long() - 1]
    return hidden, apply_linear(weights[34:], numbers[1], hidden, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
@pytest.mark.parametrize("others", [reference, through_decoder_step])
def test_a_pass_is_the_same_bits_as_one_op_at_a_time(
    dtype: torch.dtype, batch: tuple[list[int], list[int]], others: Any
) -> None:
    narrows, rows = len(batch[0]) < sum(batch[0]), sum(batch[0])
    if others is through_decoder_step and narrows and (rows > 3 or not EXTENSION_LOADED):
        pytest.skip("matrix units, and torch's products, give other last bits to more rows")
    values = arguments(dtype, *batch)
    fused, single = copied(values), copied(values)
    hidden, logits = head_step(**fused)
    expected_hidden, expected_logits = others(single)
    assert torch.equal(hidden, expected_hidden)
    assert torch.equal(logits, expected_logits)
    assert logits.dtype == torch.float32
    for ours, theirs in zip(fused["caches"], single["caches"], strict=True):
        assert torch.equal(ours, theirs)


@ONLY_COMPILED
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.full((3,), VOCAB)}, "token_ids must be below 50, got 50"),
        ({"token_ids": torch.zeros(3).int()}, "token_ids must be int64, got int32"),
        ({"positions": torch.full((3,), -1)}, "positions must be below 40, got -1"),
        ({"slots": torch.full((3,), 64)}, "slots must be below 64, got 64"),
        ({"embedding": torch.zeros(VOCAB, 8)}, r"embedding must be .* = \[any, 72\], got"),
        ({"embedding": torch.zeros(VOCAB, HIDDEN).half()}, "embedding must be of x's dtype"),
        ({"caches": []}, "weights, caches and numbers must be 39, 4 and 8, got 39, 0 and 8"),
        ({"query_starts": torch.tensor([0, 0, 3]).int()}, "query_starts must be .*sequence 0"),
        ({"heads": 7}, "heads must be a multiple of kv_heads, got 7"),
        ({"activation": "swish"}, "activation must be .*, got 'swish'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_argument_is_named(change: dict[str, Any], message: str) -> None:
    values = arguments(torch.float32, [2, 1], [9, 4]) | change
    with pytest.raises(REJECTED, match=f"head_step: {message}"):
        head_step(**values)


@ONLY_COMPILED
def test_a_head_has_all_its_norms() -> None:
    values = arguments(torch.float32, [1], [4])
    weights = list(values["head"].weights)
    weights[33] = torch.empty(0)
    values["head"] = dataclasses.replace(values["head"], weights=weights)
    with pytest.raises(REJECTED, match=r"norm must be of shape \[features\] = \[72\], got \[0\]"):
        head_step(**values)


def test_its_fake_kernel_knows_the_shapes() -> None:
    values = arguments(torch.bfloat16, [2, 1], [9, 4])
    known, ids, embedding, head, caches, angles, *rest = values.values()
    inputs = (known, ids, embedding, head.weights, caches, head.numbers, *angles, *rest)
    torch.library.opcheck(
        torch.ops.quantkit.head_step.default, inputs, test_utils=("test_faketensor",)
    )


def test_no_sequences_no_rows() -> None:
    values = arguments(torch.float32, [1], [4])
    empty = {
        name: values[name][:0] for name in ("known", "token_ids", "positions", "slots", "lengths")
    }
    values |= empty
    values |= {"block_tables": values["block_tables"][:0], "query_starts": torch.zeros(1).int()}
    hidden, logits = head_step(**values)
    assert hidden.shape == (0, HIDDEN)
    assert logits.shape == (0, COLUMNS)
