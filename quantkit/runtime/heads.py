"""Queries, keys and values of a layer between their projection and attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.attention_ops import rms_norm, rotary
from quantkit.runtime.decoder_layer import DecoderLayer
from quantkit.runtime.shapes import ModelShape


def rotated_heads(
    layer: DecoderLayer, qkv: Tensor, angles: Sequence[tuple[Tensor, Tensor]], shape: ModelShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, as attention reads them: normalized, turned.

    Shapes: qkv [num_tokens, heads + 2 * kv_heads, head_dim] -> its three parts; `angles` are cos
    and sin of each rotation.
    """
    if shape.qk_norm_together:
        qkv = normed_together(layer, qkv, shape)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    per_head = not shape.qk_norm_together
    if per_head and layer.q_norm is not None and layer.k_norm is not None:
        query = rms_norm(query, layer.q_norm, shape.norm_eps)
        key = rms_norm(key, layer.k_norm, shape.norm_eps)
    if layer.rotary is not None:
        turn = angles[layer.rotary]
        query, key = rotary(query, *turn), rotary(key, *turn)
    return query, key, value


def normed_together(layer: DecoderLayer, qkv: Tensor, shape: ModelShape) -> Tensor:
    """Normalize all heads of q, and of k, as one vector a token. Shapes: as qkv."""
    parts = torch.split(qkv.flatten(1), [shape.query_size, *2 * [shape.kv_size]], dim=1)
    norms = (layer.q_norm, layer.k_norm, None)
    normed = [
        part if norm is None else rms_norm(part, norm, shape.norm_eps)
        for part, norm in zip(parts, norms, strict=True)
    ]
    return torch.cat(normed, dim=1).view(qkv.shape)
