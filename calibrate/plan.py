"""What a calibration run will do, before it does it: modules, bytes, memory, time.

Making a plan opens the source and checks it against the recipe, and changes nothing on disk.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from quantkit.calibrate.estimates import memory_bytes, seconds
from quantkit.calibrate.kv_layers import ignored_layers
from quantkit.calibrate.moments import group_name
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.selection import resolve_modules
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.source import ModelSource
from quantkit.checkpoint import cached_layers
from quantkit.errors import SourceError, UnsupportedError
from quantkit.scheme import Granularity

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One linear module: name as on disk, weight shape [out, in], and its bytes before and after.

    `layer` is the decoder layer's number, None outside the layers.
    """

    name: str
    shape: tuple[int, int]
    layer: int | None
    quantized: bool
    source_bytes: int
    target_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved modules, and estimates for the whole run (bytes; seconds on this machine)."""

    source_name: str
    recipe: Recipe
    modules: tuple[ModulePlan, ...]
    source_bytes: int
    target_bytes: int
    memory_bytes: int
    seconds: float
    num_layers: int
    warnings: tuple[str, ...] = ()
    kv_ignored: tuple[int, ...] = ()  # layers that keep keys and values as they are

    @property
    def quantized(self) -> list[ModulePlan]:
        """Modules that become FP8."""
        return [module for module in self.modules if module.quantized]

    @property
    def is_portable(self) -> bool:
        """Tell whether every engine loads the result: one KV scale a layer, head not quantized."""
        inside = all(module.layer is not None for module in self.quantized)
        return inside and self.recipe.is_portable and self.recipe.kv != "fp8-head"

    def keeping(self, names: Collection[str]) -> Plan:
        """Return the plan with some of its quantized modules left as they are."""
        modules = tuple(
            replace(module, quantized=False, target_bytes=module.source_bytes)
            if module.name in names
            else module
            for module in self.modules
        )
        more = sum(m.target_bytes for m in modules) - sum(m.target_bytes for m in self.modules)
        return replace(self, modules=modules, target_bytes=self.target_bytes + more)

    @property
    def ignored(self) -> list[str]:
        """On-disk names of the linear modules that stay as they are."""
        return [module.name for module in self.modules if not module.quantized]


def make_plan(
    skeleton: Skeleton, recipe: Recipe, num_samples: int, seq_len: int, batch_size: int
) -> Plan:
    """Resolve the recipe against the model and estimate the run.

    Raises RecipeError when the two do not fit, SourceError for a stale tied head.
    """
    modules = _plan_modules(skeleton, recipe)
    others = _plan_held_otherwise(skeleton)
    modules += others
    source = skeleton.source
    source_bytes = sum(_nbytes(source, name) for name in source.names)
    saved = sum(m.source_bytes - m.target_bytes for m in modules if m.quantized)
    kv_ignored: tuple[int, ...] = ()
    if recipe.kv_spec is not None:
        kv_ignored = ignored_layers(recipe.kv_ignore, skeleton.model.config.to_dict())
    kv_bytes = _kv_bytes(skeleton, recipe, len(kv_ignored))
    target_bytes = source_bytes - saved + kv_bytes - _dropped_bytes(skeleton)
    target_bytes += _statistics_bytes(modules, recipe)
    tokens = num_samples * seq_len if recipe.needs_data else 0
    return Plan(
        source_name=source.name,
        recipe=recipe,
        modules=tuple(modules),
        source_bytes=source_bytes,
        target_bytes=target_bytes,
        memory_bytes=memory_bytes(skeleton, modules, recipe, tokens, target_bytes),
        seconds=seconds(skeleton, modules, recipe, tokens, batch_size * seq_len),
        num_layers=len(skeleton.layers),
        warnings=_warnings(skeleton, others),
        kv_ignored=kv_ignored,
    )


def _plan_modules(skeleton: Skeleton, recipe: Recipe) -> list[ModulePlan]:
    linears = skeleton.linear_modules()
    layer_of = {name: _layer_number(skeleton, name) for name in linears}
    head_module = skeleton.model.get_output_embeddings()
    head = skeleton.name_of(head_module) if head_module is not None else "lm_head"
    check_tied_head(skeleton)
    tied = skeleton.tied_head is not None
    known = [n for n in linears if skeleton.source_name(f"{n}.weight") or (tied and n == head)]
    # Engines quantize what is inside the layers, and the head where it is asked for.
    routers = skeleton.routers()
    eligible = [name for name in known if layer_of[name] is not None or name == head]
    eligible = [name for name in eligible if name not in routers]
    if all(name == head for name in eligible):
        raise UnsupportedError(
            f"{type(skeleton.model).__name__} has no linear module in its decoder layers that is "
            "stored as one (Conv1D, fused or renamed weights are not quantized yet)"
        )
    disk_names = {name: skeleton.disk_name(name) for name in (*eligible, *sorted(routers), head)}
    quantized, _ = resolve_modules(
        recipe,
        [disk_names[name] for name in eligible],
        tied_head=tied and recipe.head is None,
        head=disk_names[head],
        unquantized=[disk_names[name] for name in sorted(routers)],
    )
    chosen = {name for name in eligible if disk_names[name] in quantized}
    if recipe.head is not None:
        chosen.add(head)
    if head in chosen and recipe.inputs is not None and not recipe.inputs.dynamic:
        raise UnsupportedError(
            f"{head} cannot be quantized with static inputs: nothing outside the decoder layers is "
            "observed; ignore it, or use dynamic inputs"
        )
    return [_plan_module(skeleton, n, layer_of[n], n in chosen, recipe) for n in known]


def _plan_held_otherwise(skeleton: Skeleton) -> list[ModulePlan]:
    """Plan the weights that engines run as linear layers and transformers holds in another form.

    Routers, for instance, and experts in a form that is not split. They stay as they are, and
    engines must be told so.
    """
    source = skeleton.source
    stored_of = {name: skeleton.source_name(name) for name, _ in skeleton.model.named_parameters()}
    # A tied head has its weight under the name of the embedding.
    planned = {stored_of.get(f"{name}.weight") for name in skeleton.linear_modules()} - {None}
    prefixes, plans = _stored_prefixes(skeleton), []
    for name in source.names:
        shape = source.shape(name)
        if not name.endswith(".weight") or len(shape) != 2 or name in planned:
            continue
        layer = _number_by_prefix(prefixes, name)
        if layer is None and name in stored_of.values():
            continue  # embeddings
        size, module = _nbytes(source, name), name.removesuffix(".weight")
        plans.append(ModulePlan(module, (shape[0], shape[1]), layer, False, size, size))
    return plans + _plan_fused_experts(skeleton)


def _plan_fused_experts(skeleton: Skeleton) -> list[ModulePlan]:
    """Plan experts that are not split, under the names of their lists; shapes are of all rows."""
    source, stored = skeleton.source, dict[str, list[str]]()
    for name, module in skeleton.fused_experts().items():
        for leaf, _ in module.named_parameters():
            tensor = skeleton.source_name(f"{name}.{leaf}")
            if tensor is not None:  # else each expert is stored, and planned, by itself
                stored.setdefault(_list_name(tensor), []).append(tensor)
    prefixes, plans = _stored_prefixes(skeleton), []
    for name, tensors in stored.items():
        size = sum(_nbytes(source, tensor) for tensor in tensors)
        matrices = [shape for shape in map(source.shape, tensors) if len(shape) == 3]
        columns = matrices[0][-1]
        rows = sum(prod(shape) for shape in matrices) // columns
        layer = _number_by_prefix(prefixes, name)
        plans.append(ModulePlan(name, (rows, columns), layer, False, size, size))
    return plans


def _list_name(tensor: str) -> str:
    """Return what a tensor's name calls a list of experts: the name up to that word."""
    found = re.match(r".*\bexperts\b", tensor)
    return found[0] if found else tensor.removesuffix(".weight")


def _warnings(skeleton: Skeleton, others: Sequence[ModulePlan]) -> tuple[str, ...]:
    routers = {skeleton.disk_name(name) for name in skeleton.routers()}
    inside = [m.name for m in others if m.layer is not None and m.name not in routers]
    if not inside:
        return ()
    names = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
    return (
        f"{len(inside)} weights of {skeleton.source.name} stay as they are, because transformers "
        "does not hold them as linear modules, or engines have no names for the parts (experts "
        f"with biases, transposed or without gate): {names}",
    )


def _plan_module(
    skeleton: Skeleton, name: str, layer: int | None, quantized: bool, recipe: Recipe
) -> ModulePlan:
    weight = skeleton.model.get_parameter(f"{name}.weight")
    rows, columns = weight.shape
    stored = skeleton.source_name(f"{name}.weight")
    source_bytes = _nbytes(skeleton.source, stored) if stored else 0
    target_bytes = source_bytes
    if quantized:
        target_bytes = rows * columns + SCALE_BYTES * prod(
            recipe.weights.scale_shape(rows, columns)
        )
        if recipe.inputs is not None and not recipe.inputs.dynamic:
            target_bytes += SCALE_BYTES
    disk_name = skeleton.disk_name(name)
    return ModulePlan(disk_name, (rows, columns), layer, quantized, source_bytes, target_bytes)


def check_tied_head(skeleton: Skeleton) -> None:
    """Raise SourceError if a tied head is stored a second time with other values."""
    copy = redundant_head(skeleton)
    if copy is None:
        return
    head, embedding = copy
    source = skeleton.source
    if not torch.equal(source.tensor(head), source.tensor(embedding)):
        raise SourceError(
            f"{source.name} ties {head} to {embedding} (tie_word_embeddings) but stores different "
            "values in them; set tie_word_embeddings to false if both are meant, or remove one"
        )


def redundant_head(skeleton: Skeleton) -> tuple[str, str] | None:
    """Return the source's names of (head, embedding) if a tied head is stored a second time."""
    if skeleton.tied_head is None:
        return None
    head, embedding = (skeleton.source_name(name) for name in skeleton.tied_head)
    return (head, embedding) if head and embedding and head != embedding else None


def _kv_bytes(skeleton: Skeleton, recipe: Recipe, num_ignored: int) -> int:
    """Return the bytes of all KV scales."""
    if recipe.kv_spec is None:
        return 0
    config = skeleton.model.config.get_text_config()
    scales = 1
    if recipe.kv_spec.granularity is Granularity.HEAD:
        scales = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layers = len(cached_layers(skeleton.model.config.to_dict())) - num_ignored
    return 2 * SCALE_BYTES * scales * layers


def _statistics_bytes(modules: Sequence[ModulePlan], recipe: Recipe) -> int:
    """Return the bytes of what a native checkpoint tells about inputs, one a fused group."""
    if recipe.is_portable or not recipe.tiers.needs_data:
        return 0
    inside = {m.name: m.shape[1] for m in modules if m.quantized and m.layer is not None}
    return sum(SCALE_BYTES * k for name, k in inside.items() if group_name(name, inside) == name)


def _dropped_bytes(skeleton: Skeleton) -> int:
    copy = redundant_head(skeleton)
    return _nbytes(skeleton.source, copy[0]) if copy else 0


def _layer_number(skeleton: Skeleton, name: str) -> int | None:
    for number, layer in enumerate(skeleton.layer_names):
        if name.startswith(f"{layer}."):
            return number
    return None


def _stored_prefixes(skeleton: Skeleton) -> dict[str, int]:
    """Return the layers' numbers by what the names of their tensors begin with in the source."""
    return {f"{skeleton.disk_name(n)}.": i for i, n in enumerate(skeleton.layer_names)}


def _number_by_prefix(prefixes: Mapping[str, int], name: str) -> int | None:
    return next((i for prefix, i in prefixes.items() if name.startswith(prefix)), None)


def _nbytes(source: ModelSource, name: str) -> int:
    return prod(source.shape(name)) * source.dtype(name).itemsize
