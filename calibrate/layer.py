"""Calibrate one decoder layer: quantize it, fix its scales on data, move the data through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantkit.calibrate.expert_tokens import ExpertReach, add_scarce_moments, reach_unreached
from quantkit.calibrate.input_ranges import InputRanges
from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.layerwise import Batch, LayerwiseModel
from quantkit.calibrate.moments import InputMoments, MomentObservers, group_name
from quantkit.calibrate.quantized_layer import (
    InputQuantizers,
    QuantizedLinear,
    quantize_weights,
    sqnr_db,
)
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.report import LayerReport, ModuleReport
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
    batches: Sequence[Batch],
    recipe: Recipe,
    modules: Mapping[str, nn.Linear],
    has_kv: bool,
    kv_spec: QuantSpec | None,
) -> LayerResult:
    """Calibrate the loaded layer `number`, and replace each batch's hidden states by its outputs.

    `modules` are the linears to quantize by full name; `has_kv` tells that the layer must cache
    keys and values (one that does gets scales in any case), `kv_spec` how, None leaving them as
    they are. Without batches only weights are quantized. Raises CalibrationError when a scale could
    not be fixed.
    """
    name = model.skeleton.disk_name(model.skeleton.layer_names[number])
    ranges = _ranges_on_the_way(recipe, modules)
    first_original, moments, statistics = _observe(model, number, batches, recipe, modules)
    reach = add_scarce_moments(model, number, batches, modules, moments) if moments else []
    smoothed = _smooth(model, number, batches, recipe, statistics, moments)
    linears = quantize_weights(
        model.skeleton, modules, recipe.weights, recipe.tiers, moments, smoothed.changed
    )
    if recipe.has_static_inputs:
        reach = _fix_input_scales(model, number, batches, recipe, linears, modules, ranges) or reach
    kv = KvObserver(kv_spec) if kv_spec and batches else None
    moved_sqnr_db = (
        _move(model, number, batches, recipe, modules, linears, kv, first_original[0])
        if batches
        else None
    )
    report = LayerReport(
        name,
        [
            module_report(linear, moments.get(key), key in smoothed.gain_db)
            for key, linear in linears.items()
        ],
        output_sqnr_db=moved_sqnr_db,
        smoothing=smoothed.lines,
        experts=reach,
    )
    tensors = _layer_tensors(model.skeleton, smoothed, linears)
    if not recipe.is_portable:
        tensors |= _input_statistics(linears, moments)
    if kv is not None and (has_kv or kv.owner is not None):
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


def _observe(
    model: LayerwiseModel,
    number: int,
    batches: Sequence[Batch],
    recipe: Recipe,
    modules: Mapping[str, nn.Linear],
) -> tuple[list[Tensor], dict[str, InputMoments], InputStatistics | None]:
    """Run the layer as it is; return its output for the first batch, and what its inputs are.

    Inputs are those that the quantized layers before produce. They do not pass through the 8-bit
    format here: its rounding is independent of them, adds 0.1 % to the diagonal of the moments,
    and takes as long as the layer itself.
    """
    if not recipe.tiers.needs_data:
        return [output for _, output in model.run(number, batches[:1])], {}, None
    observers, collector = MomentObservers(modules), None
    if recipe.tiers.smoothing:
        prefix = f"{model.skeleton.layer_names[number]}."
        relative = {name.removeprefix(prefix): module for name, module in modules.items()}
        collector = InputCollector(relative, max(16, SAMPLED_TOKENS // max(len(batches), 1)))
    first: list[Tensor] = []
    for _, output in model.run(number, batches):
        first = first or [output]
    return first, observers.finish(), collector.finish() if collector else None


@dataclass(slots=True)
class _Smoothed:
    """What smoothing did to the layer, by full names.

    changed: modules whose weights are not the source's any more. tensors: all changed parameters.
    gain_db: by target module. lines: for the report, one a pair.
    """

    changed: set[str] = field(default_factory=set)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    gain_db: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def _smooth(
    model: LayerwiseModel,
    number: int,
    batches: Sequence[Batch],
    recipe: Recipe,
    statistics: InputStatistics | None,
    moments: Mapping[str, InputMoments],
) -> _Smoothed:
    """Fold factors into the layer where that helps, and account for them in the moments."""
    found = _Smoothed()
    if statistics is None or not batches:
        return found
    layer = model.skeleton.layers[number]
    result = smooth_layer(
        layer,
        model.skeleton.model.config,
        lambda: model.output_of_few(number, batches[0]),
        statistics,
        SampledError(layer, statistics, recipe.weights, recipe.inputs),
        power_of_two=False,
        norms_only=recipe.inputs is not None and not recipe.inputs.dynamic,
    )
    prefix = f"{model.skeleton.layer_names[number]}."
    for parameter in result.changed:
        found.changed.add(f"{prefix}{parameter}".rpartition(".")[0])
        found.tensors[f"{prefix}{parameter}"] = layer.get_parameter(parameter).data
    divided: set[int] = set()
    for target, factors in result.input_factors.items():
        known = moments[f"{prefix}{target}"]
        if id(known) not in divided:  # siblings share one
            divided.add(id(known))
            known.divide(factors)
    for applied in result.applied:
        found.gain_db.update(
            dict.fromkeys((f"{prefix}{t}" for t in applied.pair.targets), applied.gain_db)
        )
        method, alpha = applied.strength
        found.lines.append(f"{applied.pair.name}: {method} {alpha}, {applied.gain_db:.2f} dB")
    found.lines += [f"{skipped.name}: skipped, {skipped.reason}" for skipped in result.skipped]
    return found


def _ranges_on_the_way(recipe: Recipe, modules: Mapping[str, nn.Linear]) -> InputRanges | None:
    """Watch the inputs for static scales in the pass that the tiers need, if nothing moves them."""
    if not recipe.has_static_inputs or not recipe.tiers.needs_data or recipe.tiers.smoothing:
        return None
    return InputRanges(modules, recipe.observer_factory)


def _fix_input_scales(
    model: LayerwiseModel,
    number: int,
    batches: Sequence[Batch],
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
        for _ in model.run(number, batches):
            pass
        reach = reach_unreached(model, number, batches, modules, dict(ranges.num_tokens))
    if recipe.inputs is not None:
        ranges.finish(linears, recipe.inputs)
    return reach


def _move(
    model: LayerwiseModel,
    number: int,
    batches: Sequence[Batch],
    recipe: Recipe,
    modules: Mapping[str, nn.Linear],
    linears: Mapping[str, QuantizedLinear],
    observer: KvObserver | None,
    first_original: Tensor,
) -> float:
    """Run the quantized layer on all batches; return the SQNR of the first, in dB."""
    quantizers = InputQuantizers(modules, linears, recipe.inputs) if recipe.inputs else None
    if observer is not None:
        observer.attach(model.skeleton.layers[number])
    first_sqnr: float | None = None
    for batch, output in model.run(number, batches, observer):
        if first_sqnr is None:
            # Against what the layer adds: the residual stream itself has a few huge channels.
            first_sqnr = sqnr_db(first_original - batch.hidden, output - batch.hidden)
        batch.hidden = output
    if observer is not None:
        observer.detach()
    if quantizers is not None:
        quantizers.remove()
    return first_sqnr if first_sqnr is not None else 0.0


def module_report(
    linear: QuantizedLinear, moments: InputMoments | None, is_smoothed: bool = False
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
        input_amax=moments.amax.max().item() if moments else linear.input_amax,
        input_range=linear.input_range,
        num_clipped=linear.num_clipped,
        inputs_clipped=linear.inputs_clipped,
        zeroed_share=linear.zeroed_share,
        outlier_columns=0 if linear.columns is None else len(linear.columns),
        bytes=sum(tensor.nbytes for tensor in linear.tensors().values()),
    )
    return report if moments is None else _with_inputs(report, moments)


def _input_statistics(
    linears: Mapping[str, QuantizedLinear], moments: Mapping[str, InputMoments]
) -> dict[str, Tensor]:
    """Return what the inputs of each fused group carry, for whoever rounds the weights again."""
    return {
        f"{linear.name}.{INPUT_MEAN_SQUARE}": moments[key].rms.square().cpu()
        for key, linear in linears.items()
        if key in moments and group_name(key, linears) == key
    }


def _with_inputs(report: ModuleReport, moments: InputMoments) -> ModuleReport:
    """Add where the outliers of the module's input are."""
    rms = moments.rms
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
