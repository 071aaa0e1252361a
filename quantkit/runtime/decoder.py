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
from quantkit.extension import EXTENSION_LOADED, load_cuda_kernels
from quantkit.numerics import E4M3, Format
from quantkit.ops import FEW_ROWS
from quantkit.row_ops import add_rms_norm
from quantkit.runtime.cuda_graphs import StepGraphs
from quantkit.runtime.engine import SequenceCache
from quantkit.runtime.families import ModelShape
from quantkit.runtime.kv_cache import CacheLayout, CacheStep, PagedCache, Scales
from quantkit.runtime.layers import Linear
from quantkit.runtime.mlp import GatedMlp, Mlp
from quantkit.runtime.moe import RoutedMlp
from quantkit.runtime.rotation import Rotation, by_length
from quantkit.runtime.rotation_switch import RotationSwitch
from quantkit.runtime.scaled_linear import after_add_norm, after_norm
from quantkit.runtime.weights import WeightSource

Attend = Callable[[int, Tensor], Tensor]
"""(layer, rows of q, k and v [num_tokens, heads + 2 * kv_heads, head_dim]) -> like q.

Norms of heads and the rotary embedding are its part too: a cache does them as it stores the keys.
"""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; a norm that a family lacks is None.

    Shapes: norms [hidden]; q_norm and k_norm [head_dim], or of all heads together.
    """

    input_norm: Tensor | None
    qkv: Linear  # q, k and v rows
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    attention_norm: Tensor | None  # of what attention adds
    post_norm: Tensor | None  # in front of the MLP
    mlp: Mlp
    mlp_norm: Tensor | None  # of what the MLP adds
    window: int | None
    rotary: int | None  # which rotation

    @classmethod
    def read(cls, reader: WeightSource, shape: ModelShape, number: int) -> DecoderLayer:
        """Read layer `number` of a checkpoint."""
        base = f"model.layers.{number}"
        hidden = shape.hidden_size
        qkv, qkv_rows = ["q_proj", "k_proj", "v_proj"], [shape.query_size, *2 * [shape.kv_size]]
        if shape.fused:
            qkv, qkv_rows = ["qkv_proj"], [sum(qkv_rows)]
        qkv = [f"{base}.self_attn.{leaf}" for leaf in qkv]
        out = [f"{base}.self_attn.o_proj"]
        norms = shape.norm_names

        def norm(leaf: str | None, features: int) -> Tensor | None:
            return read_norm(reader, shape, f"{base}.{leaf}", features) if leaf else None

        return cls(
            input_norm=norm(norms.attention_input, hidden),
            qkv=reader.linear(qkv, qkv_rows, hidden, shape.qkv_bias),
            q_norm=norm(norms.query, shape.query_norm_size),
            k_norm=norm(norms.key, shape.key_norm_size),
            out=reader.linear(out, (hidden,), shape.query_size, shape.out_bias),
            attention_norm=norm(norms.attention_output, hidden),
            post_norm=norm(norms.mlp_input, hidden),
            mlp=_read_mlp(reader, shape, number),
            mlp_norm=norm(norms.mlp_output, hidden),
            window=shape.windows[number],
            rotary=shape.rotary[number],
        )

    def add_to(self, step: StepLayers) -> bool:
        """Append the layer to those of a fused step; False if that cannot run it."""
        qkv, out, mlp = self.qkv.for_step(), self.out.for_step(), self.mlp.for_step()
        if qkv is None or out is None or mlp is None:
            return False
        norms = (self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        angles = 0 if self.rotary is None else self.rotary + 1
        added = (self.attention_norm, self.mlp_norm)
        step.add(*norms, qkv, out, *mlp, self.window, angles, *added)
        return True


def read_norm(reader: WeightSource, shape: ModelShape, module: str, features: int) -> Tensor:
    """Read the weight of an RMS norm, as `rms_norm` takes it."""
    weight = reader.tensor(f"{module}.weight", (features,))
    return weight.float() + shape.norm_offset if shape.float32_norms else weight


def _read_mlp(reader: WeightSource, shape: ModelShape, number: int) -> Mlp:
    base = f"model.layers.{number}"
    if shape.experts is not None and shape.experts.layers[number]:
        return RoutedMlp.read(reader, shape, shape.experts, base)
    sizes = (shape.hidden_size, shape.intermediate_size)
    return GatedMlp.read(
        reader, f"{base}.mlp", sizes, shape.activation, bias=shape.mlp_bias, fused=shape.fused
    )


class Decoder:
    """A model in memory; implements Engine. One instance serves any number of caches."""

    def __init__(
        self,
        reader: WeightSource,
        shape: ModelShape,
        rotations: Sequence[Rotation],
        kv_scales: Sequence[Scales] | None,
        kv_format: Format = E4M3,
    ) -> None:
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self.max_context = shape.max_context
        self.hidden_size = shape.hidden_size
        self.device = reader.device
        self.dtype = reader.dtype
        self._rotations = tuple(rotations)
        matrix = (shape.vocab_size, shape.hidden_size)
        self._embedding = reader.tensor("model.embed_tokens.weight", matrix)
        self._layers = [DecoderLayer.read(reader, shape, n) for n in range(shape.num_layers)]
        self._norm = read_norm(reader, shape, "model.norm", shape.hidden_size)
        self._multiplier = shape.embedding_multiplier
        if shape.rounds_multiplier:
            self._multiplier = torch.tensor(self._multiplier, dtype=self.dtype).item()
        self._head = reader.head("lm_head", self._embedding, shape.tied)
        reader.check_all_used()
        self._fused = self._fuse()
        records = self.device.type == "cuda" and self.dtype != torch.float32 and load_cuda_kernels()
        # How many tokens an expert gets is only known to the host: nothing to record.
        records = records and shape.experts is None
        self._graphs = StepGraphs(self.run_step, self.device) if records else None
        limit = shape.long_from
        self._switch = None if limit is None else RotationSwitch(self._append, limit)
        self._layout = CacheLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=self.dtype,
            device=self.device,
            scales=tuple(kv_scales) if kv_scales else None,
            fmt=kv_format,
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
        hidden = self.hidden(input_ids, sequences, num_new_tokens, cache)
        if last_only and len(sequences) < len(hidden):
            ends = torch.tensor(num_new_tokens).cumsum(dim=0) - 1
            hidden = hidden[ends.to(self.device)]
        return self.head(hidden)

    @torch.inference_mode()
    def hidden(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        cache: SequenceCache,
    ) -> Tensor:
        """Append tokens to the cache as `forward` does; return what the output head reads.

        Shapes: int64 [num_tokens] -> [num_tokens, hidden_size], valid until the next call.
        """
        paged = self._own(cache)
        check_context(sequences, num_new_tokens, cache.lengths, self.max_context)
        append = self._append if self._switch is None else self._switch.append
        return append(input_ids, sequences, num_new_tokens, paged)

    def _append(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        paged: PagedCache,
    ) -> Tensor:
        """Do one pass, as `hidden` says."""
        step = paged.plan(sequences, num_new_tokens)
        if self._graphs is not None:
            hidden = self._graphs.run(input_ids, paged, step)
        elif self._fused is not None and len(input_ids) <= FEW_ROWS:
            hidden = self._run_fused(self._fused, input_ids, paged, step)
        else:
            hidden = self.run_step(input_ids.to(self.device), paged, step.to(self.device))
        paged.commit(step)
        return hidden

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits. Shapes: [rows, hidden_size] -> float32 [rows, vocab]."""
        logits = self._head(hidden, torch.float32)
        divisor, cap = self.shape.logits_divisor, self.shape.logits_cap
        if cap is not None:
            return torch.tanh(logits / cap) * cap
        return logits if divisor == 1.0 else logits / divisor

    def run_step(self, input_ids: Tensor, cache: PagedCache, step: CacheStep) -> Tensor:
        """Append tokens to the cache, one op after another; all tensors on the model's device.

        Shapes: int64 [num_tokens] -> [num_tokens, hidden_size], what the output head reads.
        """
        shape = self.shape
        hidden = self._embed(input_ids)
        angles = self._step_angles(step)

        def attend(number: int, qkv: Tensor) -> Tensor:
            layer = self._layers[number]
            norms = (layer.q_norm, layer.k_norm, shape.norm_eps)
            if shape.qk_norm_together:
                qkv, norms = self._normed_together(layer, qkv), (None, None, shape.norm_eps)
            turn = None if layer.rotary is None else angles[layer.rotary]
            query = cache.append_rotary(number, qkv, norms, turn, step, shape.num_heads)
            return cache.attend(
                number, query, step, shape.softmax_scale, layer.window, shape.scores_cap
            )

        return self._run(hidden, attend)

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences, without a cache; see Engine."""
        batch, length = input_ids.shape
        check_context((0,), (length,), (0,), self.max_context)
        softmax_scale = self.shape.softmax_scale
        positions = torch.arange(length, device=self.device).repeat(batch)
        angles = self._angles(positions, length, torch.full_like(positions, length))

        def attend(number: int, qkv: Tensor) -> Tensor:
            layer = self._layers[number]
            heads = self._rotated_heads(layer, qkv, angles)
            rows = zip(*(x.float().view(batch, length, *x.shape[1:]) for x in heads), strict=True)
            options = (softmax_scale, layer.window, self.shape.scores_cap)
            parts = [causal_attention(q, k, v, *options) for q, k, v in rows]
            return torch.cat(parts).to(self.dtype)

        hidden = self._run(self._embed(input_ids.reshape(-1).to(self.device)), attend)
        return self.head(hidden).view(batch, length, self.vocab_size)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Return what enters the first layer. Shapes: int64 [tokens] -> [tokens, hidden_size]."""
        hidden = F.embedding(input_ids, self._embedding)
        return hidden if self._multiplier == 1.0 else hidden * self._multiplier

    def _step_angles(self, step: CacheStep) -> list[tuple[Tensor, Tensor]]:
        totals = step.positions if self._switch is None else step.totals()
        return self._angles(step.positions, max(step.new_lengths), totals)

    def _angles(self, positions: Tensor, end: int, totals: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cos and sin of each rotation at positions below `end`.

        `totals` are the lengths of the sequences that the positions are in, [num_tokens].
        """
        angles = [rotation.at(positions, end, self.dtype) for rotation in self._rotations]
        limit = self.shape.long_from
        return angles if limit is None else [by_length(angles, totals > limit)]

    def _own(self, cache: SequenceCache) -> PagedCache:
        if not isinstance(cache, PagedCache) or cache.layout is not self._layout:
            raise GenerationError("the cache belongs to another model; call new_cache of this one")
        return cache

    def _fuse(self) -> StepLayers | None:
        """Return the layers for `decoder_step`, or None where one op at a time serves better."""
        step = StepLayers()
        fits = self.shape.residual_multiplier == 1.0 and self.shape.scores_cap is None
        fits = fits and all(layer.add_to(step) for layer in self._layers)
        return step if fits and EXTENSION_LOADED and self.device.type == "cpu" else None

    def _run_fused(
        self, layers: StepLayers, input_ids: Tensor, cache: PagedCache, step: CacheStep
    ) -> Tensor:
        """Do what `run_step` does in one op; a few tokens on a CPU only."""
        shape = self.shape
        angles = self._step_angles(step)
        cos, sin = angles[0] if len(angles) == 1 else map(torch.cat, zip(*angles, strict=True))
        return decoder_step(
            self._embed(input_ids),
            layers,
            cache.tensors(),
            self._norm,
            (cos, sin),
            step.slots,
            step.block_tables,
            step.lengths,
            step.query_starts,
            shape.num_heads,
            shape.num_kv_heads,
            shape.norm_eps,
            shape.softmax_scale,
            shape.activation,
        )

    def _run(self, hidden: Tensor, attend: Attend) -> Tensor:
        """Run all layers and the final norm. Shapes: [num_tokens, hidden_size] -> the same."""
        shape, eps = self.shape, self.shape.norm_eps
        heads = shape.num_heads + 2 * shape.num_kv_heads
        delta: Tensor | None = None
        for number, layer in enumerate(self._layers):
            if layer.input_norm is None:
                hidden = hidden if delta is None else hidden + delta
                qkv = layer.qkv(hidden)
            elif delta is None:
                qkv = after_norm(layer.qkv, hidden, layer.input_norm, eps)
            else:
                hidden, qkv = after_add_norm(layer.qkv, hidden, delta, layer.input_norm, eps)
            attended = attend(number, qkv.view(-1, heads, shape.head_dim))
            delta = layer.out(attended.reshape(-1, shape.query_size))
            delta = self._added(delta, layer.attention_norm)
            hidden, delta = layer.mlp.after_add_norm(hidden, delta, layer.post_norm, eps)
            delta = self._added(delta, layer.mlp_norm)
        if delta is None:
            return rms_norm(hidden, self._norm, eps)
        return add_rms_norm(hidden, delta, self._norm, eps)[1]

    def _added(self, delta: Tensor, norm: Tensor | None) -> Tensor:
        """Return what is added to the residual stream, of what a part of a layer gave."""
        if norm is not None:
            delta = rms_norm(delta, norm, self.shape.norm_eps)
        multiplier = self.shape.residual_multiplier
        return delta if multiplier == 1.0 else delta * multiplier

    def _normed_together(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        """Normalize all heads of q, and of k, as one vector a token. Shapes: as qkv."""
        shape = self.shape
        parts = torch.split(qkv.flatten(1), [shape.query_size, *2 * [shape.kv_size]], dim=1)
        norms = (layer.q_norm, layer.k_norm, None)
        normed = [
            part if norm is None else rms_norm(part, norm, shape.norm_eps)
            for part, norm in zip(parts, norms, strict=True)
        ]
        return torch.cat(normed, dim=1).view(qkv.shape)

    def _rotated_heads(
        self, layer: DecoderLayer, qkv: Tensor, angles: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, as attention reads them."""
        if self.shape.qk_norm_together:
            qkv = self._normed_together(layer, qkv)
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        per_head = not self.shape.qk_norm_together
        if per_head and layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query, layer.q_norm, self.shape.norm_eps)
            key = rms_norm(key, layer.k_norm, self.shape.norm_eps)
        if layer.rotary is not None:
            turn = angles[layer.rotary]
            query, key = rotary(query, *turn), rotary(key, *turn)
        return query, key, value


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
