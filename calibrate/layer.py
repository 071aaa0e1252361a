"""Calibrate one decoder layer: quantize it, fix its scales on data, move the data through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantkit.calibrate.expert_tokens import ExpertReach, add_scarce_moments, reach_unreached
from quantkit.calibrate.input_ranges import InputRanges
from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.layerwise import LayerwiseModel, Watcher
from quantkit.calibrate.moments import InputMoments, InputSummary, MomentObservers, group_name
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.quantized_layer import InputQuantizers, QuantizedLinear, sqnr_db
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.report import LayerReport, ModuleReport
from quantkit.calibrate.shared_work import group_owners, quantize_shared
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.smoothed_layer import (
    InputCollector,
    InputStatistics,
    SampledError,
    smooth_layer,
)
from quantkit.checkpoint import INPUT_MEAN_SQUARE
from quantkit.scheme import QuantSpec

SMOOTHING = "smoothing"
SAMPLED_TOKENS = 512
"""On which smoothing factors are tried."""
TOP_CHANNELS = 8
"""Input channels that the report names."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What a layer adds to the checkpoint, by tensor names on disk, and what to report of it."""

    tensors: dict[str, Tensor]
    report: LayerReport


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
    owners = group_owners(modules, ranks.size)
    seen = _observe(model, number, moving, recipe, modules, owners)
    smoothed = _smooth(model, number, moving, recipe, seen)
    linears, inputs = quantize_shared(
        skeleton,
        modules,
        recipe.weights,
        recipe.tiers,
        seen.moments,
        smoothed.changed,
        owners,
        ranks,
    )
    reach = seen.reach
    if recipe.has_static_inputs:
        fixed = _fix_input_scales(model, number, moving, recipe, linears, modules, seen.ranges)
        reach = fixed or reach
    kv = KvObserver(kv_spec) if kv_spec and moving else None
    moved_sqnr_db = (
        _move(model, number, moving, recipe, modules, linears, kv, seen.first_output)
        if moving
        else None
    )
    report = LayerReport(
        name,
        [
            module_report(linear, inputs.get(key), key in smoothed.gain_db)
            for key, linear in linears.items()
        ],
        output_sqnr_db=moved_sqnr_db,
        smoothing=smoothed.lines,
        experts=reach,
    )
    tensors = _layer_tensors(skeleton, smoothed, linears)
    if not recipe.is_portable:
        tensors |= _input_statistics(linears, inputs)
    if kv is not None and ranks.is_first and (has_kv or kv.owner is not None):
        scales = kv.scales(name)
        tensors |= scales
        report.kv = kv.report
        report.scales = {key: scale.flatten().tolist() for key, scale in scales.items()}
    return LayerResult(tensors, report)


def _layer_tensors(
    skeleton: Skeleton, smoothed: _Smoothed, linears: Mapping[str, QuantizedLinear]
) -> dict[str, Tensor]:
    """Return what is stored of the layer's modules, by names on disk."""
    changed = {
        skeleton.source_name(parameter) or parameter: tensor
        for parameter, tensor in smoothed.tensors.items()
    }
    return changed | {
        f"{linear.name}.{leaf}": tensor
        for linear in linears.values()
        for leaf, tensor in linear.tensors().items()
    }


@dataclass(slots=True)
class _Seen:
    """What a layer's inputs are, before it is quantized.

    first_output: the layer's output for the first batch; empty where another process has it.
    moments: of the modules that this process owns. ranges: of static inputs, if nothing moves them.
    """

    first_output: list[Tensor] = field(default_factory=list)
    moments: dict[str, InputMoments] = field(default_factory=dict)
    statistics: InputStatistics | None = None
    ranges: InputRanges | None = None
    reach: list[ExpertReach] = field(default_factory=list)


def _observe(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    recipe: Recipe,
    modules: Mapping[str, nn.Linear],
    owners: Mapping[str, int],
) -> _Seen:
    """Run the layer as it is and watch what its linears read.

    Inputs are those that the quantized layers before produce. They do not pass through the 8-bit
    format here: its rounding is independent of them, adds 0.1 % to the diagonal of the moments,
    and takes as long as the layer itself.
    """
    seen = _Seen()
    if not moving or not recipe.tiers.needs_data:
        if moving and model.ranks.is_first:
            with moving.first_batch() as first:
                seen.first_output = [output for _, output in model.run(number, [first])]
        return seen
    observers, collector = MomentObservers(modules, owners), None
    watchers: list[Watcher] = [observers]
    if recipe.has_static_inputs and not recipe.tiers.smoothing:
        seen.ranges = InputRanges(modules, recipe.observer_factory)
        watchers.append(seen.ranges)
    if recipe.tiers.smoothing:
        prefix = f"{model.skeleton.layer_names[number]}."
        relative = {name.removeprefix(prefix): module for name, module in modules.items()}
        collector = InputCollector(relative, max(16, SAMPLED_TOKENS // moving.num_batches))
        watchers.append(collector)
    for batch, output in model.observe(number, moving.rounds(), watchers, modules.values()):
        if batch.first == 0 and output is not None:
            seen.first_output = [output]
    seen.moments = observers.finish()
    seen.statistics = collector.finish() if collector else None
    others = [seen.ranges] if seen.ranges else []
    seen.reach = add_scarce_moments(model, number, moving, modules, observers, seen.moments, others)
    return seen


@dataclass(slots=True)
class _Smoothed:
    """What smoothing did to the layer, by full names.

    changed: modules whose weights are not the source's any more. tensors: all changed parameters.
    input_factors: what the inputs of a module are divided by. gain_db: by target module. lines: for
    the report, one a pair.
    """

    changed: set[str] = field(default_factory=set)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    input_factors: dict[str, Tensor] = field(default_factory=dict)
    gain_db: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def _smooth(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    recipe: Recipe,
    seen: _Seen,
) -> _Smoothed:
    """Fold factors into the layer where that helps, and account for them in the moments."""
    if seen.statistics is None:
        return _Smoothed()
    ranks, layer = model.ranks, model.skeleton.layers[number]
    found = ranks.broadcast(
        _find_factors(model, number, moving, recipe, seen.statistics) if ranks.is_first else None
    )
    assert found is not None
    if not ranks.is_first:
        prefix = f"{model.skeleton.layer_names[number]}."
        for name, tensor in found.tensors.items():
            layer.get_parameter(name.removeprefix(prefix)).data = tensor
    divided: set[int] = set()
    for name, factors in found.input_factors.items():
        known = seen.moments.get(name)
        if known is not None and id(known) not in divided:  # siblings share one
            divided.add(id(known))
            known.divide(factors)
    return found


def _find_factors(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    recipe: Recipe,
    statistics: InputStatistics,
) -> _Smoothed:
    """Fold factors into the layer where that helps."""
    found, layer = _Smoothed(), model.skeleton.layers[number]
    with moving.first_batch() as first:
        result = smooth_layer(
            layer,
            model.skeleton.model.config,
            lambda: model.output_of_few(number, first),
            statistics,
            SampledError(layer, statistics, recipe.weights, recipe.inputs),
            power_of_two=False,
            norms_only=recipe.inputs is not None and not recipe.inputs.dynamic,
        )
    prefix = f"{model.skeleton.layer_names[number]}."
    for parameter in result.changed:
        found.changed.add(f"{prefix}{parameter}".rpartition(".")[0])
        found.tensors[f"{prefix}{parameter}"] = layer.get_parameter(parameter).data
    found.input_factors = {f"{prefix}{t}": each for t, each in result.input_factors.items()}
    for applied in result.applied:
        found.gain_db.update(
            dict.fromkeys((f"{prefix}{t}" for t in applied.pair.targets), applied.gain_db)
        )
        method, alpha = applied.strength
        found.lines.append(f"{applied.pair.name}: {method} {alpha}, {applied.gain_db:.2f} dB")
    found.lines += [f"{skipped.name}: skipped, {skipped.reason}" for skipped in result.skipped]
    return found


def _fix_input_scales(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    recipe: Recipe,
    linears: Mapping[str, QuantizedLinear],
    modules: Mapping[str, nn.Linear],
    ranges: InputRanges | None,
) -> list[ExpertReach]:
    """Set static input scales, from the `ranges` that were watched or else in a pass of its own.

    Returns which tokens reached the experts in that pass.
    """
    reach: list[ExpertReach] = []
    if ranges is None:
        ranges = InputRanges(modules, recipe.observer_factory)
        for _ in model.observe(number, moving.rounds(), [ranges], modules.values()):
            pass
        reach = reach_unreached(model, number, moving, modules, ranges.num_tokens, [ranges])
    if recipe.inputs is not None:
        ranges.finish(linears, recipe.inputs, model.ranks)
    return reach


def _move(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    recipe: Recipe,
    modules: Mapping[str, nn.Linear],
    linears: Mapping[str, QuantizedLinear],
    observer: KvObserver | None,
    first_original: Sequence[Tensor],
) -> float:
    """Run the quantized layer on all batches; return the SQNR of the first, in dB."""
    quantizers = InputQuantizers(modules, linears, recipe.inputs) if recipe.inputs else None
    if observer is not None:
        observer.attach(model.skeleton.layers[number])
    first_sqnr = 0.0
    for batch, output in model.watch(number, moving.rounds(moves=True), observer=observer):
        if batch.first == 0 and first_original:
            # Against what the layer adds: the residual stream itself has a few huge channels.
            first_sqnr = sqnr_db(first_original[0] - batch.hidden, output - batch.hidden)
        batch.hidden = output
    if observer is not None:
        observer.detach()
        observer.merge(model.ranks)
    if quantizers is not None:
        quantizers.remove()
    _add_clipped(linears, model.ranks)
    return first_sqnr


def _add_clipped(linears: Mapping[str, QuantizedLinear], ranks: Ranks) -> None:
    """Count the clipped inputs of all processes in the first."""
    clipped = {name: each.inputs_clipped for name, each in linears.items()}
    found = ranks.gather(clipped)
    for name, linear in linears.items() if found else ():
        if linear.inputs_clipped is not None:
            linear.inputs_clipped = sum(counts[name] or 0 for counts in found)


def module_report(
    linear: QuantizedLinear, inputs: InputSummary | None, is_smoothed: bool = False
) -> ModuleReport:
    """Return what to report of a linear module, and of its input where that was observed."""
    rows, columns = linear.codes.shape
    report = ModuleReport(
        name=linear.name,
        shape=(rows, columns),
        tiers=((SMOOTHING, *linear.tiers) if is_smoothed else linear.tiers),
        format=linear.spec.format,
        weight_sqnr_db=linear.weight_sqnr_db,
        plain_output_sqnr_db=linear.plain_output_sqnr_db,
        output_sqnr_db=linear.output_sqnr_db,
        outlier_ratio=linear.outlier_ratio,
        input_amax=inputs.amax if inputs else linear.input_amax,
        input_range=linear.input_range,
        num_clipped=linear.num_clipped,
        inputs_clipped=linear.inputs_clipped,
        zeroed_share=linear.zeroed_share,
        outlier_columns=0 if linear.columns is None else len(linear.columns),
        bytes=sum(tensor.nbytes for tensor in linear.tensors().values()),
    )
    return report if inputs is None else _with_inputs(report, inputs)


def _input_statistics(
    linears: Mapping[str, QuantizedLinear], inputs: Mapping[str, InputSummary]
) -> dict[str, Tensor]:
    """Return what the inputs of each fused group carry, for whoever rounds the weights again."""
    return {
        f"{linear.name}.{INPUT_MEAN_SQUARE}": inputs[key].rms.square()
        for key, linear in linears.items()
        if key in inputs and group_name(key, linears) == key
    }


def _with_inputs(report: ModuleReport, inputs: InputSummary) -> ModuleReport:
    """Add where the outliers of the module's input are."""
    rms = inputs.rms
    middle = rms.median().item()
    largest = torch.topk(rms, min(TOP_CHANNELS, len(rms)))
    return replace(
        report,
        input_outlier_ratio=rms.max().item() / middle if middle > 0 else None,
        top_input_channels=tuple(
            (channel, value)
            for channel, value in zip(
                largest.indices.tolist(), largest.values.tolist(), strict=True
            )
        ),
    )
