"""A custom op for few tokens: from what q, k and v read to queries, keys and values in the cache.

It is `ops.fp8_linear` and `cache_ops.rotary_append` (without norms of heads) one after another,
with the same roundings; the CUDA kernel (csrc/cuda/qkv_linear.cu) does both at once. Schema, fake
kernel and a reference kernel.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quantkit import cache_ops, ops  # noqa: F401 - the ops that the reference kernel calls

MOST_ROWS: Final = 8
"""Tokens of one call, at most; so many take part in one matrix instruction."""
TILE: Final = 16
"""Heads, and what turns of them, must be multiples of this."""


def fp8_qkv_append(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    angles: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
    heads: int,
) -> Tensor:
    """Multiply by q, k and v, rotate queries and keys, store keys and values, return the queries.

    Shapes: x, weight, weight_scale and bias as in `ops.fp8_linear`, the weight's rows being those
    of all query heads, key heads and value heads; the rest as in `cache_ops.rotary_append` ->
    [num_tokens, heads, head_dim]. Call it for what `fits` says it is for.
    """
    cos, sin = angles or (None, None)
    weights = (weight, weight_scale, bias, group_size)
    caches = (k_cache, v_cache, k_scale, v_scale)
    query: Tensor = torch.ops.quantkit.fp8_qkv_append(x, *weights, cos, sin, *caches, slots, heads)
    return query


def fits(columns: int, groups: int, group_size: int, head_dim: int, rotary_dim: int) -> bool:
    """Return whether the kernel can do it, for up to MOST_ROWS tokens of 16 bits.

    As `fits_qkv_linear` of csrc/cuda/qkv_linear_dispatch.h, which refuses all else.
    """
    whole = groups == 1 or (group_size >= 64 and group_size & (group_size - 1) == 0)
    return whole and not any(size % TILE for size in (columns, head_dim, rotary_dim))


torch.library.define(
    "quantkit::fp8_qkv_append",
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int group_size, Tensor? cos,"
    " Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_scale, Tensor? v_scale,"
    " Tensor slots, int heads) -> Tensor",
)


@torch.library.impl("quantkit::fp8_qkv_append", "default")
def _fp8_qkv_append_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
    heads: int,
) -> Tensor:
    qkv = torch.ops.quantkit.fp8_linear(x, weight, weight_scale, bias, group_size)
    qkv = qkv.view(len(x), -1, k_cache.shape[3])
    caches = (k_cache, v_cache, k_scale, v_scale)
    query: Tensor = torch.ops.quantkit.rotary_append(
        qkv, None, None, 0.0, cos, sin, *caches, slots, heads
    )
    return query


def _fp8_qkv_append_fake(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
    heads: int,
) -> Tensor:
    return x.new_empty(x.shape[0], heads, k_cache.shape[3])


torch.library.register_fake("quantkit::fp8_qkv_append", _fp8_qkv_append_fake)
