"""From a model to an FP8 checkpoint: the whole run.

Layer by layer: load, quantize, fix static scales on data, run the quantized layer, write, free. The
quantized layer's outputs feed the next, so later layers are calibrated on what they will see.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quantkit
from quantkit.calibrate.budget import keep_sensitive, measure_sensitivity
from quantkit.calibrate.data import Samples
from quantkit.calibrate.expert_tokens import scarce_warnings
from quantkit.calibrate.head import quantize_head
from quantkit.calibrate.joint_run import SharedWork, calibrated_layers, help_to_calibrate, start
from quantkit.calibrate.journal import Journal, finished_report
from quantkit.calibrate.kv_report import kv_warnings
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.observers import ObserverFactory
from quantkit.calibrate.output import CheckpointOutput
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.progress import Phase
from quantkit.calibrate.ranks import Ranks, join_ranks
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.recipe_file import load_recipe
from quantkit.calibrate.records import from_json
from quantkit.calibrate.report import LayerReport, Report, zeroed_warnings
from quantkit.calibrate.sensitivity import Sensitivity
from quantkit.calibrate.setup import DTYPES, RunOptions, Setup, set_up
from quantkit.calibrate.source import ModelSource, fingerprint
from quantkit.containers import default_container
from quantkit.errors import CalibrationError, CheckpointError
from quantkit.shards import MAX_SHARD_BYTES, ShardWriter, write_json
from quantkit.staging import StagedFolder, check_destination, check_free_space


def calibrate(
    model: str | Path,
    output: str | Path | None = None,
    *,
    recipe: str | Path | Recipe = "fp8-dynamic",
    data: Sequence[str] = ("builtin",),
    samples: int = 128,
    strict_samples: bool = False,
    seq_len: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    kv: str | None = None,
    tiers: str | None = None,
    budget: float | None = None,
    ignore: Sequence[str] = (),
    head: str | None = None,
    observer: str | ObserverFactory | None = None,
    device: str = "auto",
    dtype: str = "auto",
    dry_run: bool = False,
    resume: bool = False,
    chat_template: str | Path | None = None,
    trust_remote_code: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> Report:
    """Quantize a causal language model to an FP8 checkpoint in `output`.

    Args:
        model: Hugging Face folder, Hub id, or .gguf file.
        output: folder to write; new, empty, or an earlier result. Not needed for a dry run.
        recipe: name of a packaged recipe, a FILE.toml, or a Recipe.
        data: sources of calibration text, see `quantkit.calibrate.data`.
        samples: number of calibration samples in all.
        strict_samples: refuse data that gives fewer usable samples; otherwise that is a warning.
        seq_len: tokens per sample; default 2048 or the model's own limit, whichever is less.
        batch_size: sequences per forward pass, 8 at most; default what suits the device. Changes no
            result. Mixture-of-experts models take them one by one.
        seed: chooses samples; nothing else is random.
        kv: "fp8", "fp8-head", "fp8-e3m4" or "none"; default as the recipe says.
        tiers: "none" for plain rounding, or those of the recipe's tiers to use, with commas
            between: range, compensation, smoothing, formats, outliers, keep.
        budget: bytes a weight up to which the most sensitive modules stay as they are; 0 for none.
        ignore: further modules to leave as they are: names, or `re:` patterns.
        head: 8-bit format of the output head ("e3m4", "e4m3", "e5m2"), which makes a checkpoint
            for quantkit alone; "none" leaves it as it is. Default as the recipe says.
        observer: what decides the range of static inputs: "amax", "percentile", "percentile:P" or
            "error", or an observer of your own, see `quantkit.calibrate.observers`. Default as the
            recipe says.
        device: "auto", "cpu" or "cuda".
        dtype: dtype of the tensors that are not quantized; "auto" keeps the source's.
        dry_run: only make the plan; nothing is written and no data is read.
        resume: go on with an unfinished run of the same `output`, model, data and options, which
            was killed or interrupted; from the start if there is none. Without it such a run is
            discarded.
        chat_template: file with a Jinja template for `messages` rows.
        trust_remote_code: run Python code that the model folder carries.
        max_shard_bytes: size limit of one safetensors file.
        progress: show progress on stderr.

    Returns a Report; str(report) is the table that the command line shows. Raises QuantKitError
    with the cause, the object at fault and what to do; then `output` is as it was before. While a
    run lasts, another one with the same `output` is refused.

    Under torchrun the processes share the work, and the result is the same; in all but the first
    the Report is of the plan alone.
    """
    with join_ranks() as ranks:
        with ranks.agreeing():
            chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
            chosen = chosen.with_options(kv, tuple(ignore), tiers, budget, head, observer)
            options = RunOptions(
                data=tuple(data),
                samples=samples,
                strict_samples=strict_samples,
                seq_len=seq_len,
                batch_size=batch_size,
                seed=seed,
                dtype=dtype,
                dry_run=dry_run,
                resume=resume,
                chat_template=chat_template,
                max_shard_bytes=max_shard_bytes,
                progress=progress,
            )
            destination = None if dry_run else _destination(output, model)
            setup = set_up(model, chosen, options, device, trust_remote_code, ranks)
        if destination is None:
            return Report(setup.plan)
        if not ranks.is_first:
            return help_to_calibrate(setup, destination, ranks)
        check_free_space(destination, setup.peak_bytes - Journal.size(destination))
        with StagedFolder(destination) as stage:
            return _run(setup, options, destination, stage, ranks)


def _run(
    setup: Setup, options: RunOptions, destination: Path, stage: StagedFolder, ranks: Ranks
) -> Report:
    """Read the data, quantize into `stage`, and let the checkpoint appear."""
    source = setup.source
    with Phase("checking weights", len(source.names), quiet=True) as phase:
        source.scan(phase.advance)
    samples = setup.load_samples(options)
    report = _new_report(setup, samples, options, destination)
    if options.resume and not Journal.size(destination):
        finished = finished_report(destination, setup.plan, report.provenance)
        if finished is not None:
            ranks.broadcast(None)
            return finished
    run = _fingerprint(report.provenance, setup, options.max_shard_bytes)
    num_layers = len(setup.skeleton.layers)
    has_head = any(module.layer is None for module in setup.plan.quantized)
    with Journal(destination, run, num_layers, options.resume, has_head) as journal:
        _write(setup, options, stage.path, journal, samples, report, ranks)
        stage.commit()
    return report


def _write(
    setup: Setup,
    options: RunOptions,
    folder: Path,
    journal: Journal,
    samples: Samples | None,
    report: Report,
    ranks: Ranks,
) -> None:
    """Write the whole checkpoint into `folder`, and what was done into `report`."""
    skeleton, dtype = setup.skeleton, DTYPES[options.dtype]
    shards = ShardWriter(
        folder, options.max_shard_bytes, work=journal.folder, num_pieces=journal.num_pieces
    )
    output = CheckpointOutput(skeleton, shards, dtype)
    work = ranks.broadcast(
        SharedWork(samples.ids if samples else [], len(journal.layers), journal.num_kept)
    )
    model = LayerwiseModel(skeleton, ranks)
    batches, moving = start(setup, model, work, journal.folder)
    report.sensitivity = _sensitivity(setup.plan, model, batches, journal, options.progress)
    plan = keep_sensitive(setup.plan, ranks.broadcast(report.sensitivity))
    report.layers = _quantize(
        plan, model, moving, output, journal, report.sensitivity, options.progress
    )
    head_tensors, report.outside = quantize_head(plan, model, moving)
    output.write("", head_tensors)
    _warn(report)
    report.plan = replace(plan, target_bytes=output.finish())
    write_json(folder / "config.json", _config_json(report, setup.source, dtype))
    setup.source.write_side_files(folder)
    write_json(folder / "quantkit.json", report.to_json())


def _sensitivity(
    plan: Plan,
    model: LayerwiseModel,
    batches: Sequence[Tensor],
    journal: Journal,
    progress: bool,
) -> Sensitivity | None:
    """Return what each group of modules costs: from the journal, or measured and kept there."""
    if journal.prelude is not None:
        return from_json(Sensitivity, journal.prelude)
    found = measure_sensitivity(plan, model, batches, progress)
    if found is not None:
        journal.set_prelude(asdict(found))
    return found


def _new_report(
    setup: Setup, samples: Samples | None, options: RunOptions, destination: Path
) -> Report:
    """Return a report of a run that is about to begin."""
    report = Report(setup.plan, destination)
    report.warn([*setup.plan.warnings, *setup.notes])
    report.warn(samples.warnings if samples else [])
    report.provenance = _provenance(setup, samples, options)
    return report


def _warn(report: Report) -> None:
    """Add what the layers have to say."""
    flagged = kv_warnings({layer.name: layer.kv for layer in report.layers if layer.kv})
    reach = {layer.name: layer.experts for layer in report.layers}
    report.warn([*flagged, *scarce_warnings(reach), *zeroed_warnings(report.layers)])


@torch.no_grad()
def _quantize(
    plan: Plan,
    model: LayerwiseModel,
    moving: Moving,
    output: CheckpointOutput,
    journal: Journal,
    sensitivity: Sensitivity | None,
    progress: bool,
) -> list[LayerReport]:
    """Quantize and write every decoder layer.

    Layers that the journal has are passed over, and it gets each of the others.
    """
    skeleton, finished = model.skeleton, len(journal.layers)
    for layer in skeleton.layer_names[:finished]:
        output.skip(f"{skeleton.disk_name(layer)}.")
    journal.restore(moving)
    total = len(skeleton.layers)
    with Phase("layer", total, quiet=not progress, done=finished) as phase:
        for number, result in calibrated_layers(plan, model, moving, finished):
            prefix = f"{skeleton.disk_name(skeleton.layer_names[number])}."
            output.write(prefix, result.tensors)
            result.report.add_sensitivity(plan, number, sensitivity)
            journal.add(result.report, moving, output.flush())
            error = result.report.output_sqnr_db
            phase.advance("" if error is None else f"output SQNR {error:.1f} dB")
    if plan.recipe.kv_spec and not any(report.scales for report in journal.layers):
        raise CalibrationError(
            f"no decoder layer of {plan.source_name} cached keys or values, so KV scales are "
            "unknown; use --kv none for this model"
        )
    return journal.layers


def _destination(output: str | Path | None, model: str | Path) -> Path:
    if output is None:
        raise CheckpointError("no output folder is given; give one with -o, or use --dry-run")
    destination = Path(output)
    if destination.exists() and Path(model).exists() and destination.samefile(model):
        raise CheckpointError(f"{destination} is the model itself; choose another output folder")
    check_destination(destination)
    return destination


def _config_json(report: Report, source: ModelSource, dtype: torch.dtype | None) -> dict[str, Any]:
    config = dict(source.config_dict)
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    plan, formats = report.plan, report.formats
    scheme = plan.recipe.scheme(plan.ignored, formats, plan.kv_ignored)
    config["quantization_config"] = default_container(scheme).to_config(scheme)
    return config


def _fingerprint(provenance: dict[str, Any], setup: Setup, max_shard_bytes: int) -> dict[str, Any]:
    """Return all that a resumed run must have in common with the unfinished one."""
    config = json.dumps(setup.source.config_dict, sort_keys=True)
    return {
        "batch_size": setup.batch_size,
        "device": setup.skeleton.device.type,
        "max_shard_bytes": max_shard_bytes,
        "config": sha256(config.encode()).hexdigest(),
        **provenance,
    }


def _provenance(setup: Setup, samples: Samples | None, options: RunOptions) -> dict[str, Any]:
    """Return what a reader needs to repeat the run; no times, no paths."""
    import transformers

    plan, source = setup.plan, setup.source
    return {
        "quantkit_version": quantkit.__version__,
        "profile": "portable" if plan.is_portable else "native",
        "recipe": plan.recipe.to_json(),
        "seed": options.seed,
        "dtype": options.dtype,
        "source": {"name": source.name, "fingerprint": fingerprint(source)},
        "data": samples.provenance if samples else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
