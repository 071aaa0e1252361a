"""One decoder for the Llama family: RMS norm, rotary embedding, grouped queries, gated MLP.

What differs between models is data (ModelShape); see families.py. Tokens of all sequences run as
one packed list of rows; only attention knows where a sequence begins. Roundings follow
transformers, so that equal weights give equal logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.attention_ops import causal_attention, rms_norm, rotary
from quantkit.decoder_ops import StepLayers, decoder_step
from quantkit.errors import GenerationError
from quantkit.extension import EXTENSION_LOADED
from quantkit.ops import FEW_ROWS
from quantkit.runtime.engine import SequenceCache
from quantkit.runtime.families import ModelShape
from quantkit.runtime.kv_cache import CacheLayout, CacheStep, PagedCache, Scales
from quantkit.runtime.layers import DenseLinear, GatedMlp, Linear
from quantkit.runtime.weights import WeightReader

Attend = Callable[[int, Tensor, Tensor, Tensor, int | None], Tensor]
"""(layer, query, key, value, window) -> attention output, of query's shape."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Shapes: norms [hidden], q_norm and k_norm [head_dim] or None."""

    input_norm: Tensor
    qkv: Linear  # q, k and v rows
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    mlp: GatedMlp
    window: int | None
    rotary: bool

    @classmethod
    def read(cls, reader: WeightReader, shape: ModelShape, number: int) -> DecoderLayer:
        """Read layer `number` of a checkpoint."""
        base = f"model.layers.{number}"
        hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
        qkv = [f"{base}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
        qkv_rows = (shape.query_size, shape.kv_size, shape.kv_size)
        gate_up = [f"{base}.mlp.{leaf}" for leaf in ("gate_proj", "up_proj")]
        out, down = [f"{base}.self_attn.o_proj"], [f"{base}.mlp.down_proj"]
        q_norm, k_norm = (
            reader.tensor(f"{base}.self_attn.{leaf}.weight", (head,)) if shape.qk_norm else None
            for leaf in ("q_norm", "k_norm")
        )
        return cls(
            input_norm=reader.tensor(f"{base}.input_layernorm.weight", (hidden,)),
            qkv=reader.linear(qkv, qkv_rows, hidden, shape.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            out=reader.linear(out, (hidden,), shape.query_size, shape.out_bias),
            post_norm=reader.tensor(f"{base}.post_attention_layernorm.weight", (hidden,)),
            mlp=GatedMlp(
                reader.linear(gate_up, (inner, inner), hidden, shape.mlp_bias),
                reader.linear(down, (hidden,), inner, shape.mlp_bias),
                shape.activation,
            ),
            window=shape.windows[number],
            rotary=shape.rotary[number],
        )

    def add_to(self, step: StepLayers) -> bool:
        """Append the layer to those of a fused step; False if that cannot run it."""
        qkv, out = self.qkv.for_step(), self.out.for_step()
        gate_up, down = self.mlp.gate_up.for_step(), self.mlp.down.for_step()
        if qkv is None or out is None or gate_up is None or down is None:
            return False
        norms = (self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        step.add(*norms, qkv, out, gate_up, down, self.window, self.rotary)
        return True


class Rotation:
    """Angles of the rotary embedding, in tables that grow with the longest sequence.

    `frequencies` are radians per position of each pair, float32 [head_dim / 2]; `factor` multiplies
    cos and sin.
    """

    def __init__(self, frequencies: Tensor, factor: float) -> None:
        self._frequencies = frequencies
        self._factor = factor
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def at(self, positions: Tensor, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [num_tokens, head_dim], of positions below `end`."""
        cos, sin = self._tables.get(dtype) or self._table(256, dtype)
        if len(cos) < end:
            cos, sin = self._table(max(end, 2 * len(cos)), dtype)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _table(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self._frequencies.device)
        angles = positions.float().unsqueeze(1) * self._frequencies
        angles = torch.cat((angles, angles), dim=1)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._tables[dtype] = cos.to(dtype), sin.to(dtype)
        return self._tables[dtype]


class Decoder:
    """A model in memory; implements Engine. One instance serves any number of caches."""

    def __init__(
        self,
        reader: WeightReader,
        shape: ModelShape,
        rotation: Rotation,
        kv_scales: Sequence[Scales] | None,
    ) -> None:
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self.max_context = shape.max_context
        self.device = reader.device
        self.dtype = reader.dtype
        self._rotation = rotation
        matrix = (shape.vocab_size, shape.hidden_size)
        self._embedding = reader.tensor("model.embed_tokens.weight", matrix)
        self._layers = [DecoderLayer.read(reader, shape, n) for n in range(shape.num_layers)]
        self._norm = reader.tensor("model.norm.weight", (shape.hidden_size,))
        self._head: Linear = (
            DenseLinear(self._embedding)
            if shape.tied
            else reader.linear(["lm_head"], [shape.vocab_size], shape.hidden_size, False)
        )
        reader.check_all_used()
        self._fused = self._fuse()
        self._layout = CacheLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=self.dtype,
            device=self.device,
            scales=tuple(kv_scales) if kv_scales else None,
        )

    def new_cache(self, num_sequences: int, max_tokens: int) -> PagedCache:
        """Return an empty cache; `max_tokens` per sequence is a hint, the cache grows beyond it."""
        return PagedCache(self._layout, num_sequences, min(max_tokens, self.max_context))

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        cache: SequenceCache,
        last_only: bool = True,
    ) -> Tensor:
        """Append tokens to the cache and return the logits that follow them; see Engine."""
        paged = self._own(cache)
        check_context(sequences, num_new_tokens, cache.lengths, self.max_context)
        step = paged.plan(sequences, num_new_tokens)
        hidden = F.embedding(input_ids.to(self.device), self._embedding)
        angles = self._rotation.at(step.positions, max(step.new_lengths), self.dtype)
        if self._fused is not None and len(hidden) <= FEW_ROWS:
            hidden = self._run_fused(self._fused, hidden, angles, paged, step)
        else:
            softmax_scale = self.shape.head_dim**-0.5

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
                paged.append(layer, k, v, step)
                return paged.attend(layer, q, step, softmax_scale, window)

            hidden = self._run(hidden, angles, attend)
        paged.commit(step)
        if last_only and len(step.last_rows) < len(hidden):
            hidden = hidden[list(step.last_rows)]
        return self._head(hidden, torch.float32)

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences, without a cache; see Engine."""
        batch, length = input_ids.shape
        check_context((0,), (length,), (0,), self.max_context)
        softmax_scale = self.shape.head_dim**-0.5

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
            q, k, v = (x.float().view(batch, length, *x.shape[1:]) for x in (q, k, v))
            rows = zip(q, k, v, strict=True)
            parts = [causal_attention(*row, softmax_scale, window) for row in rows]
            return torch.cat(parts).to(self.dtype)

        positions = torch.arange(length, device=self.device).repeat(batch)
        hidden = F.embedding(input_ids.reshape(-1).to(self.device), self._embedding)
        angles = self._rotation.at(positions, length, self.dtype)
        hidden = self._run(hidden, angles, attend)
        return self._head(hidden, torch.float32).view(batch, length, self.vocab_size)

    def _own(self, cache: SequenceCache) -> PagedCache:
        if not isinstance(cache, PagedCache) or cache.layout is not self._layout:
            raise GenerationError("the cache belongs to another model; call new_cache of this one")
        return cache

    def _fuse(self) -> StepLayers | None:
        """Return the layers for `decoder_step`, or None where one op at a time serves better."""
        step = StepLayers()
        fits = all(layer.add_to(step) for layer in self._layers)
        return step if fits and EXTENSION_LOADED and self.device.type == "cpu" else None

    def _run_fused(
        self,
        layers: StepLayers,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: PagedCache,
        step: CacheStep,
    ) -> Tensor:
        """Do what `_run` does, and append to the cache, in one op; a few tokens only."""
        shape = self.shape
        return decoder_step(
            hidden,
            layers,
            cache.tensors(),
            self._norm,
            angles,
            step.slots,
            step.block_tables,
            step.lengths,
            step.query_starts,
            shape.num_heads,
            shape.num_kv_heads,
            shape.norm_eps,
            shape.head_dim**-0.5,
            shape.activation,
        )

    def _run(self, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Run all layers and the final norm. Shapes: [num_tokens, hidden] -> the same."""
        for number, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.input_norm, self.shape.norm_eps)
            hidden = hidden + self._attention(number, layer, normed, angles, attend)
            normed = rms_norm(hidden, layer.post_norm, self.shape.norm_eps)
            hidden = hidden + layer.mlp(normed)
        return rms_norm(hidden, self._norm, self.shape.norm_eps)

    def _attention(
        self,
        number: int,
        layer: DecoderLayer,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, self.shape.head_dim)
        rotated, value = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = torch.split(rotated, [heads, kv_heads], dim=1)
            query = rms_norm(query, layer.q_norm, self.shape.norm_eps)
            key = rms_norm(key, layer.k_norm, self.shape.norm_eps)
            rotated = torch.cat((query, key), dim=1)
        if layer.rotary:
            # Queries and keys turn by the same angles: one op for both.
            rotated = rotary(rotated, *angles)
        query, key = torch.split(rotated, [heads, kv_heads], dim=1)
        attended = attend(number, query, key, value, layer.window)
        return layer.out(attended.reshape(x.shape[0], self.shape.query_size))


def check_context(
    sequences: Sequence[int], num_new_tokens: Sequence[int], lengths: Sequence[int], limit: int
) -> None:
    """Raise GenerationError if a sequence would grow beyond `limit` tokens."""
    for sequence, count in zip(sequences, num_new_tokens, strict=True):
        if count < 1:
            raise GenerationError(f"sequence {sequence} has no new tokens; leave it out")
        if lengths[sequence] + count > limit:
            raise GenerationError(
                f"sequence {sequence} would have {lengths[sequence] + count} tokens, the model's "
                f"limit is {limit}; shorten the prompt or ask for fewer new tokens"
            )
