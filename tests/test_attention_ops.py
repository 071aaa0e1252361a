"""Norm, rotary embedding, cache append and paged attention against the float64 oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.attention_ops import kv_append, paged_attention, rms_norm, rotary
from quantkit.errors import UnsupportedError
from quantkit.row_ops import add_rms_norm
from tests import reference

# C++ kernels raise through torch, which has one exception type for all.
REJECTED = (UnsupportedError, RuntimeError)
BLOCK = 4
KV_HEADS = 2
HEADS = 6
HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5


def float64(x: Tensor) -> reference.Float64:
    return x.double().numpy()


def codes_of(x: Tensor) -> reference.Codes:
    return x.view(torch.uint8).numpy()


@pytest.mark.parametrize("shape", [(0, 16), (1, 7), (3, 576), (2, 5, 24)])
def test_rms_norm_matches_the_oracle(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 30, torch.rand(shape[-1]) + 0.5
    expected = reference.rms_norm(float64(x), float64(weight), 1e-5)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_weight_is_applied_before_the_rounding(dtype: torch.dtype) -> None:
    """Gemma's and OLMo 2's norms: their modules are the oracle."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    x, delta, weight = torch.randn(7, 72).to(dtype), torch.randn(7, 72).to(dtype), torch.rand(72)
    gemma, olmo = Gemma3RMSNorm(72), Olmo2RMSNorm(72)
    gemma.weight.data, olmo.weight.data = weight.to(dtype), weight.to(dtype)
    # The mean of squares may differ in its last bit, and one in some thousand roundings with it.
    for module, ours in ((gemma, 1 + gemma.weight.float()), (olmo, olmo.weight.float())):
        total, normed = add_rms_norm(x, delta, ours.detach(), 1e-6)
        assert torch.equal(total, x + delta)
        for found, given in ((rms_norm(x, ours.detach(), 1e-6), x), (normed, total)):
            expected = module(given)
            unequal = found != expected
            assert unequal.float().mean() < 0.01
            assert torch.allclose(found.float(), expected.float(), rtol=2 * torch.finfo(dtype).eps)


def test_rms_norm_rounds_before_the_weight_as_transformers_does() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = (torch.randn(9, 64) * 1000).bfloat16()
    module = LlamaRMSNorm(64, eps=1e-6)
    module.weight.data = torch.rand(64).bfloat16()
    assert torch.equal(rms_norm(x, module.weight.data, 1e-6), module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [2, 6, 12, 24, 36, 40])
def test_rotary_turns_the_first_features_only(dtype: torch.dtype, turned: int) -> None:
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    x = torch.randn(5, 3, 40).to(dtype)
    cos, sin = torch.randn(2, 5, turned // 2).repeat(1, 1, 2).to(dtype)
    heads_first = x.transpose(0, 1).unsqueeze(0)
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])
    assert torch.equal(rotary(x, cos, sin), expected[0].transpose(0, 1))


@pytest.mark.parametrize("start", [0, 1000])
def test_rotary_matches_the_oracle(start: int) -> None:
    x = torch.randn(5, 3, HEAD_DIM)
    positions = torch.arange(start, start + 5)
    frequencies = 1 / 100.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[:, None] * frequencies.double()).repeat(1, 2)
    out = rotary(x, angles.cos().float(), angles.sin().float())
    expected = reference.rotary(float64(x), positions.numpy(), float64(frequencies))
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_takes_heads_that_are_a_slice_of_a_wider_row(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    wide = torch.randn(5, 4, HEAD_DIM).to(dtype)
    cos, sin = torch.randn(2, 5, HEAD_DIM).to(dtype)
    cos, sin = (torch.cat((x[:, :4], x[:, :4]), dim=1) for x in (cos, sin))
    out = rotary(wide[:, :3], cos, sin)
    heads_first = wide[:, :3].transpose(0, 1).unsqueeze(0)
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])
    assert torch.equal(out, expected[0].transpose(0, 1))


def scales(kind: str) -> tuple[Tensor, Tensor]:
    if kind == "tensor":
        return torch.tensor([2.0**-6]), torch.tensor([2.0**-5 * 1.25])
    return torch.tensor([2.0**-7, 2.0**-5]), torch.tensor([2.0**-6, 2.0**-4])


def empty_cache(dtype: torch.dtype, blocks: int = 9) -> Tensor:
    """A cache full of NaN, so that reading what was never written shows."""
    shape = (blocks, BLOCK, KV_HEADS, HEAD_DIM)
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("kind", ["tensor", "head"])
def test_append_stores_saturated_codes_at_their_slots_only(kind: str) -> None:
    key, value = torch.randn(2, 5, KV_HEADS, HEAD_DIM) * 4
    key[0, 0, 0], value[1, 1, 1], key[2, 0, 1] = 1e6, -torch.inf, -0.0
    k_cache, v_cache = empty_cache(torch.float8_e4m3fn), empty_cache(torch.float8_e4m3fn)
    k_scale, v_scale = scales(kind)
    slots = torch.tensor([7, 0, 35, 12, 13])
    kv_append(key, value, k_cache, v_cache, k_scale, v_scale, slots)
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        stored = codes_of(cache).reshape(-1, KV_HEADS, HEAD_DIM)
        expected = reference.float8_encode(float64(x / scale.view(-1, 1)), "e4m3")
        np.testing.assert_array_equal(stored[slots.numpy()], expected)
        untouched = np.delete(stored, slots.numpy(), axis=0)
        assert (untouched == 0x7F).all()


def test_append_without_scales_stores_the_values() -> None:
    key, value = torch.randn(2, 3, KV_HEADS, HEAD_DIM).bfloat16()
    k_cache, v_cache = empty_cache(torch.bfloat16), empty_cache(torch.bfloat16)
    slots = torch.tensor([3, 4, 5])
    kv_append(key, value, k_cache, v_cache, None, None, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], key)
    assert torch.equal(v_cache.flatten(0, 1)[slots], value)


TABLES = [[5, 2, 7], [0], [3, 8, 1, 6]]
LENGTHS = [9, 4, 13]


def random_codes() -> Tensor:
    """Every code but NaN, in blocks that no sequence owns too."""
    codes = torch.randint(0, 256, (9, BLOCK, KV_HEADS, HEAD_DIM), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01
    return codes.view(torch.float8_e4m3fn)


def attend(
    query: Tensor, k: Tensor, v: Tensor, pair: tuple[Tensor, Tensor] | None, new: list[int],
    window: int | None,
) -> Tensor:  # fmt: skip
    k_scale, v_scale = pair or (None, None)
    tables = torch.zeros(len(TABLES), 4, dtype=torch.int32)
    for row, table in enumerate(TABLES):
        tables[row, : len(table)] = torch.tensor(table)
    starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return paged_attention(
        query, k, v, k_scale, v_scale, tables, lengths, starts, SCALE, window
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 4, 3], [9, 2, 13]], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "head", "none"])
def test_paged_attention_matches_the_oracle(kind: str, new: list[int], window: int | None) -> None:
    query = torch.randn(sum(new), HEADS, HEAD_DIM)
    if kind == "none":
        pair = None
        k, v = torch.randn(2, 9, BLOCK, KV_HEADS, HEAD_DIM)
        key, value = float64(k), float64(v)
    else:
        pair = scales(kind)
        k, v = random_codes(), random_codes()
        table = reference.float8_values("e4m3")
        key, value = (
            table[codes_of(codes)] * float64(scale).reshape(-1, 1)
            for codes, scale in ((k, pair[0]), (v, pair[1]))
        )
    out = attend(query, k, v, pair, new, window)
    expected = [
        reference.attention(
            rows, reference.paged(key, blocks, n), reference.paged(value, blocks, n), SCALE, window
        )
        for rows, blocks, n in zip(
            np.split(float64(query), np.cumsum(new)[:-1]), TABLES, LENGTHS, strict=True
        )
    ]
    # Values reach 448 * 2^-4; float32 sums of some ten of them.
    np.testing.assert_allclose(out.numpy(), np.concatenate(expected), atol=1e-4)


def test_attention_of_a_sequence_does_not_depend_on_its_neighbours() -> None:
    k, v = random_codes(), random_codes()
    query = torch.randn(8, HEADS, HEAD_DIM)
    together = attend(query, k, v, scales("head"), [1, 4, 3], None)
    k_other, v_other = k.clone(), v.clone()
    for cache in (k_other, v_other):
        cache.view(torch.uint8)[TABLES[0] + TABLES[1]] = 0x7E  # 448 everywhere
    query[:5] *= 1000
    other = attend(query, k_other, v_other, scales("head"), [1, 4, 3], None)
    assert torch.equal(together[5:], other[5:])
    assert not torch.equal(together[:5], other[:5])


def test_attention_rejects_codes_without_scales() -> None:
    with pytest.raises(
        REJECTED, match="float8_e4m3fn or uint8 if and only if there are scales, got fl"
    ):
        attend(
            torch.randn(3, HEADS, HEAD_DIM), random_codes(), random_codes(), None, [1, 1, 1], None
        )


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "kv_append", "paged_attention"])
def test_schema_and_fake_kernel_agree_with_the_kernel(name: str) -> None:
    # Plain caches: the checker adds NaN-safe arithmetic that torch lacks for float8.
    x, row = torch.randn(3, HEADS, HEAD_DIM), torch.randn(3, HEAD_DIM)
    k, v = torch.randn(2, 9, BLOCK, KV_HEADS, HEAD_DIM)
    tables = torch.tensor(TABLES[:1], dtype=torch.int32)
    lengths, starts = (torch.tensor(y, dtype=torch.int32) for y in ([9], [0, 3]))
    key, value = torch.randn(2, 3, KV_HEADS, HEAD_DIM)
    arguments = {
        "rms_norm": (x, torch.rand(HEAD_DIM), 1e-5),
        "rotary": (x, row, row),
        "kv_append": (key, value, k, v, None, None, torch.tensor([1, 2, 3])),
        "paged_attention": (x, k, v, None, None, tables, lengths, starts, SCALE, None),
    }[name]
    op = getattr(torch.ops.quantkit, name).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
