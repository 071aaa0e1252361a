"""The op that runs a pass of a drafter head in one call: from tokens to logits of what may follow.

A pass takes less than a millisecond, and its ops one by one as long again. Schema, fake kernel and
a reference kernel, which is those ops; the C++ kernel gives the same bits as they do. What a head
means is in `quantkit.speculative.head_drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.attention_ops import rms_norm
from quantkit.decoder_ops import (
    StepLayers,
    StepLinear,
    apply_linear,
    attend_and_mix,
    store_projections,
)


@dataclass(frozen=True, slots=True)
class StepHead:
    """A drafter head, flattened once so that a pass has nothing to collect.

    39 tensors, an empty one standing for None, and 8 numbers.
    """

    weights: list[Tensor]
    numbers: list[int]

    @classmethod
    def of(
        cls,
        norms: tuple[Tensor, Tensor, Tensor],
        input_: StepLinear,
        layer: StepLayers,
        output: StepLinear,
    ) -> StepHead:
        """Return one of its parts, of which `layer` holds a single one.

        `norms` are those of what is known, of tokens, and before the output, [hidden] each.
        """
        known, token, final = norms
        none = torch.empty(0)
        flat = [known, token, *input_.tensors(), *layer.weights, final, *output.tensors()]
        return cls(
            [none if tensor is None else tensor for tensor in flat],
            [input_.group_size, output.group_size, *layer.numbers],
        )


def head_step(
    known: Tensor,
    token_ids: Tensor,
    embedding: Tensor,
    head: StepHead,
    caches: Sequence[Tensor],
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    softmax_scale: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Store all tokens' keys and values; return hidden states and logits after the last of each.

    Every sequence has new tokens. Rounding as in the ops that it replaces: every one of them
    returns the dtype of `known`, but for the logits.

    Shapes: known [num_tokens, hidden_size], what the target knew before each token; token_ids and
    positions int64 [num_tokens]; embedding [vocab, hidden_size]; caches, angles and what follows as
    for `decoder_step`, but that angles are tables by position -> [num_sequences, hidden_size],
    float32 [num_sequences, columns]: products of the output, which no rule has changed.
    """
    result: tuple[Tensor, Tensor] = torch.ops.quantkit.head_step(
        known,
        token_ids,
        embedding,
        head.weights,
        caches,
        head.numbers,
        *angles,
        positions,
        slots,
        block_tables,
        lengths,
        query_starts,
        heads,
        kv_heads,
        eps,
        softmax_scale,
        activation,
    )
    return result


torch.library.define(
    "quantkit::head_step",
    "(Tensor known, Tensor token_ids, Tensor embedding, Tensor[] weights, Tensor(a!)[] caches,"
    " int[] numbers, Tensor cos, Tensor sin, Tensor positions, Tensor slots, Tensor block_tables,"
    " Tensor lengths, Tensor query_starts, int heads, int kv_heads, float eps,"
    " float softmax_scale, str activation) -> (Tensor, Tensor)",
)


def head_step_reference(
    known: Tensor,
    token_ids: Tensor,
    embedding: Tensor,
    weights: Sequence[Tensor],
    caches: Sequence[Tensor],
    numbers: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    softmax_scale: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Run one op after another; the op's arguments, see `head_step`."""
    layer, (input_group, output_group, *own) = weights[7:33], numbers
    token = rms_norm(embedding[token_ids], weights[1], eps)
    joint = torch.cat((rms_norm(known, weights[0], eps), token), dim=-1)
    hidden = apply_linear(weights[2:7], input_group, joint)
    turn = [table.index_select(0, positions) for table in (cos, sin)] if own[5] else None
    query = store_projections(hidden, layer, own, caches, turn, slots, heads, kv_heads, eps)
    if len(lengths) < len(known):
        last = query_starts[1:].long() - 1
        hidden, query = hidden[last], query[last]
        query_starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=known.device)
    batch = (block_tables, lengths, query_starts)
    hidden = attend_and_mix(
        hidden, query, layer, own, caches, batch, eps, softmax_scale, activation
    )
    hidden = rms_norm(hidden, weights[33], eps)
    return hidden, apply_linear(weights[34:], output_group, hidden, torch.float32)


def _head_step_fake(
    known: Tensor,
    token_ids: Tensor,
    embedding: Tensor,
    weights: Sequence[Tensor],
    *rest: object,
) -> tuple[Tensor, Tensor]:
    lengths = rest[7]
    assert isinstance(lengths, Tensor)
    rows = len(lengths)
    logits = known.new_empty(rows, len(weights[34]), dtype=torch.float32)
    return known.new_empty(rows, known.shape[1]), logits


torch.library.impl("quantkit::head_step", "default")(head_step_reference)
torch.library.register_fake("quantkit::head_step", _head_step_fake)
