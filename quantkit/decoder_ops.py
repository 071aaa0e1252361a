"""The op that runs all layers of a decoder for a few tokens in one call.

A step of a small model takes a few milliseconds, and calling ten ops for each of its layers from
Python takes as long again. Schema, fake kernel and a reference kernel, which is those ten ops; the
C++ kernel gives the same bits as they do. What the layers mean is in `quantkit.runtime.decoder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from quantkit import dense_ops, ops
from quantkit.attention_ops import kv_append, paged_attention, rms_norm, rotary
from quantkit.outliers import Outliers

MANY_ROWS: Final = 128
"""Tokens beyond which what the op saves is nothing beside what it computes."""


@dataclass(frozen=True, slots=True)
class StepLinear:
    """A linear layer as the op takes it: scale float32 [N, groups], or None for a float weight.

    Outlier columns are those of a weight with a scale.
    """

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    group_size: int = 1
    outliers: Outliers | None = None

    def tensors(self) -> list[Tensor | None]:
        """Return its five tensors, in the op's order."""
        return [self.weight, self.scale, self.bias, *(self.outliers or (None, None))]

    def takes_many_rows(self, dtype: torch.dtype) -> bool:
        """Return whether any number of rows of `dtype` is multiplied as one row is."""
        columns = self.weight.shape[1]
        group_size = max(1, columns) if self.scale is None else self.group_size
        return ops.multiplies_many_rows(
            torch.empty(1, columns, dtype=dtype), self.weight, group_size
        )


@dataclass(slots=True)
class StepLayers:
    """The layers of a decoder, flattened into lists once so that a step has nothing to collect.

    Per layer 26 tensors (an empty one stands for None) and 6 numbers, in the order of `add`.
    """

    weights: list[Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    linears: list[StepLinear] = field(default_factory=list)

    def add(
        self,
        input_norm: Tensor | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        post_norm: Tensor | None,
        qkv: StepLinear,
        out: StepLinear,
        gate_up: StepLinear,
        down: StepLinear,
        window: int | None,
        angles: int,
        attention_norm: Tensor | None = None,
        mlp_norm: Tensor | None = None,
    ) -> None:
        """Append one layer, gate_up holding gate rows first.

        Norms are in front of q/k/v and of the MLP, of what attention and the MLP add, all [hidden],
        and of q and k: [head_dim] for each head, or of all heads together. `angles` is the number
        of the set of angles that turns q and k, from 1; 0 for none.
        """
        none = torch.empty(0)
        flat = [input_norm, *qkv.tensors(), query_norm, key_norm, *out.tensors(), post_norm]
        flat += [*gate_up.tensors(), *down.tensors(), attention_norm, mlp_norm]
        self.weights += [none if tensor is None else tensor for tensor in flat]
        self.linears += (qkv, out, gate_up, down)
        self.numbers += [linear.group_size for linear in (qkv, out, gate_up, down)]
        self.numbers += [window or 0, angles]

    def most_rows(self, dtype: torch.dtype) -> int:
        """Return up to how many tokens of `dtype` the op serves better than those it is made of."""
        many = all(linear.takes_many_rows(dtype) for linear in self.linears)
        return MANY_ROWS if many else ops.FEW_ROWS


def decoder_step(
    hidden: Tensor,
    layers: StepLayers,
    caches: Sequence[Tensor],
    final_norm: Tensor,
    angles: tuple[Tensor, Tensor],
    slots: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    softmax_scale: float,
    activation: str,
    softcap: float | None = None,
) -> Tensor:
    """Run all layers and the final norm: embeddings to what the output head reads.

    The new tokens' keys and values are written into the caches, in place. Rounding as in the ops
    that it replaces: every one of them returns hidden's dtype.

    Shapes: hidden [num_tokens, hidden_size]; caches, four for each layer: keys and values, float32
    scales or empty tensors, see `quantkit.attention_ops`, as for all that points into them; angles
    cos and sin [sets * num_tokens, rotary_dim], all tokens of a set together; activation a key of
    `gate_ops.ACTIVATIONS`; softcap as for `paged_attention` -> like hidden. All in hidden's dtype
    but codes, scales, and the weights of norms, which may be float32 (see `rms_norm`).
    """
    out: Tensor = torch.ops.quantkit.decoder_step(
        hidden,
        layers.weights,
        caches,
        layers.numbers,
        final_norm,
        *angles,
        slots,
        block_tables,
        lengths,
        query_starts,
        heads,
        kv_heads,
        eps,
        softmax_scale,
        activation,
        softcap,
    )
    return out


torch.library.define(
    "quantkit::decoder_step",
    "(Tensor hidden, Tensor[] weights, Tensor(a!)[] caches, int[] numbers, Tensor final_norm,"
    " Tensor cos, Tensor sin, Tensor slots, Tensor block_tables, Tensor lengths,"
    " Tensor query_starts, int heads, int kv_heads, float eps, float softmax_scale,"
    " str activation, float? softcap) -> Tensor",
)


def _outliers(columns: Tensor, weight: Tensor) -> Outliers | None:
    return Outliers(columns, weight) if columns.numel() else None


def apply_linear(
    linear: Sequence[Tensor], group_size: int, x: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return y of a linear given by its five tensors, see `StepLinear`, in `dtype` or x's."""
    weight, scale, bias, *outliers = linear
    maybe_bias = bias if bias.numel() else None
    if scale.numel() == 0:
        return dense_ops.linear(x, weight, maybe_bias, dtype)
    apart = _outliers(*outliers)
    return ops.fp8_linear(x, weight, scale, maybe_bias, group_size, dtype, apart)


def apply_gated(linear: Sequence[Tensor], group_size: int, x: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up of a linear given by its five tensors."""
    weight, scale, bias, *outliers = linear
    maybe_bias = bias if bias.numel() else None
    if scale.numel() == 0:
        return dense_ops.gated_linear(x, weight, maybe_bias, activation)
    apart = _outliers(*outliers)
    return ops.fp8_gated_linear(x, weight, scale, maybe_bias, group_size, activation, apart)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps) if weight.numel() else x


def store_projections(
    hidden: Tensor,
    layer: Sequence[Tensor],
    numbers: Sequence[int],
    cache: Sequence[Tensor],
    turn: Sequence[Tensor] | None,
    slots: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Tensor:
    """Store keys and values of one layer, given by its 26 tensors and 6 numbers; return queries.

    Shapes: hidden [num_tokens, hidden_size]; turn cos and sin of all tokens, or None ->
    [num_tokens, heads, head_dim]. The others are those of `decoder_step`.
    """
    keys, values, *both = cache
    k_scale, v_scale = (scale if scale.numel() else None for scale in both)
    head_dim = keys.shape[-1]
    qkv = apply_linear(layer[1:6], numbers[0], _normed(hidden, layer[0], eps))
    by_head = qkv.view(hidden.shape[0], heads + 2 * kv_heads, head_dim)
    parts = torch.split(by_head, [heads, kv_heads, kv_heads], dim=1)
    query, key = (
        _normed(part.reshape(-1, norm.numel() or head_dim), norm, eps).view(part.shape)
        for part, norm in zip(parts[:2], layer[6:8], strict=True)
    )
    if turn is not None:
        query, key = rotary(query, *turn), rotary(key, *turn)
    kv_append(key, parts[2], keys, values, k_scale, v_scale, slots)
    return query


def attend_and_mix(
    hidden: Tensor,
    query: Tensor,
    layer: Sequence[Tensor],
    numbers: Sequence[int],
    cache: Sequence[Tensor],
    batch: tuple[Tensor, Tensor, Tensor],
    eps: float,
    softmax_scale: float,
    activation: str,
    softcap: float | None = None,
) -> Tensor:
    """Return what a layer makes of `hidden` once its keys and values are stored.

    `batch` is block_tables, lengths and query_starts of `decoder_step`.
    """
    keys, values, *both = cache
    k_scale, v_scale = (scale if scale.numel() else None for scale in both)
    window = numbers[4] or None
    attended = paged_attention(
        query, keys, values, k_scale, v_scale, *batch, softmax_scale, window, softcap
    )
    added = apply_linear(layer[8:13], numbers[1], attended.flatten(1))
    hidden = hidden + _normed(added, layer[24], eps)
    inner = apply_gated(layer[14:19], numbers[2], _normed(hidden, layer[13], eps), activation)
    return hidden + _normed(apply_linear(layer[19:24], numbers[3], inner), layer[25], eps)


def decoder_step_reference(
    hidden: Tensor,
    weights: Sequence[Tensor],
    caches: Sequence[Tensor],
    numbers: Sequence[int],
    final_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    softmax_scale: float,
    activation: str,
    softcap: float | None = None,
) -> Tensor:
    """Run one op after another; the op's arguments, see `decoder_step`."""
    tokens, batch = hidden.shape[0], (block_tables, lengths, query_starts)
    for number in range(len(numbers) // 6):
        layer = weights[26 * number : 26 * number + 26]
        own, cache = numbers[6 * number :][:6], caches[4 * number : 4 * number + 4]
        angles = slice((own[5] - 1) * tokens, own[5] * tokens)
        turn = [x[angles] for x in (cos, sin)] if own[5] else None
        query = store_projections(hidden, layer, own, cache, turn, slots, heads, kv_heads, eps)
        hidden = attend_and_mix(
            hidden, query, layer, own, cache, batch, eps, softmax_scale, activation, softcap
        )
    return rms_norm(hidden, final_norm, eps)


def _decoder_step_fake(hidden: Tensor, *_: object) -> Tensor:
    return torch.empty_like(hidden)


torch.library.impl("quantkit::decoder_step", "default")(decoder_step_reference)
torch.library.register_fake("quantkit::decoder_step", _decoder_step_fake)
