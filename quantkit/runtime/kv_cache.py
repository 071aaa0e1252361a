"""The paged KV cache: who owns which block, and the tensors the blocks live in.

All layers share one block table per sequence. Keys and values are 8-bit codes with static scales
per layer, or plain values. What prefill, decode and verification read is the same stored data, so
rolling back tokens is setting a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
from torch import Tensor

from quantkit.attention_ops import causal_attention, paged_attention
from quantkit.cache_ops import kv_gather, rotary_append
from quantkit.errors import CheckpointError, GenerationError
from quantkit.numerics import E4M3, Format
from quantkit.qkv_ops import fp8_qkv_append
from quantkit.runtime.saturation import Saturation, keys_of, values_of
from quantkit.runtime.sending import send

BLOCK_SIZE = 16
"""Tokens per block: small enough to waste little, large enough for one gather per block."""

FEW_QUERIES = 32
"""Up to this many queries a sequence, a GPU reads the cache inside the attention kernel."""

Scales = tuple[Tensor, Tensor]
"""k_scale and v_scale of one layer, float32 [1] or [num_kv_heads]."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What one token takes in each layer, and where."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of stored values, where there are no scales
    device: torch.device
    scales: tuple[Scales | None, ...] | None = None  # one entry per layer; None: plain values
    fmt: Format = E4M3  # of codes, where there are scales
    devices: tuple[torch.device, ...] | None = None  # one per layer, where not all are on `device`
    saturation: Saturation | None = None  # counts what the scales cannot hold

    def __post_init__(self) -> None:
        """Raise CheckpointError unless there is one scale, or one per KV head, in each layer."""
        for layer, pair in enumerate(self.scales or ()):
            for name, scale in zip(("k_scale", "v_scale"), pair or (), strict=pair is not None):
                if scale.numel() not in (1, self.num_kv_heads):
                    raise CheckpointError(
                        f"{name} of layer {layer} has {scale.numel()} elements, expected 1 or "
                        f"{self.num_kv_heads} (KV heads)"
                    )


@dataclass(frozen=True, slots=True)
class CacheStep:
    """Where the tokens of one forward pass go, and what they see; the same for every layer."""

    sequences: tuple[int, ...]
    new_lengths: tuple[int, ...]  # after this step, per entry of `sequences`
    positions: Tensor  # int64 [num_tokens], within each sequence
    slots: Tensor  # int64 [num_tokens], rows of the flattened cache
    block_tables: Tensor  # int32 [num_sequences, max_blocks]
    lengths: Tensor  # int32 [num_sequences], new_lengths
    query_starts: Tensor  # int32 [num_sequences + 1]
    last_rows: tuple[int, ...]  # the last token of each sequence

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return self.last_rows[-1] + 1

    @property
    def is_prefill(self) -> bool:
        """Whether there are more new tokens than an attention kernel for few queries is made for.

        Only then may what runs depend on the lengths that are known here, see `cuda_graphs`.
        """
        return self.num_tokens > FEW_QUERIES * len(self.sequences)

    def totals(self) -> Tensor:
        """Return `lengths` for every new token, that of its sequence. Shape: [num_tokens]."""
        counts = self.query_starts.diff()
        return torch.repeat_interleave(self.lengths, counts, output_size=self.num_tokens)

    def to(self, device: torch.device) -> CacheStep:
        """Return the same step with its tensors on `device`."""
        if self.positions.device == device:
            return self
        return replace(
            self,
            positions=send(self.positions, device),
            slots=send(self.slots, device),
            block_tables=send(self.block_tables, device),
            lengths=send(self.lengths, device),
            query_starts=send(self.query_starts, device),
        )


class PagedCache:
    """Keys and values of several sequences in blocks of BLOCK_SIZE tokens."""

    def __init__(self, layout: CacheLayout, num_sequences: int, max_tokens: int) -> None:
        self.layout = layout
        self._lengths = [0] * num_sequences
        blocks_each = max(1, ceil(max_tokens / BLOCK_SIZE))
        self._owned: list[list[int]] = [[] for _ in range(num_sequences)]
        self._tables = torch.zeros(num_sequences, blocks_each, dtype=torch.int32)
        self.num_blocks = num_sequences * blocks_each
        # Popped from the end, so that a sequence alone gets ascending, adjacent blocks.
        self._free = list(range(self.num_blocks - 1, -1, -1))
        layers = range(layout.num_layers)
        self._keys = [self._new_blocks(layer, self.num_blocks) for layer in layers]
        self._values = [self._new_blocks(layer, self.num_blocks) for layer in layers]
        self._flat = self._flatten()
        self.version = 0  # another number whenever tensors are replaced

    @property
    def max_blocks(self) -> int:
        """Width of the block tables; grows with the longest sequence."""
        return self._tables.shape[1]

    @property
    def lengths(self) -> list[int]:
        """Tokens stored per sequence."""
        return list(self._lengths)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return len(self._free)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every token of `sequence` from position `length` on; its blocks stay its own."""
        stored = self._lengths[sequence]
        if not 0 <= length <= stored:
            raise GenerationError(
                f"sequence {sequence} holds {stored} tokens and cannot be truncated to {length}"
            )
        self._lengths[sequence] = length

    def release(self, sequence: int) -> None:
        """Forget `sequence` and free its blocks; it may be used again."""
        self._lengths[sequence] = 0
        self._free.extend(reversed(self._owned[sequence]))
        self._owned[sequence] = []

    def plan(self, sequences: Sequence[int], num_new_tokens: Sequence[int]) -> CacheStep:
        """Reserve blocks for new tokens and return where they go; lengths stay until `commit`.

        The step's tensors are on the CPU.
        """
        # Lists, and arrays at the end: this runs for every token, and calls are what it takes.
        totals: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends = [0]
        for sequence, new in zip(sequences, num_new_tokens, strict=True):
            begin = self._lengths[sequence]
            self._reserve(sequence, ceil((begin + new) / BLOCK_SIZE))
            positions += range(begin, begin + new)
            slots += self._slots(sequence, begin, begin + new)
            totals.append(begin + new)
            ends.append(ends[-1] + new)
        width = ceil(max(totals) / BLOCK_SIZE)
        return CacheStep(
            sequences=tuple(sequences),
            new_lengths=tuple(totals),
            positions=torch.from_numpy(np.array(positions, np.int64)),
            slots=torch.from_numpy(np.array(slots, np.int64)),
            block_tables=torch.from_numpy(self._tables.numpy()[list(sequences), :width]),
            lengths=torch.from_numpy(np.array(totals, np.int32)),
            query_starts=torch.from_numpy(np.array(ends, np.int32)),
            last_rows=tuple(end - 1 for end in ends[1:]),
        )

    def _slots(self, sequence: int, begin: int, end: int) -> list[int]:
        """Return where the tokens at positions [begin, end) are, in rows of the flattened cache."""
        owned = self._owned[sequence]
        slots: list[int] = []
        while begin < end:
            block, offset = divmod(begin, BLOCK_SIZE)
            count = min(BLOCK_SIZE - offset, end - begin)
            first = owned[block] * BLOCK_SIZE + offset
            slots += range(first, first + count)
            begin += count
        return slots

    def commit(self, step: CacheStep) -> None:
        """Make the tokens of a step, now written in every layer, part of their sequences."""
        for sequence, length in zip(step.sequences, step.new_lengths, strict=True):
            self._lengths[sequence] = length

    def append_rotary(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None, float],
        angles: tuple[Tensor, Tensor] | None,
        step: CacheStep,
        heads: int,
    ) -> Tensor:
        """Store the new keys and values of one layer and return the queries, ready to attend.

        `norms` are those of the heads of q and k, and their epsilon; see `rotary_append`. Shapes:
        qkv [num_tokens, heads + 2 * num_kv_heads, head_dim] -> [num_tokens, heads, head_dim].
        """
        k_scale, v_scale = self._scales(layer)
        keys, values = self._keys[layer], self._values[layer]
        slots = step.slots
        if self.layout.saturation is not None and k_scale is not None and v_scale is not None:
            scales = (k_scale, v_scale)
            self._count(self.layout.saturation, layer, scales, qkv, norms, angles, heads)
        return rotary_append(qkv, *norms, angles, keys, values, k_scale, v_scale, slots, heads)

    def append_product(
        self,
        layer: int,
        x: Tensor,
        weights: tuple[Tensor, Tensor, Tensor | None, int],
        angles: tuple[Tensor, Tensor] | None,
        step: CacheStep,
        heads: int,
    ) -> Tensor:
        """Do what `append_rotary` does, without norms, with the product of x and q, k and v.

        `weights` are codes, scale, bias and group size of `fp8_qkv_append`. Shapes: x [num_tokens,
        in_features] -> [num_tokens, heads, head_dim].
        """
        codes, scale, bias, group_size = weights
        k_scale, v_scale = self._scales(layer)
        caches = (self._keys[layer], self._values[layer], k_scale, v_scale)
        return fp8_qkv_append(x, codes, scale, bias, group_size, angles, *caches, step.slots, heads)

    def _count(
        self,
        saturation: Saturation,
        layer: int,
        scales: Scales,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None, float],
        angles: tuple[Tensor, Tensor] | None,
        heads: int,
    ) -> None:
        """Count what the scales cannot hold, in keys and values that are stored as they are."""
        size = (1, len(qkv), self.layout.num_kv_heads, self.layout.head_dim)
        keys, values = qkv.new_empty(size), qkv.new_empty(size)
        slots = torch.arange(len(qkv), device=qkv.device)
        rotary_append(qkv, *norms, angles, keys, values, None, None, slots, heads)
        named = ((keys_of(layer), keys), (values_of(layer), values))
        for (name, stored), scale in zip(named, scales, strict=True):
            saturation.count(name, stored, (scale * self.layout.fmt.max).view(-1, 1))

    def attend(
        self,
        layer: int,
        query: Tensor,
        step: CacheStep,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend to everything stored, the tokens of `step` included; see `paged_attention`.

        Shapes: query [num_tokens, heads, head_dim] -> the same.
        """
        if query.is_cuda and step.is_prefill:
            return self._attend_prefill(layer, query, step, scale, window, softcap)
        k_scale, v_scale = self._scales(layer)
        return paged_attention(
            query,
            self._keys[layer],
            self._values[layer],
            k_scale,
            v_scale,
            step.block_tables,
            step.lengths,
            step.query_starts,
            scale,
            window,
            softcap,
        )

    def _attend_prefill(
        self,
        layer: int,
        query: Tensor,
        step: CacheStep,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend with many queries on a GPU: what is stored, read back, then torch's attention."""
        parts, begin = [], 0
        for number, (length, last) in enumerate(zip(step.new_lengths, step.last_rows, strict=True)):
            blocks = step.block_tables[number, : ceil(length / BLOCK_SIZE)]
            key, value = (
                kv_gather(stored[layer], stored_scale, blocks, length, query.dtype)
                for stored, stored_scale in zip(
                    (self._keys, self._values), self._scales(layer), strict=True
                )
            )
            queries = query[begin : last + 1]
            parts.append(causal_attention(queries, key, value, scale, window, softcap))
            begin = last + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tensors(self) -> list[Tensor]:
        """Return keys, values and their scales (or empty tensors) of all layers, in turn."""
        return self._flat

    def _flatten(self) -> list[Tensor]:
        none = self._tables.new_empty(0)
        flat: list[Tensor] = []
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            k_scale, v_scale = self._scales(layer)
            flat += (keys, values)
            flat += (none, none) if k_scale is None or v_scale is None else (k_scale, v_scale)
        return flat

    def _scales(self, layer: int) -> Scales | tuple[None, None]:
        return (self.layout.scales[layer] if self.layout.scales else None) or (None, None)

    def _new_blocks(self, layer: int, count: int) -> Tensor:
        layout = self.layout
        return torch.empty(
            (count, BLOCK_SIZE, layout.num_kv_heads, layout.head_dim),
            dtype=layout.dtype if self._scales(layer)[0] is None else layout.fmt.dtype,
            device=layout.devices[layer] if layout.devices else layout.device,
        )

    def _reserve(self, sequence: int, num_blocks: int) -> None:
        owned = self._owned[sequence]
        missing = num_blocks - len(owned)
        if missing <= 0:
            return
        if missing > len(self._free):
            self._grow(missing - len(self._free))
        if num_blocks > self._tables.shape[1]:
            wider = max(num_blocks, 2 * self._tables.shape[1]) - self._tables.shape[1]
            self._tables = torch.nn.functional.pad(self._tables, (0, wider))
        new = [self._free.pop() for _ in range(missing)]
        self._tables[sequence, len(owned) : num_blocks] = torch.tensor(new, dtype=torch.int32)
        owned.extend(new)

    def _grow(self, missing: int) -> None:
        """Add blocks, at least doubling, so that the cost of copying stays in proportion."""
        added = max(missing, self.num_blocks)
        for stored in (self._keys, self._values):
            for layer, blocks in enumerate(stored):
                grown = self._new_blocks(layer, self.num_blocks + added)
                grown[: self.num_blocks] = blocks
                stored[layer] = grown
        self._flat = self._flatten()
        self.version += 1
        self._free[:0] = range(self.num_blocks + added - 1, self.num_blocks - 1, -1)
        self.num_blocks += added
