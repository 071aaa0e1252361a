"""What a calibration run will need: memory, and time on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from quantkit.calibrate.groups import expert_of
from quantkit.calibrate.moments import group_name
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.skeleton import Skeleton
from quantkit.shards import MAX_SHARD_BYTES

if TYPE_CHECKING:
    from quantkit.calibrate.plan import ModulePlan

MOMENT_BYTES = 2 * 4
"""Of an element: moments that are fitted and moments that are held out, in float32."""


def memory_bytes(
    skeleton: Skeleton,
    modules: Sequence[ModulePlan],
    recipe: Recipe,
    tokens: int,
    target_bytes: int,
) -> int:
    """Estimate the peak beyond the mapped source: two layers, hidden states, one shard.

    Where there is less, hidden states go to the disk, and what is inside a layer is not kept.

    Second moments of inputs only count where they are many: each expert has its own.
    """
    by_layer: dict[int | None, int] = {}
    for module in modules:
        by_layer[module.layer] = by_layer.get(module.layer, 0) + prod(module.shape)
    layer = max((size for number, size in by_layer.items() if number is not None), default=0)
    hidden = hidden_bytes(skeleton, tokens)
    if stops_inside(skeleton, recipe):
        hidden += held_bytes(skeleton, modules, tokens)
    moments = _moment_bytes(modules) if recipe.tiers.needs_data else 0
    return (
        2 * layer * skeleton.dtype.itemsize + hidden + moments + min(target_bytes, MAX_SHARD_BYTES)
    )


def hidden_bytes(skeleton: Skeleton, tokens: int) -> int:
    """Return the bytes of what enters a layer, for so many tokens."""
    hidden_size = int(skeleton.model.config.get_text_config().hidden_size)
    return tokens * hidden_size * skeleton.dtype.itemsize


def held_bytes(skeleton: Skeleton, modules: Sequence[ModulePlan], tokens: int) -> int:
    """Estimate what batches of so many tokens carry, beyond what entered, where they stop inside.

    That is the residual and the normed stream, and queries, keys and values or the widest input.
    """
    hidden = hidden_bytes(skeleton, tokens)
    widest = max((m.shape[1] for m in modules if m.layer is not None), default=0)
    return 2 * hidden + max(3 * hidden, tokens * widest * skeleton.dtype.itemsize)


def stops_inside(skeleton: Skeleton, recipe: Recipe) -> bool:
    """Tell whether batches stop inside the layers, for each group of modules to be quantized."""
    return recipe.watches_inputs and not recipe.tiers.smoothing and not skeleton.has_experts


def _moment_bytes(modules: Sequence[ModulePlan]) -> int:
    """Return the bytes of the moments of all experts' inputs, in the layer that has most."""
    names = {module.name for module in modules}
    by_layer: dict[int | None, int] = {}
    for module in modules:
        reads_first = group_name(module.name, names) == module.name  # siblings share one record
        if module.quantized and reads_first and expert_of(module.name):
            size = MOMENT_BYTES * module.shape[1] ** 2
            by_layer[module.layer] = by_layer.get(module.layer, 0) + size
    return max(by_layer.values(), default=0)


def seconds(
    skeleton: Skeleton,
    modules: Sequence[ModulePlan],
    recipe: Recipe,
    tokens: int,
    batch_tokens: int,
) -> float:
    """Estimate the run from the speed of this machine's matmul at the model's own shapes."""
    shapes = [module.shape for module in modules if module.layer is not None]
    passes = 2 if recipe.watches_inputs and not stops_inside(skeleton, recipe) else 1
    flops = 2.0 * tokens * _weights_a_token(skeleton, modules) * passes
    if not shapes or not flops:
        return 0.0
    largest = max(shapes, key=prod)
    rate = _matmul_rate(largest, min(batch_tokens, 1024), skeleton.dtype, skeleton.device)
    # Attention, norms and the quantization of inputs take about as long again as the matmuls.
    return 2.0 * flops / rate


def _weights_a_token(skeleton: Skeleton, modules: Sequence[ModulePlan]) -> float:
    """Return how many weights of the layers a token is multiplied with: few experts see it."""
    counts = Counter(e[::2] for m in modules if (e := expert_of(m.name)))  # by list and leaf
    chosen = getattr(skeleton.model.config.get_text_config(), "num_experts_per_tok", None)
    total = 0.0
    for module in modules:
        expert = expert_of(module.name)
        share = min(1.0, chosen / counts[expert[::2]]) if expert and chosen else 1.0
        total += share * prod(module.shape) if module.layer is not None else 0.0
    return total


def _matmul_rate(
    shape: tuple[int, int], tokens: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Measure flop/s of one linear layer."""
    x = torch.ones(tokens, shape[1], dtype=dtype, device=device)
    weight = torch.ones(shape, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        result: Any = torch.nn.functional.linear(x, weight)
        result[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2.0 * tokens * prod(shape) / best
