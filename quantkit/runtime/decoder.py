"""One decoder for the Llama family: norms, rotary embedding, grouped queries, an MLP.

What differs between models is data (ModelShape); see families.py. Tokens of all sequences run as
one packed list of rows; only attention knows where a sequence begins. Roundings follow
transformers, so that equal weights give equal logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.attention_ops import causal_attention
from quantkit.decoder_ops import StepLayers, decoder_step
from quantkit.errors import GenerationError
from quantkit.extension import EXTENSION_LOADED, load_cuda_kernels
from quantkit.numerics import E4M3, Format
from quantkit.runtime.cuda_graphs import StepGraphs
from quantkit.runtime.decoder_layer import DecoderLayer, read_norm
from quantkit.runtime.engine import SequenceCache, check_context
from quantkit.runtime.heads import normed_together, rotated_heads
from quantkit.runtime.kv_cache import CacheLayout, CacheStep, PagedCache, Scales
from quantkit.runtime.norms import Norm
from quantkit.runtime.placement import Placement
from quantkit.runtime.qkv_linear import AppendingLinear
from quantkit.runtime.rotation import Rotation
from quantkit.runtime.rotation_switch import RotationSwitch
from quantkit.runtime.rotations import Rotations
from quantkit.runtime.saturation import Saturation
from quantkit.runtime.scaled_linear import after_add_norm, after_norm
from quantkit.runtime.sending import send
from quantkit.runtime.shapes import ModelShape
from quantkit.runtime.weights import WeightSource

Attend = Callable[[int, Tensor], Tensor]
"""(layer, rows of q, k and v [num_tokens, heads + 2 * kv_heads, head_dim]) -> like q.

Norms of heads and the rotary embedding are its part too: a cache does them as it stores the keys.
Where an AppendingLinear has done all that, it gets the queries alone.
"""


class FusedLayers(NamedTuple):
    """What `decoder_step` takes: the layers, the final norm's weight; and up to how many tokens."""

    layers: StepLayers
    final_norm: Tensor
    most_rows: int


class Decoder:
    """A model in memory; implements Engine. One instance serves any number of caches."""

    def __init__(
        self,
        reader: WeightSource,
        shape: ModelShape,
        rotations: Sequence[Rotation],
        kv_scales: Sequence[Scales | None] | None,
        kv_format: Format = E4M3,
        placement: Placement | None = None,
        saturation: Saturation | None = None,
    ) -> None:
        self.shape = shape
        self._placement = placement or Placement.on(reader.device, shape.num_layers)
        self.vocab_size = shape.vocab_size
        self.max_context = shape.max_context
        self.hidden_size = shape.hidden_size
        self.device = self._placement.head
        self.dtype = reader.dtype
        devices = dict.fromkeys((self._placement.embedding, *self._placement.devices))
        self._rotations = Rotations(rotations, shape.long_from, self.dtype, tuple(devices))
        matrix = (shape.vocab_size, shape.hidden_size)
        embedder = reader.on(self._placement.embedding)
        self._embedding = embedder.tensor("model.embed_tokens.weight", matrix)
        self._layers = [
            DecoderLayer.read(reader.on(device), shape, number)
            for number, device in enumerate(self._placement.layers)
        ]
        norm_reader = reader.on(self._placement.norm)
        self._norm = read_norm(norm_reader, shape, "model.norm")
        self._multiplier = shape.embedding_multiplier
        if shape.rounds_multiplier:
            self._multiplier = torch.tensor(self._multiplier, dtype=self.dtype).item()
        head_reader = reader.on(self.device)
        self._head = head_reader.head("lm_head", self._embedding.to(self.device), shape.tied)
        reader.check_all_used()
        # What does all at once does not count.
        self._fused = self._fuse() if saturation is None else None
        recorded = saturation is None and self._records()
        self._graphs = StepGraphs(self.run_step, self.device) if recorded else None
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
            devices=self._placement.layers,
            saturation=saturation,
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
            hidden = hidden[send(ends, self.device)]
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
        elif self._fused is not None and len(input_ids) <= self._fused.most_rows:
            hidden = self._run_fused(self._fused, input_ids, paged, step)
        else:
            hidden = self.run_step(input_ids, paged, step)
        paged.commit(step)
        return hidden

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits. Shapes: [rows, hidden_size] -> float32 [rows, vocab]."""
        return self.shape.logits(self._head(hidden, torch.float32))

    def run_step(self, input_ids: Tensor, cache: PagedCache, step: CacheStep) -> Tensor:
        """Append tokens to the cache, one op after another.

        Shapes: int64 [num_tokens] -> [num_tokens, hidden_size], what the output head reads.
        """
        shape = self.shape
        hidden = self._embed(input_ids)
        steps = {device: step.to(device) for device in self._placement.devices}
        turns = self._rotations.everywhere(self._step_angles(steps[self._placement.embedding]))

        def turn(number: int) -> tuple[Tensor, Tensor] | None:
            rotary, device = self._layers[number].rotary, self._placement.layers[number]
            return None if rotary is None else turns[device][rotary]

        appending = [
            AppendingLinear.of(layer, number, turn(number), steps[device], cache, shape.num_heads)
            for number, (layer, device) in enumerate(
                zip(self._layers, self._placement.layers, strict=True)
            )
        ]

        def attend(number: int, qkv: Tensor) -> Tensor:
            layer, here = self._layers[number], steps[self._placement.layers[number]]
            query = qkv
            if appending[number] is None:
                norms = (layer.q_norm, layer.k_norm, shape.norm_eps)
                if shape.qk_norm_together:
                    qkv, norms = normed_together(layer, qkv, shape), (None, None, shape.norm_eps)
                query = cache.append_rotary(number, qkv, norms, turn(number), here, shape.num_heads)
            return cache.attend(
                number, query, here, shape.softmax_scale, layer.window, shape.scores_cap
            )

        return self._run(hidden, attend, appending)

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences, without a cache; see Engine."""
        batch, length = input_ids.shape
        check_context((0,), (length,), (0,), self.max_context)
        softmax_scale = self.shape.softmax_scale
        positions = torch.arange(length, device=self._placement.embedding).repeat(batch)
        angles = self._rotations.angles(positions, length, torch.full_like(positions, length))
        turns = self._rotations.everywhere(angles)

        def attend(number: int, qkv: Tensor) -> Tensor:
            layer, device = self._layers[number], self._placement.layers[number]
            heads = rotated_heads(layer, qkv, turns[device], self.shape)
            rows = zip(*(x.float().view(batch, length, *x.shape[1:]) for x in heads), strict=True)
            options = (softmax_scale, layer.window, self.shape.scores_cap)
            parts = [causal_attention(q, k, v, *options) for q, k, v in rows]
            return torch.cat(parts).to(self.dtype)

        hidden = self._run(self._embed(input_ids.reshape(-1)), attend)
        return self.head(hidden).view(batch, length, self.vocab_size)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Return what enters the first layer. Shapes: int64 [tokens] -> [tokens, hidden_size]."""
        hidden = F.embedding(send(input_ids, self._placement.embedding), self._embedding)
        return hidden if self._multiplier == 1.0 else hidden * self._multiplier

    def _step_angles(self, step: CacheStep) -> list[tuple[Tensor, Tensor]]:
        totals = step.positions if self._switch is None else step.totals()
        return self._rotations.angles(step.positions, max(step.new_lengths), totals)

    def _own(self, cache: SequenceCache) -> PagedCache:
        if not isinstance(cache, PagedCache) or cache.layout is not self._layout:
            raise GenerationError("the cache belongs to another model; call new_cache of this one")
        return cache

    def _fuse(self) -> FusedLayers | None:
        """Return the layers for `decoder_step`, or None where one op at a time serves better."""
        step, final_norm = StepLayers(), self._norm.for_step()
        if not EXTENSION_LOADED or self.device.type != "cpu" or final_norm is None:
            return None
        fits = self.shape.residual_multiplier == 1.0
        fits = fits and all(layer.add_to(step) for layer in self._layers)
        fits = fits and all(device.type == "cpu" for device in self._placement.devices)
        return FusedLayers(step, final_norm, step.most_rows(self.dtype)) if fits else None

    def _records(self) -> bool:
        """Return whether steps can be recorded: on one GPU, with our kernels, for 16 bits."""
        one = len(self._placement.devices) == 1 and self.device.type == "cuda"
        # How many tokens an expert gets is only known to the host: nothing to record.
        known = self.dtype != torch.float32 and self.shape.experts is None
        return one and known and load_cuda_kernels()

    def _run_fused(
        self, fused: FusedLayers, input_ids: Tensor, cache: PagedCache, step: CacheStep
    ) -> Tensor:
        """Do what `run_step` does in one op, on a CPU only."""
        shape = self.shape
        angles = self._step_angles(step)
        cos, sin = angles[0] if len(angles) == 1 else map(torch.cat, zip(*angles, strict=True))
        return decoder_step(
            self._embed(input_ids),
            fused.layers,
            cache.tensors(),
            fused.final_norm,
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
            shape.scores_cap,
        )

    def _run(
        self,
        hidden: Tensor,
        attend: Attend,
        appending: Sequence[AppendingLinear | None] | None = None,
    ) -> Tensor:
        """Run all layers and the final norm. Shapes: [num_tokens, hidden_size] -> the same.

        `appending` takes the place of q, k and v in the layers that have one.
        """
        shape = self.shape
        delta: Tensor | None = None
        for number, layer in enumerate(self._layers):
            hidden, delta = _moved(hidden, delta, self._placement.layers[number])
            project = (appending[number] if appending else None) or layer.qkv
            if layer.input_norm is None:
                hidden = hidden if delta is None else hidden + delta
                qkv = project(hidden)
            elif delta is None:
                qkv = after_norm(project, hidden, layer.input_norm)
            else:
                hidden, qkv = after_add_norm(project, hidden, delta, layer.input_norm)
            attended = attend(number, qkv.view(len(qkv), -1, shape.head_dim))
            delta = layer.out(attended.reshape(-1, shape.query_size))
            delta = self._added(delta, layer.attention_norm)
            hidden, delta = layer.mlp.after_add_norm(hidden, delta, layer.post_norm)
            delta = self._added(delta, layer.mlp_norm)
        hidden, delta = _moved(hidden, delta, self._placement.norm)
        normed = self._norm(hidden) if delta is None else self._norm.after_add(hidden, delta)[1]
        return normed.to(self.device)

    def _added(self, delta: Tensor, norm: Norm | None) -> Tensor:
        """Return what is added to the residual stream, of what a part of a layer gave."""
        if norm is not None:
            delta = norm(delta)
        multiplier = self.shape.residual_multiplier
        return delta if multiplier == 1.0 else delta * multiplier


def _moved(
    hidden: Tensor, delta: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return the residual stream, and what is yet to be added to it, on the next layer's device."""
    if hidden.device == device:
        return hidden, delta
    return hidden.to(device), None if delta is None else delta.to(device)
