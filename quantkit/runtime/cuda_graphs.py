"""CUDA graphs of decoder steps: a step is recorded once per shape and then replayed.

Launching some ten kernels a layer from Python takes longer than a small batch's kernels run. What
differs between steps of one shape (tokens, positions, slots, tables, lengths) lives in one buffer
that is filled before a replay; kernels read lengths on the device and leave where there is nothing
to do. Nothing here knows what a step computes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quantkit.runtime.kv_cache import CacheStep, PagedCache
from quantkit.runtime.sending import send

MAX_GRAPHS: Final = 16
"""Graphs kept for one cache; the one not used for longest goes first. Each holds activations."""

RunStep = Callable[[Tensor, PagedCache, CacheStep], Tensor]
"""(token ids, cache, step), on the device -> [num_tokens, hidden_size]."""

Shape = tuple[int, int, int, int]
"""Version of the cache's storage, new tokens, sequences, width of the block tables."""


class StepInputs:
    """What changes between steps of one shape: views of one buffer, and its mirror in host memory.

    Everything goes over in one copy; `ids` int64 [num_tokens], `step` as CacheStep says.
    """

    def __init__(self, template: CacheStep, max_blocks: int, device: torch.device) -> None:
        tokens, sequences = template.num_tokens, len(template.sequences)
        sizes = (tokens, tokens, tokens, sequences * max_blocks, sequences, sequences + 1)
        widths = (8, 8, 8, 4, 4, 4)
        total = sum(width * size for width, size in zip(widths, sizes, strict=True))
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._host_views = [view.numpy() for view in _views(self._host, sizes, widths)]
        ids, positions, slots, tables, lengths, starts = _views(self._device, sizes, widths)
        self.ids = ids
        self.step = replace(
            template,
            positions=positions,
            slots=slots,
            block_tables=tables.view(sequences, max_blocks),
            lengths=lengths,
            query_starts=starts,
        )

    def fill(self, input_ids: Tensor, step: CacheStep) -> None:
        """Send a step of the same shape to the device; its tensors are on the CPU."""
        self._copied.synchronize()  # the last copy may still be reading the mirror
        ids, positions, slots, tables, lengths, starts = self._host_views
        ids[:] = input_ids.numpy(force=True)
        positions[:] = step.positions.numpy()
        slots[:] = step.slots.numpy()
        width = step.block_tables.shape[1]
        tables.reshape(len(lengths), -1)[:, :width] = step.block_tables.numpy()
        lengths[:] = step.lengths.numpy()
        starts[:] = step.query_starts.numpy()
        self._device.copy_(self._host, non_blocking=True)
        self._copied.record()


def _views(buffer: Tensor, sizes: tuple[int, ...], widths: tuple[int, ...]) -> list[Tensor]:
    views, at = [], 0
    for size, width in zip(sizes, widths, strict=True):
        dtype = torch.int64 if width == 8 else torch.int32
        views.append(buffer[at : at + width * size].view(dtype))
        at += width * size
    return views


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A recorded step; `hidden` is where a replay leaves its result, until the next one."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    hidden: Tensor


class StepGraphs:
    """Runs the steps of one decoder, from graphs where that is possible.

    The first step of a shape runs as it is, which also sets up what libraries allocate lazily; the
    second is recorded. A cache that has grown is another one: its graphs are recorded again.
    """

    def __init__(self, run: RunStep, device: torch.device) -> None:
        self._run = run
        self._device = device
        self._by_cache: WeakKeyDictionary[PagedCache, OrderedDict[Shape, StepGraph | None]] = (
            WeakKeyDictionary()
        )

    def run(self, input_ids: Tensor, cache: PagedCache, step: CacheStep) -> Tensor:
        """Append tokens to the cache; the result is valid until the next call of the same shape.

        Shapes: input_ids int64 [num_tokens] on any device, the step's tensors on the CPU ->
        [num_tokens, hidden_size] on the device.
        """
        graphs = self._by_cache.setdefault(cache, OrderedDict())
        shape = (cache.version, step.num_tokens, len(step.sequences), cache.max_blocks)
        if step.is_prefill or shape not in graphs:
            if not step.is_prefill:
                graphs[shape] = None
            return self._run(send(input_ids, self._device), cache, step.to(self._device))
        recorded = graphs[shape] or self._record(input_ids, cache, step)
        graphs[shape] = recorded
        graphs.move_to_end(shape)
        if len(graphs) > MAX_GRAPHS:
            graphs.popitem(last=False)
        recorded.inputs.fill(input_ids, step)
        recorded.graph.replay()
        return recorded.hidden

    def _record(self, input_ids: Tensor, cache: PagedCache, step: CacheStep) -> StepGraph:
        inputs = StepInputs(step, cache.max_blocks, self._device)
        inputs.fill(input_ids, step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = self._run(inputs.ids, cache, inputs.step)
        return StepGraph(graph, inputs, hidden)
