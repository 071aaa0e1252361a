"""What every process of a run does alike, from the tokens to the last layer.

The first process also reads the data, decides, writes and keeps the journal, see `pipeline`; all
others do only what is here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.batches import make_batches
from quantkit.calibrate.budget import keep_sensitive, quantized_linears
from quantkit.calibrate.estimates import stops_inside
from quantkit.calibrate.head import quantize_head
from quantkit.calibrate.layer import LayerResult, calibrate_layer
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.report import Report
from quantkit.calibrate.sensitivity import Sensitivity
from quantkit.calibrate.setup import Setup
from quantkit.checkpoint import cached_layers
from quantkit.errors import CheckpointError
from quantkit.staging import beside

logger = logging.getLogger("quantkit")


@dataclass(frozen=True, slots=True)
class SharedWork:
    """What the first process tells the others before the layers.

    ids: all samples, int64 [tokens] each. num_finished: layers that an earlier run has finished.
    num_kept: from this layer on nothing is kept of what enters it.
    """

    ids: Sequence[Tensor]
    num_finished: int
    num_kept: int


def start(
    setup: Setup, model: LayerwiseModel, work: SharedWork, folder: Path
) -> tuple[list[Tensor], Moving]:
    """Return all batches of ids, and this process's own at the door of the first layer.

    `folder` is where they live between layers if they do not fit in memory.
    """
    batches = make_batches(work.ids, setup.batch_size)
    if not batches:
        return [], Moving.of([])
    num_tokens = sum(ids.numel() for ids in batches)
    spills = any(model.ranks.share(setup.spills(model.ranks, num_tokens)))
    holds = all(model.ranks.share(setup.holds(model.ranks, num_tokens)))
    if spills:
        logger.info("hidden states do not fit in memory: they live in %s", folder)
    if not holds and stops_inside(setup.skeleton, setup.plan.recipe):
        logger.info(
            "what is computed inside a layer does not fit in memory: batches begin anew for each "
            "group of modules, which takes longer"
        )
    return batches, model.start(batches, folder if spills else None, work.num_finished, holds)


@torch.no_grad()
def calibrated_layers(
    plan: Plan, model: LayerwiseModel, moving: Moving, num_finished: int
) -> Iterator[tuple[int, LayerResult]]:
    """Calibrate layer after layer, but the first `num_finished`; yield each by its number."""
    skeleton = model.skeleton
    chosen = quantized_linears(plan, skeleton)
    cached = set(cached_layers(skeleton.model.config.to_dict()))
    for layer in skeleton.layer_names[:num_finished]:
        skeleton.unload(layer)
    for number, layer in list(enumerate(skeleton.layer_names))[num_finished:]:
        skeleton.load(layer)
        modules = {name: m for name, m in chosen.items() if name.startswith(f"{layer}.")}
        kv_spec = None if number in plan.kv_ignored else plan.recipe.kv_spec
        result = calibrate_layer(
            model, number, moving, plan.recipe, modules, number in cached, kv_spec
        )
        skeleton.unload(layer)
        yield number, result


def help_to_calibrate(setup: Setup, destination: Path, ranks: Ranks) -> Report:
    """Do what a process other than the first has to; the report is of the plan alone."""
    work: SharedWork | None = ranks.broadcast(None)
    if work is None:  # the first one found that the run is finished
        return Report(setup.plan, destination)
    folder = beside(destination.absolute(), "journal")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, which the first process has made, is not here: all processes of a run have "
            "to write to the same disk"
        )
    model = LayerwiseModel(setup.skeleton, ranks)
    _, moving = start(setup, model, work, folder)
    sensitivity: Sensitivity | None = ranks.broadcast(None)
    plan = keep_sensitive(setup.plan, sensitivity)
    if moving and 0 < work.num_finished < work.num_kept:
        moving.restore(folder, work.num_finished)
    for number, _ in calibrated_layers(plan, model, moving, work.num_finished):
        if moving and number + 1 < work.num_kept:
            moving.save(folder, number + 1)
    quantize_head(plan, model, moving)
    return Report(plan, destination)
