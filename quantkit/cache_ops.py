"""Custom ops between the q/k/v projection and attention: append to the cache, read from it.

`rotary_append` is what norms of heads, `rotary` and `kv_append` do one after another, with the same
roundings. Schema, fake kernel and a reference kernel for each; the CUDA kernels are in
csrc/cuda/kv_cache.cu. The layout of a cache is told in `attention_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.attention_ops import kv_append, rms_norm, rotary, stored_format
from quantkit.numerics import decode


def rotary_append(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
    heads: int,
) -> Tensor:
    """Normalize and rotate queries and keys, store keys and values, and return the queries.

    Shapes: qkv [num_tokens, heads + 2 * num_kv_heads, head_dim], contiguous; q_norm, k_norm
    [head_dim], or None for no norm; angles cos and sin [num_tokens, rotary_dim], or None for no
    rotation; caches, scales and slots as in `attention_ops.kv_append` -> [num_tokens, heads,
    head_dim].
    """
    cos, sin = angles or (None, None)
    query: Tensor = torch.ops.quantkit.rotary_append(
        qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, k_scale, v_scale, slots, heads
    )
    return query


def kv_gather(
    cache: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the first `length` tokens of a sequence as values: `code * scale`, rounded once.

    Shapes: cache [num_blocks, block_size, num_kv_heads, head_dim]; scale float32 [1] or
    [num_kv_heads], None for a cache of plain values; blocks int32 [n], the sequence's blocks in
    order -> [length, num_kv_heads, head_dim] in `dtype`.
    """
    out: Tensor = torch.ops.quantkit.kv_gather(cache, scale, blocks, length, dtype)
    return out


torch.library.define(
    "quantkit::rotary_append",
    "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? cos, Tensor? sin,"
    " Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_scale, Tensor? v_scale, Tensor slots,"
    " int heads) -> Tensor",
)
torch.library.define(
    "quantkit::kv_gather",
    "(Tensor cache, Tensor? scale, Tensor blocks, int length, ScalarType dtype) -> Tensor",
)


@torch.library.impl("quantkit::rotary_append", "default")
def _rotary_append_reference(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
    heads: int,
) -> Tensor:
    kv_heads = k_cache.shape[2]
    rotated, value = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = torch.split(rotated, [heads, kv_heads], dim=1)
        rotated = torch.cat((rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)), dim=1)
    if cos is not None and sin is not None:
        # Queries and keys turn by the same angles: one op for both.
        rotated = rotary(rotated, cos, sin)
    query, key = torch.split(rotated, [heads, kv_heads], dim=1)
    kv_append(key, value, k_cache, v_cache, k_scale, v_scale, slots)
    return query.clone() if query.data_ptr() == qkv.data_ptr() else query.contiguous()


@torch.library.impl("quantkit::kv_gather", "default")
def _kv_gather_reference(
    cache: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    fmt = stored_format("kv_gather", cache, scale)
    if fmt is None or scale is None:
        return cache.index_select(0, blocks).flatten(0, 1)[:length].to(dtype)
    codes = cache.view(torch.uint8).index_select(0, blocks).flatten(0, 1)[:length]
    return (decode(codes.view(fmt.dtype), fmt) * scale.view(-1, 1)).to(dtype)


def _rotary_append_fake(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
    heads: int,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads, qkv.shape[2])


def _kv_gather_fake(
    cache: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    return cache.new_empty((length, *cache.shape[2:]), dtype=dtype)


torch.library.register_fake("quantkit::rotary_append", _rotary_append_fake)
torch.library.register_fake("quantkit::kv_gather", _kv_gather_fake)
