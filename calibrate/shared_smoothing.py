"""Smoothing of one loaded layer, in all processes alike, by full names of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.moments import InputMoments
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.smoothed_layer import InputStatistics, SampledError, smooth_layer


@dataclass(slots=True)
class Smoothed:
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


def smooth_shared(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    recipe: Recipe,
    statistics: InputStatistics,
    moments: Mapping[str, InputMoments],
) -> Smoothed:
    """Fold factors into layer `number` where that helps, and account for them in `moments`.

    `statistics` are known to the first process, which decides; `moments` are those of the modules
    that this process owns.
    """
    ranks, layer = model.ranks, model.skeleton.layers[number]
    found = ranks.broadcast(
        _find_factors(model, number, moving, recipe, statistics) if ranks.is_first else None
    )
    assert found is not None
    if not ranks.is_first:
        prefix = f"{model.skeleton.layer_names[number]}."
        for name, tensor in found.tensors.items():
            layer.get_parameter(name.removeprefix(prefix)).data = tensor
    divided: set[int] = set()
    for name, factors in found.input_factors.items():
        known = moments.get(name)
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
) -> Smoothed:
    """Fold factors into the layer where that helps."""
    found, layer = Smoothed(), model.skeleton.layers[number]
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
