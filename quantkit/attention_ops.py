"""Custom ops of attention: RMS norm, rotary embedding, KV cache append, paged attention.

Schema, fake kernel and a reference kernel in torch for each, in namespace "quantkit"; the C++
kernels, if built, register onto the same names and then win on CPU. In those a token's result is
the same bits whatever else is in the call, and in float32 until one rounding at the end; only in a
matrix unit, which is for bfloat16 queries, do the weights of values have 16 bits. Linear ops
are in `quantkit.ops`. Which sequence owns which block of the cache is decided by the caller.

A cache holds codes together with float32 scales, [1] or [num_kv_heads]: float8_e4m3fn, or uint8,
which means E3M4. Without scales it holds plain values in any float dtype. Its layout is
[num_blocks, block_size, num_kv_heads, head_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import quantkit.extension  # noqa: F401 - adds the C++ kernels
from quantkit.errors import UnsupportedError
from quantkit.numerics import E3M4, E4M3, Format, decode, encode


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight`, the mean over the last dimension.

    float32 inside. The normalized value is rounded to x.dtype *before* the weight is applied, as
    transformers does for most families; a float32 weight of 16-bit x is applied before the one
    rounding, as in Gemma and OLMo 2. Shapes: x [..., features], weight [features], of x.dtype or
    float32 -> like x.
    """
    out: Tensor = torch.ops.quantkit.rms_norm(x.contiguous(), weight, eps)
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + rotary_dim / 2) of every head by its token's angles.

    `x * cos + rotate_half(x) * sin` with rotate_half((a, b)) = (-b, a), every step rounded to
    x.dtype, as transformers does. Features from rotary_dim on stay as they are.

    Shapes: x [num_tokens, heads, head_dim]; cos, sin [num_tokens, rotary_dim], even and at most
    head_dim, both halves of a row the same -> like x.
    """
    out: Tensor = torch.ops.quantkit.rotary(x, cos, sin)
    return out


def kv_append(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
) -> None:
    """Write the keys and values of new tokens into the cache, in place.

    With scales, as codes of `x / scale`, saturating; without, cast to the cache's dtype.

    Shapes: key, value [num_tokens, num_kv_heads, head_dim]; slots int64 [num_tokens], each
    `block * block_size + offset`, all different.
    """
    torch.ops.quantkit.kv_append(key, value, k_cache, v_cache, k_scale, v_scale, slots)


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from the newest tokens of several sequences to everything their caches hold.

    The queries of sequence s are rows query_starts[s] to query_starts[s + 1] and stand at its last
    positions; each sees itself and what is before it, or with a window of w the last w of these.
    Head h reads KV head `h // (heads / num_kv_heads)`. With a `softcap`, above 0, a score is
    `softcap * tanh(q . k * softmax_scale / softcap)`, as in Gemma 2. float32 inside.

    Shapes: query [num_tokens, heads, head_dim]; block_tables int32 [num_sequences, max_blocks],
    the blocks of each sequence in order; lengths int32 [num_sequences], stored tokens including
    the new ones; query_starts int32 [num_sequences + 1] -> like query, contiguous.
    """
    out: Tensor = torch.ops.quantkit.paged_attention(
        query,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        block_tables,
        lengths,
        query_starts,
        softmax_scale,
        sliding_window,
        softcap,
    )
    return out


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Attend within one sequence whose keys are at hand; the queries are its last positions.

    Shapes: query [num_queries, heads, head_dim]; key, value [length, num_kv_heads, head_dim], all
    of one float dtype, which all sums are rounded to -> like query.
    """
    if softcap is not None:
        return _capped_attention(query, key, value, softmax_scale, sliding_window, softcap)
    if query.shape[0] == 1:
        return _single_query(query, key, value, softmax_scale, sliding_window)
    num_queries, length = query.shape[0], key.shape[0]
    mask = None
    if num_queries != length or (sliding_window is not None and sliding_window < length):
        mask = torch.ones(num_queries, length, dtype=torch.bool, device=query.device)
        mask = mask.tril(length - num_queries)
        if sliding_window is not None:
            mask = mask.triu(length - num_queries - sliding_window + 1)
        if query.is_cuda and query.shape[1] != key.shape[1]:
            # With a mask, only torch's slow kernel knows grouped heads there.
            key, value = (
                x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value)
            )
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=softmax_scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float,
) -> Tensor:
    """Attend with capped scores, which torch's own kernels do not know. Shapes as above."""
    num_queries, (length, kv_heads, head_dim) = query.shape[0], key.shape
    grouped = query.reshape(num_queries, kv_heads, -1, head_dim) * softmax_scale
    scores = torch.einsum("qkgd,lkd->kgql", grouped, key).div_(softcap).tanh_().mul_(softcap)
    seen = torch.ones(num_queries, length, dtype=torch.bool, device=query.device)
    seen = seen.tril(length - num_queries)
    if sliding_window is not None:
        seen = seen.triu(length - num_queries - sliding_window + 1)
    weights = scores.masked_fill_(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("kgql,lkd->qkgd", weights, value).reshape(query.shape)


def _single_query(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, sliding_window: int | None
) -> Tensor:
    """Decode step: two batched products over the KV heads, without a mask or repeated heads."""
    if sliding_window is not None:
        key, value = key[-sliding_window:], value[-sliding_window:]
    _, num_kv_heads, head_dim = key.shape
    grouped = query.reshape(num_kv_heads, -1, head_dim) * softmax_scale
    weights = torch.matmul(grouped, key.permute(1, 2, 0)).softmax(dim=-1)
    return torch.matmul(weights, value.transpose(0, 1)).reshape(query.shape)


torch.library.define("quantkit::rms_norm", "(Tensor x, Tensor weight, float eps) -> Tensor")
torch.library.define("quantkit::rotary", "(Tensor x, Tensor cos, Tensor sin) -> Tensor")
torch.library.define(
    "quantkit::kv_append",
    "(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_scale,"
    " Tensor? v_scale, Tensor slots) -> ()",
)
torch.library.define(
    "quantkit::paged_attention",
    "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale,"
    " Tensor block_tables, Tensor lengths, Tensor query_starts, float softmax_scale,"
    " int? sliding_window, float? softcap=None) -> Tensor",
)


@torch.library.impl("quantkit::rms_norm", "default")
def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == torch.float32 and x.dtype != torch.float32:
        return (F.rms_norm(x.float(), (x.shape[-1],), None, eps) * weight).to(x.dtype)
    # Without a weight torch computes in float32 and rounds once; the weight comes after that.
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


@torch.library.impl("quantkit::rotary", "default")
def _rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    half = turned // 2
    # Negating sin's first half instead of x's second is exact, and leaves a plain roll.
    sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    first, rest = x[..., :turned], x[..., turned:]
    out = first * cos.unsqueeze(1) + first.roll(half, dims=-1) * sin.unsqueeze(1)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


@torch.library.impl("quantkit::kv_append", "default")
def _kv_append_reference(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
) -> None:
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        fmt = stored_format("kv_append", cache, scale)
        stored = x if fmt is None else encode(x.float() / _column(scale), fmt)
        # Indexing is not implemented for float8, and needs to know nothing about it.
        _bytes(cache).flatten(0, 1)[slots] = _bytes(stored.to(cache.dtype))


def _paged_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
) -> Tensor:
    if softcap is not None and not softcap > 0:
        raise UnsupportedError(f"paged_attention: softcap must be above 0, got {softcap:f}")
    starts = query_starts.tolist()
    # Scaling the few queries and outputs is equal to scaling all keys and values, and cheaper.
    formats = [
        stored_format("paged_attention", cache, scale)
        for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
    ]
    scaled = query.float() * _per_head(k_scale, query.shape[1])
    out = torch.empty_like(scaled)
    for number, length in enumerate(lengths.tolist()):
        blocks = block_tables[number, : -(-length // k_cache.shape[1])]
        rows = slice(starts[number], starts[number + 1])
        out[rows] = causal_attention(
            scaled[rows],
            _gather(k_cache, blocks, formats[0])[:length],
            _gather(v_cache, blocks, formats[1])[:length],
            softmax_scale,
            sliding_window,
            softcap,
        )
    return (out * _per_head(v_scale, query.shape[1])).to(query.dtype)


torch.library.impl("quantkit::paged_attention", "default")(_paged_attention_reference)


def stored_format(op: str, cache: Tensor, scale: Tensor | None) -> Format | None:
    """Return the format of a cache's codes, None for plain values.

    Raises UnsupportedError unless codes, and only they, have a scale.
    """
    fmt = {E4M3.dtype: E4M3, E3M4.dtype: E3M4}.get(cache.dtype)
    if (scale is None) != (fmt is None):
        dtype = str(cache.dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"{op}: the cache must be float8_e4m3fn or uint8 if and only if there are scales, got "
            f"{dtype}"
        )
    return fmt


def _gather(cache: Tensor, blocks: Tensor, fmt: Format | None) -> Tensor:
    """Return some blocks as float32 [tokens, num_kv_heads, head_dim]; codes without their scale."""
    stored = _bytes(cache).index_select(0, blocks).flatten(0, 1)
    return stored.float() if fmt is None else decode(stored.view(fmt.dtype), fmt)


def _per_head(scale: Tensor | None, heads: int) -> Tensor | float:
    """Return what to multiply by for each query head."""
    if scale is not None and scale.numel() > 1:
        scale = scale.repeat_interleave(heads // scale.numel())
    return _column(scale)


def _column(scale: Tensor | None) -> Tensor | float:
    return 1.0 if scale is None else scale.view(-1, 1)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _like_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _nothing(*_: object) -> None:
    return None


torch.library.register_fake("quantkit::rms_norm", _like_first)
torch.library.register_fake("quantkit::rotary", _like_first)
torch.library.register_fake("quantkit::kv_append", _nothing)
torch.library.register_fake("quantkit::paged_attention", _like_first)
