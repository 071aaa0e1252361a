"""The output head: quantized after the last layer, on what the quantized layers hand to it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.module_report import module_report
from quantkit.calibrate.moments import InputMoments, MomentSums
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.quantized_layer import quantize_weights
from quantkit.calibrate.report import ModuleReport


@torch.no_grad()
def quantize_head(
    plan: Plan, model: LayerwiseModel, moving: Moving
) -> tuple[dict[str, Tensor], list[ModuleReport]]:
    """Quantize the output head if the plan says so; return its tensors by disk name, and a report.

    `moving` has passed the last layer; of several processes the first quantizes. A head that is
    tied to the embedding gets a matrix of its own: an error in the embedding would go through the
    whole model.
    """
    named = _planned_head(plan, model)
    if named is None:
        return {}, []
    name, head = named
    skeleton, spec, tiers = model.skeleton, plan.recipe.weights, plan.recipe.tiers
    moments = _moments(model, moving, head) if moving and tiers.needs_data else None
    if not model.ranks.is_first:
        return {}, []
    skeleton.load(name)
    linears = quantize_weights(
        skeleton,
        {name: head},
        replace(spec, format=plan.recipe.head or spec.format),
        # One format and no columns: a head of many rows is quantized in parts.
        replace(tiers, formats=(), outlier_columns=0.0),
        {} if moments is None else {name: moments},
    )
    skeleton.unload(name)
    linear = linears[name]
    tensors = {f"{linear.name}.{leaf}": tensor for leaf, tensor in linear.tensors().items()}
    return tensors, [module_report(linear, moments.summary if moments else None)]


def _planned_head(plan: Plan, model: LayerwiseModel) -> tuple[str, nn.Linear] | None:
    """Return the head's name in the model, and the head, if the plan quantizes it."""
    outside = {module.name for module in plan.quantized if module.layer is None}
    linears = model.skeleton.linear_modules().items()
    return next(((n, m) for n, m in linears if model.skeleton.disk_name(n) in outside), None)


def _moments(model: LayerwiseModel, moving: Moving, head: nn.Linear) -> InputMoments:
    """Return the moments of what the head reads; of all processes, in the first."""
    sums = MomentSums(head.in_features, model.skeleton.device)
    for block in model.head_inputs(moving.rounds()):
        for batch, x in block:
            sums.update(x, batch.first)
        for part in model.ranks.gather(sums.take() if block else None):
            sums.merge(part)
    return sums.finish()
