"""Calibrate one decoder layer: quantize it, fix its scales on data, move the data through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.layerwise import Batch, LayerwiseModel
from quantkit.calibrate.quantized_layer import (
    InputObservers,
    InputQuantizers,
    QuantizedLinear,
    quantize_weights,
    sqnr_db,
)
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.report import LayerReport, ModuleReport


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
) -> LayerResult:
    """Calibrate the loaded layer `number`, and replace each batch's hidden states by its outputs.

    `modules` are the linears to quantize by full name; `has_kv` tells that the layer must cache
    keys and values (one that does gets scales in any case). Without batches only weights are
    quantized. Raises CalibrationError when a scale could not be fixed.
    """
    name = model.skeleton.disk_name(model.skeleton.layer_names[number])
    first_original = [output for _, output in model.run(number, batches[:1])]
    linears = quantize_weights(model.skeleton, modules, recipe.weights)
    _fix_input_scales(model, number, batches, recipe, modules, linears)
    report = LayerReport(name, [_module_report(linear) for linear in linears.values()])
    tensors = {
        f"{linear.name}.{leaf}": tensor
        for linear in linears.values()
        for leaf, tensor in linear.tensors().items()
    }
    if batches:
        observer = KvObserver(recipe.kv_spec) if recipe.kv_spec else None
        report.output_sqnr_db = _move(
            model, number, batches, recipe, modules, linears, observer, first_original[0]
        )
        if observer is not None and (has_kv or observer.owner is not None):
            scales = observer.scales(name)
            tensors.update(scales)
            report.scales = {key: scale.flatten().tolist() for key, scale in scales.items()}
    return LayerResult(tensors, report)


def _fix_input_scales(
    model: LayerwiseModel,
    number: int,
    batches: Sequence[Batch],
    recipe: Recipe,
    modules: Mapping[str, nn.Linear],
    linears: Mapping[str, QuantizedLinear],
) -> None:
    """Observe every module's input in a pass of its own; a recipe with static inputs needs it."""
    if recipe.inputs is None or recipe.inputs.dynamic:
        return
    observers = InputObservers(modules)
    for _ in model.run(number, batches):
        pass
    observers.finish(linears, recipe.inputs)


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


def _module_report(linear: QuantizedLinear) -> ModuleReport:
    rows, columns = linear.codes.shape
    return ModuleReport(linear.name, (rows, columns), linear.weight_sqnr_db, linear.input_amax)
