"""The fused step: the same bits as the ops that it replaces, and clear errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import decoder_ops
from quantkit.decoder_ops import StepLayers, StepLinear, decoder_step
from quantkit.errors import UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.numerics import E3M4, E4M3, encode
from quantkit.outliers import Outliers

REJECTED = (UnsupportedError, RuntimeError)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 72, 96, 6, 2, 24
ONLY_COMPILED = pytest.mark.skipif(not EXTENSION_LOADED, reason="the reference is all there is")


@dataclasses.dataclass
class Case:
    """A random decoder of three layers and the tokens of a step; see `decoder_step`."""

    dtype: torch.dtype
    layers: StepLayers
    caches: list[Tensor]
    counts: list[int]
    lengths: list[int]
    turned: int = HEAD_DIM

    def arguments(self) -> dict[str, Any]:
        tokens = sum(self.counts)
        generator = torch.Generator().manual_seed(7)
        angles = torch.randn(2 * tokens, self.turned, generator=generator).to(self.dtype)
        slots = [
            32 * sequence + at
            for sequence, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True))
            for at in range(length - count, length)
        ]
        starts = [sum(self.counts[:i]) for i in range(len(self.counts) + 1)]
        return {
            "hidden": torch.randn(tokens, HIDDEN, generator=generator).to(self.dtype),
            "layers": self.layers,
            "caches": [cache.clone() for cache in self.caches],
            "final_norm": torch.ones(HIDDEN, dtype=self.dtype),
            "angles": (angles.cos(), angles.sin()),
            "slots": torch.tensor(slots, dtype=torch.int64),
            "block_tables": torch.arange(2 * len(self.counts)).int().view(-1, 2),
            "lengths": torch.tensor(self.lengths).int(),
            "query_starts": torch.tensor(starts).int(),
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "eps": 1e-5,
            "softmax_scale": 0.2,
            "activation": "silu",
        }


def fp8(rows: int, columns: int, group_size: int, bias: bool, outliers: int = 0) -> StepLinear:
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(rows, -(-columns // group_size)) * 0.2
    apart = None
    if outliers:
        numbers = torch.randperm(columns)[:outliers].sort().values.int()
        apart = Outliers(numbers, torch.randn(outliers, rows).bfloat16())
    return StepLinear(codes, scale, torch.randn(rows) if bias else None, group_size, apart)


def make(
    dtype: torch.dtype,
    kv: str = "fp8",
    qk_norm: bool = False,
    dense: bool = False,
    turned: int = HEAD_DIM,
    outliers: int = 0,
    norms: str = "",  # "sandwich": also of what is added, in float32; "after": of that alone
) -> Case:
    torch.manual_seed(0)
    layers, caches = StepLayers(), []
    counts, lengths = [1, 3, 5], [20, 3, 31]
    for number in range(3):
        head_norm = (torch.rand(HEAD_DIM) + 0.5).to(dtype) if qk_norm else None
        hidden_norms = [(torch.rand(HIDDEN) + 0.5).to(dtype) for _ in range(2)]
        query_norm = key_norm = head_norm
        added: list[Tensor] = []
        if norms:
            added = [torch.rand(HIDDEN) + 0.5 for _ in range(2)]
            hidden_norms = [norm.float() for norm in hidden_norms]
        if norms == "after":  # norms of q and k go over all heads
            query_norm, key_norm = (
                torch.rand(count * HEAD_DIM) + 0.5 for count in (HEADS, KV_HEADS)
            )
        qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        out = torch.randn(HIDDEN, HEADS * HEAD_DIM).to(dtype) / 10
        layers.add(
            None if norms == "after" else hidden_norms[0],
            query_norm,
            key_norm,
            None if norms == "after" else hidden_norms[1],
            fp8(qkv, HIDDEN, HIDDEN, bias=number == 1, outliers=outliers),
            StepLinear(out) if dense else fp8(HIDDEN, HEADS * HEAD_DIM, 64, False, outliers),
            fp8(2 * INNER, HIDDEN, 32, bias=False, outliers=outliers),
            fp8(HIDDEN, INNER, INNER, bias=False, outliers=number * outliers),
            8 if number == 2 else None,
            number,  # no rotation, then two sets of angles
            *added,
        )
        stored = torch.randn(2, 2 * len(counts), 16, KV_HEADS, HEAD_DIM)
        if kv == "none":
            caches += [*stored.to(dtype), torch.empty(0), torch.empty(0)]
        else:
            scales = torch.rand(2, KV_HEADS if kv == "fp8-head" else 1) + 0.5
            fmt = E3M4 if kv == "fp8-e3m4" else E4M3
            caches += [*encode(stored, fmt), *scales]
    return Case(dtype, layers, caches, counts, lengths, turned)


def plain(arguments: dict[str, Any]) -> Tensor:
    """Run one op at a time."""
    values = list(arguments.values())
    hidden, layers, caches, norm, angles, *rest = values
    return decoder_ops.decoder_step_reference(
        hidden, layers.weights, caches, layers.numbers, norm, *angles, *rest
    )


@ONLY_COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"kv": "fp8-head"}, {"kv": "fp8-e3m4"}, {"kv": "none"}, {"qk_norm": True}, {"dense": True},
     {"norms": "sandwich", "qk_norm": True}, {"norms": "after"}, {"turned": 10},
     {"outliers": 5}],
    ids=str,
)  # fmt: skip
def test_a_step_is_the_same_bits_as_one_op_at_a_time(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    case = make(dtype, **options)
    fused, single = case.arguments(), case.arguments()
    assert torch.equal(decoder_step(**fused), plain(single))
    for a, b in zip(fused["caches"], single["caches"], strict=True):
        bits = torch.uint8 if a.dtype == torch.float8_e4m3fn else a.dtype
        assert torch.equal(a.view(bits), b.view(bits))


@ONLY_COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv", ["fp8", "none"])
def test_scores_may_be_capped(dtype: torch.dtype, kv: str) -> None:
    case = make(dtype, kv)
    fused, single = case.arguments(), case.arguments()
    fused["softcap"] = single["softcap"] = 2.0
    capped = decoder_step(**fused)
    assert torch.equal(capped, plain(single))
    assert not torch.equal(capped, decoder_step(**case.arguments()))


@ONLY_COMPILED
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_every_activation(activation: str) -> None:
    case = make(torch.float32)
    fused, single = case.arguments(), case.arguments()
    fused["activation"] = single["activation"] = activation
    assert torch.equal(decoder_step(**fused), plain(single))


@ONLY_COMPILED
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_norm": torch.ones(3)}, r"norm must be of shape \[features\] = \[72\], got \[3\]"),
        ({"heads": 7}, "heads must be a multiple of kv_heads, got 7"),
        ({"softcap": -1.0}, "softcap must be above 0, got -1.0"),
        ({"activation": "swish"}, "activation must be .*, got 'swish'"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots must be .* = \[9\], got \[2\]"),
        ({"slots": torch.full((9,), 96)}, "slots must be below 96, got 96"),
        (
            {"lengths": torch.full((3,), 99).int()},
            "block_tables, lengths and query_starts must be within",
        ),
        ({"caches": []}, "weights, caches and numbers must be 26, 4 and 6 a layer, got 78, 0"),
        ({"hidden": torch.randn(9, 64)}, r"norm must be of shape \[features\] = \[64\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_argument_is_named(change: dict[str, Any], message: str) -> None:
    arguments = make(torch.float32).arguments() | change
    with pytest.raises(REJECTED, match=f"decoder_step: {message}"):
        decoder_step(**arguments)


def test_no_tokens_in_no_tokens_out() -> None:
    case = make(torch.float32)
    empty = dataclasses.replace(case, counts=[0, 0, 0])
    assert decoder_step(**empty.arguments()).shape == (0, HIDDEN)
