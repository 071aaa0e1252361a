"""Float64 oracles on the GPU, where the sizes of real models are quick; nothing from quantkit."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tests import reference


def code_values(codes: Tensor, fmt: str) -> Tensor:
    """Return the float64 values of 8-bit codes."""
    table = torch.from_numpy(np.asarray(reference.float8_values(fmt))).to(codes.device)
    return table[codes.view(torch.uint8).long()]


def linear(x: Tensor, codes: Tensor, scale: Tensor, fmt: str, bias: Tensor | None) -> Tensor:
    """Return x @ (codes * scale).T + bias; scale [N, groups]."""
    groups = scale.shape[1]
    size = math.ceil(codes.shape[1] / groups)
    wide = scale.double().repeat_interleave(size, dim=1)[:, : codes.shape[1]]
    y = x.double() @ (code_values(codes, fmt) * wide).T
    return y if bias is None else y + bias.double()


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner))
    return x.clamp(min=0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attend from the last positions of one sequence; all float64 [tokens, heads, dim]."""
    count, length, group = len(query), len(key), query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    position = torch.arange(length - count, length, device=query.device)[:, None]
    other = torch.arange(length, device=query.device)[None]
    hidden = other > position
    if window is not None:
        hidden = hidden | (other <= position - window)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
