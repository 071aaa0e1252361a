"""Calibrate one decoder layer: quantize it, fix its scales on data, move the data through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from quantkit.calibrate.expert_tokens import ExpertReach, add_scarce_moments, reach_unreached
from quantkit.calibrate.groups import expert_of
from quantkit.calibrate.input_ranges import InputRanges
from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.layerwise import LayerwiseModel, Watcher
from quantkit.calibrate.module_report import input_statistics, module_report
from quantkit.calibrate.moments import InputMoments, InputSummary, MomentObservers, group_name
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.passage import HeldPassage, Passage, RepeatedPassage
from quantkit.calibrate.quantized_layer import InputQuantizers, QuantizedLinear, sqnr_db
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.report import LayerReport
from quantkit.calibrate.shared_smoothing import Smoothed, smooth_shared
from quantkit.calibrate.shared_work import group_owners, quantize_shared
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.smoothed_layer import InputCollector, InputStatistics
from quantkit.scheme import QuantSpec

SAMPLED_TOKENS = 512
"""On which smoothing factors are tried."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What a layer adds to the checkpoint, by tensor names on disk, and what to report of it."""

    tensors: dict[str, Tensor]
    report: LayerReport


@dataclass(frozen=True, slots=True)
class _Task:
    """The loaded layer `number`, and what is to be done to it; see `calibrate_layer`."""

    model: LayerwiseModel
    number: int
    moving: Moving
    recipe: Recipe
    modules: Mapping[str, nn.Linear]
    owners: Mapping[str, int]


@dataclass(slots=True)
class _Found:
    """What was done to the layer so far, by full names of modules.

    output_sqnr_db: of the layer's output, None without data.
    """

    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    inputs: dict[str, InputSummary] = field(default_factory=dict)
    smoothed: Smoothed = field(default_factory=Smoothed)
    reach: list[ExpertReach] = field(default_factory=list)
    output_sqnr_db: float | None = None


def calibrate_layer(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    recipe: Recipe,
    modules: Mapping[str, nn.Linear],
    has_kv: bool,
    kv_spec: QuantSpec | None,
) -> LayerResult:
    """Calibrate the loaded layer `number`, and replace each batch's hidden states by its outputs.

    `modules` are the linears to quantize by full name; `has_kv` tells that the layer must cache
    keys and values (one that does gets scales in any case), `kv_spec` how, None leaving them as
    they are. Without batches only weights are quantized. Of several processes only the first has
    the KV scales and a complete report. Raises CalibrationError when a scale could not be fixed.
    """
    skeleton, ranks = model.skeleton, model.ranks
    name = skeleton.disk_name(skeleton.layer_names[number])
    task = _Task(model, number, moving, recipe, modules, group_owners(modules, ranks.size))
    found = _Found()
    kv = KvObserver(kv_spec) if kv_spec and moving else None
    if moving:
        _pass(task, found, kv)
    else:
        _quantize(task, found, modules, {})
    report = LayerReport(
        name,
        [
            module_report(found.linears[key], found.inputs.get(key), key in found.smoothed.gain_db)
            for key in modules
        ],
        output_sqnr_db=found.output_sqnr_db,
        smoothing=found.smoothed.lines,
        experts=found.reach,
    )
    tensors = _layer_tensors(skeleton, found)
    if not recipe.is_portable:
        tensors |= input_statistics(found.linears, found.inputs)
    if kv is not None and ranks.is_first and (has_kv or kv.owner is not None):
        scales = kv.scales(name)
        tensors |= scales
        report.kv = kv.report
        report.scales = {key: scale.flatten().tolist() for key, scale in scales.items()}
    return LayerResult(tensors, report)


def _layer_tensors(skeleton: Skeleton, found: _Found) -> dict[str, Tensor]:
    """Return what is stored of the layer's modules, by names on disk."""
    changed = {
        skeleton.source_name(parameter) or parameter: tensor
        for parameter, tensor in found.smoothed.tensors.items()
    }
    return changed | {
        f"{linear.name}.{leaf}": tensor
        for linear in found.linears.values()
        for leaf, tensor in linear.tensors().items()
    }


def _pass(task: _Task, found: _Found, kv: KvObserver | None) -> None:
    """Take the batches through the layer, quantizing its groups of modules on the way."""
    recipe, device = task.recipe, task.model.skeleton.device
    first_output, order = _first_run(task)
    stages = _stages(task, order)
    with _passage(task, stages, kv) as passage:
        quantizers = InputQuantizers(task.modules, recipe.inputs) if recipe.inputs else None
        for modules in stages or [dict(task.modules)]:
            linears = _stage(task, found, passage, modules, is_one_of_several=bool(stages))
            if quantizers is not None:
                quantizers.start(linears, device)
        if passage.repeats and quantizers is not None:
            quantizers.forget_clipped()
        found.output_sqnr_db = _move(passage, first_output)
        if quantizers is not None:
            quantizers.remove()
    if kv is not None:
        kv.merge(task.model.ranks)
    _add_clipped(found.linears, task.model.ranks)


def _first_run(task: _Task) -> tuple[list[Tensor], list[str]]:
    """Run the first batch through the layer as it is.

    Returns the output, in the first process only, and the modules in the order in which they read,
    without those that read another tensor than the first of their group.
    """
    output: list[Tensor] = []
    order: list[str] = []
    inputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        group = group_name(name, task.modules)

        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if inputs.setdefault(group, args[0]) is args[0]:
                order.append(name)

        return see

    if task.model.ranks.is_first:
        with ExitStack() as hooks, task.moving.first_batch() as batch:
            for name, module in task.modules.items():
                hooks.callback(module.register_forward_pre_hook(note(name)).remove)
            output = [output for _, output in task.model.run(task.number, [batch])]
    return output, task.model.ranks.broadcast(order)


def _stages(task: _Task, order: Sequence[str]) -> list[dict[str, nn.Linear]]:
    """Return the groups of modules in the order in which they read, if each can wait for the last.

    None can where smoothing changes all at once, nor where a module reads more than once, or only
    of some batches, as experts do.
    """
    recipe = task.recipe
    if not recipe.watches_inputs or recipe.tiers.smoothing or any(map(expert_of, task.modules)):
        return []
    groups: dict[str, dict[str, nn.Linear]] = {}
    for name in order:
        group = groups.setdefault(group_name(name, task.modules), {})
        group[name] = task.modules[name]
    return list(groups.values()) if sorted(order) == sorted(task.modules) else []


def _passage(
    task: _Task, stages: Sequence[Mapping[str, nn.Linear]], kv: KvObserver | None
) -> Passage:
    if stages and task.moving.holds:
        stops = [next(iter(modules.values())) for modules in stages]
        return HeldPassage(task.model, task.number, task.moving, stops, kv)
    return RepeatedPassage(task.model, task.number, task.moving, kv)


def _stage(
    task: _Task,
    found: _Found,
    passage: Passage,
    modules: Mapping[str, nn.Linear],
    is_one_of_several: bool,
) -> dict[str, QuantizedLinear]:
    """Quantize some modules of the layer on what they read."""
    seen = _observe(task, passage, modules, is_one_of_several)
    if seen.statistics is not None:
        found.smoothed = smooth_shared(
            task.model, task.number, task.moving, task.recipe, seen.statistics, seen.moments
        )
    linears = _quantize(task, found, modules, seen.moments)
    found.reach = seen.reach
    if task.recipe.has_static_inputs and modules:
        found.reach = _fix_input_scales(task, passage, modules, linears, seen)
    return linears


@dataclass(slots=True)
class _Seen:
    """What modules read.

    moments: of those that this process owns. ranges: of static inputs, if nothing moves them.
    """

    moments: dict[str, InputMoments] = field(default_factory=dict)
    statistics: InputStatistics | None = None
    ranges: InputRanges | None = None
    reach: list[ExpertReach] = field(default_factory=list)


def _observe(
    task: _Task, passage: Passage, modules: Mapping[str, nn.Linear], is_one_of_several: bool
) -> _Seen:
    """Watch what modules read before they are quantized.

    Their own inputs are seen before they pass through the 8-bit format: its rounding is independent
    of them and adds 0.1 % to the diagonal of the moments.
    """
    recipe, seen, watchers = task.recipe, _Seen(), list[Watcher]()
    if not modules or not (recipe.tiers.needs_data or is_one_of_several):
        return seen
    observers = collector = None
    if recipe.tiers.needs_data:
        observers = MomentObservers(modules, task.owners)
        watchers.append(observers)
    if recipe.has_static_inputs and not recipe.tiers.smoothing:
        seen.ranges = InputRanges(modules, recipe.observer_factory)
        watchers.append(seen.ranges)
    if recipe.tiers.smoothing:
        prefix = f"{task.model.skeleton.layer_names[task.number]}."
        relative = {name.removeprefix(prefix): module for name, module in modules.items()}
        collector = InputCollector(relative, max(16, SAMPLED_TOKENS // task.moving.num_batches))
        watchers.append(collector)
    passage.show(list(modules.values()), watchers)
    if observers is not None:
        seen.moments = observers.finish()
        others = [seen.ranges] if seen.ranges else []
        seen.reach = add_scarce_moments(
            task.model, task.number, task.moving, modules, observers, seen.moments, others
        )
    seen.statistics = collector.finish() if collector else None
    return seen


def _quantize(
    task: _Task,
    found: _Found,
    modules: Mapping[str, nn.Linear],
    moments: Mapping[str, InputMoments],
) -> dict[str, QuantizedLinear]:
    """Quantize the weights of modules, with moments of what they read where there are any."""
    linears, inputs = quantize_shared(
        task.model.skeleton,
        modules,
        task.recipe.weights,
        task.recipe.tiers,
        moments,
        found.smoothed.changed,
        task.owners,
        task.model.ranks,
    )
    found.linears |= linears
    found.inputs |= inputs
    return linears


def _fix_input_scales(
    task: _Task,
    passage: Passage,
    modules: Mapping[str, nn.Linear],
    linears: Mapping[str, QuantizedLinear],
    seen: _Seen,
) -> list[ExpertReach]:
    """Set static input scales, from the ranges that were watched or else in a pass of its own.

    Returns which tokens reached the experts.
    """
    ranges, reach = seen.ranges, seen.reach
    if ranges is None:
        ranges = InputRanges(modules, task.recipe.observer_factory)
        passage.show(list(modules.values()), [ranges])
        unreached = reach_unreached(
            task.model, task.number, task.moving, modules, ranges.num_tokens, [ranges]
        )
        reach = unreached or reach
    if task.recipe.inputs is not None:
        ranges.finish(linears, task.recipe.inputs, task.model.ranks)
    return reach


def _move(passage: Passage, first_original: Sequence[Tensor]) -> float:
    """Take all batches to the next layer; return the SQNR of the first one's output, in dB."""
    first_sqnr = 0.0
    for batch, output in passage.finish():
        if batch.first == 0 and first_original:
            # Against what the layer adds: the residual stream itself has a few huge channels.
            first_sqnr = sqnr_db(first_original[0] - batch.hidden, output - batch.hidden)
        batch.hidden = output
    return first_sqnr


def _add_clipped(linears: Mapping[str, QuantizedLinear], ranks: Ranks) -> None:
    """Count the clipped inputs of all processes in the first."""
    clipped = {name: each.inputs_clipped for name, each in linears.items()}
    found = ranks.gather(clipped)
    for name, linear in linears.items() if found else ():
        if linear.inputs_clipped is not None:
            linear.inputs_clipped = sum(counts[name] or 0 for counts in found)
