"""The drafter head for training: all positions of a text and several drafting steps at once.

Computes what `head_drafter` does, in plain differentiable torch. In step 1 every entry is made from
the target's states; in step k from the guess of step k - 1 at the position before, so that the head
learns to go on from its own guesses, as it must when it drafts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.speculative.head_weights import (
    MATRICES,
    NORMS,
    HeadShape,
    Weights,
    rotation_frequencies,
)

KeysValues = tuple[Tensor, Tensor]
"""[batch, kv_heads, positions, head_dim] each."""


class HeadModel(nn.Module):
    """A head whose parameters bear the names of `head_weights`."""

    def __init__(self, shape: HeadShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        for name, size in shape.shapes().items():
            if name in NORMS:
                value = torch.ones(size)
            else:
                value = torch.randn(size, generator=generator) * 0.02
            self.register_parameter(name, nn.Parameter(value))
        # It begins by handing on what the target knew.
        with torch.no_grad():
            self.get_parameter("input")[:, : shape.hidden_size] += torch.eye(shape.hidden_size)

    def weights(self) -> Weights:
        """Return the parameters as they are now."""
        names = (*MATRICES, *NORMS)
        return {name: self.get_parameter(name).detach().clone() for name in names}

    def unroll(self, known: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
        """Return the guesses of each drafting step, as if every draft were right.

        Entry j guesses the target's state after token j. In step k only entries from j = k - 1 on
        mean anything.
        Shapes: known, the target's state before each token, and tokens, their embeddings, both
        [batch, positions, hidden_size] -> `steps` times the same.
        """
        guesses: list[Tensor] = []
        past: list[KeysValues] = []
        for _ in range(steps):
            if guesses:
                known = F.pad(guesses[-1], (0, 0, 1, 0))[:, :-1]
            guesses.append(self._step(known, tokens, past))
        return guesses

    def _step(self, known: Tensor, tokens: Tensor, past: list[KeysValues]) -> Tensor:
        """Run the layer once over all positions; append its keys and values to `past`."""
        both = torch.cat((self._norm("hidden_norm", known), self._norm("token_norm", tokens)), -1)
        hidden = F.linear(both, self.get_parameter("input"))
        hidden = hidden + self._attention(self._norm("input_norm", hidden), past)
        gate, up = self._linear("gate_up", self._norm("post_norm", hidden)).chunk(2, dim=-1)
        hidden = hidden + self._linear("down", F.silu(gate) * up)
        return self._norm("norm", hidden)

    def _attention(self, x: Tensor, past: list[KeysValues]) -> Tensor:
        """Attend from each entry to those before it, as they are when it is drafted.

        The entry of step k at position j sees entries of step 1 up to j - k + 1, then one of each
        later step, its own last.
        """
        shape, (batch, length, _) = self.shape, x.shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = self._linear("qkv", x).view(batch, length, -1, shape.head_dim).transpose(1, 2)
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        past.append((_rotate(key, shape), value))
        query = _rotate(query, shape) * shape.head_dim**-0.5
        seen = [_for_queries(pair, heads // kv_heads) for pair in past]
        step = len(seen)
        first_keys, first_values = seen[0]
        positions = torch.arange(length, device=x.device)
        hidden = positions[None, :] > positions[:, None] - (step - 1)
        scores = (query @ first_keys.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        later = [_shift(keys, step - 1 - k) for k, (keys, _) in enumerate(seen) if k > 0]
        singles = [(query * keys).sum(-1, keepdim=True) for keys in later]
        weights = torch.cat([scores, *singles], dim=-1).float().softmax(-1).to(query.dtype)
        out = weights[..., :length] @ first_values
        for k in range(1, step):
            out = out + weights[..., length + k - 1, None] * _shift(seen[k][1], step - 1 - k)
        return self._linear("out", out.transpose(1, 2).reshape(batch, length, -1))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.get_parameter(name))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.get_parameter(name)
        return F.rms_norm(x.float(), weight.shape, weight, self.shape.norm_eps).to(x.dtype)


def _rotate(x: Tensor, shape: HeadShape) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) by their angles; x [batch, heads, positions, dim]."""
    positions = torch.arange(x.shape[2], device=x.device)
    angles = positions[:, None] * rotation_frequencies(shape).to(x.device)
    angles = torch.cat((angles, angles), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * angles.sin().to(x.dtype)


def _for_queries(pair: KeysValues, group: int) -> KeysValues:
    """Repeat each KV head for the query heads that read it."""
    keys, values = pair
    return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)


def _shift(x: Tensor, count: int) -> Tensor:
    """Move entries `count` positions on. Shapes: [..., positions, dim] -> the same."""
    return F.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :] if count else x
