"""From a model to an FP8 checkpoint: the whole run.

Layer by layer: load, quantize, fix static scales on data, run the quantized layer, write, free. The
quantized layer's outputs feed the next, so later layers are calibrated on what they will see.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import quantkit
from quantkit.calibrate.budget import keep_sensitive, measure_sensitivity, quantized_linears
from quantkit.calibrate.data import Samples, effective_seq_len, load_samples
from quantkit.calibrate.expert_tokens import scarce_warnings
from quantkit.calibrate.head import quantize_head
from quantkit.calibrate.journal import Journal, finished_report
from quantkit.calibrate.kv_report import kv_warnings
from quantkit.calibrate.layer import calibrate_layer
from quantkit.calibrate.layerwise import Batch, LayerwiseModel, make_batches
from quantkit.calibrate.observers import ObserverFactory
from quantkit.calibrate.output import CheckpointOutput, bytes_of_dtype, peak_bytes
from quantkit.calibrate.plan import Plan, make_plan
from quantkit.calibrate.progress import Phase
from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.calibrate.records import from_json
from quantkit.calibrate.report import LayerReport, Report, zeroed_warnings
from quantkit.calibrate.self_data import generate_samples
from quantkit.calibrate.sensitivity import Sensitivity
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.source import ModelSource, fingerprint, open_source
from quantkit.checkpoint import cached_layers
from quantkit.containers import default_container
from quantkit.errors import CalibrationError, CheckpointError, DataError, UnsupportedError
from quantkit.shards import MAX_SHARD_BYTES, ShardWriter, write_json
from quantkit.staging import StagedFolder, check_destination, check_free_space

COMPUTE_DTYPE = torch.bfloat16
"""What layers compute in, whatever the source is stored in, so that the same weights give the same
scales in every dtype. It has the range of float32."""
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens per batch when no batch size is given: what fits a CPU's caches, or fills a GPU."""
DEFAULT_SEQ_LEN = 2048
DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


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
        batch_size: sequences per forward pass; default what suits the device. Changes no result.
            Mixture-of-experts models take them one by one.
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
    """
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    chosen = chosen.with_options(kv, tuple(ignore), tiers, budget, head, observer)
    _check_options(dtype, samples=samples, seq_len=seq_len, batch_size=batch_size)
    destination = None if dry_run else _destination(output, model)
    source = open_source(model, trust_remote_code)
    skeleton = Skeleton(source, source.config(), COMPUTE_DTYPE, _device(device))
    tokenizer = source.tokenizer() if chosen.needs_data and not dry_run else None
    length, note = _sample_length(skeleton, tokenizer, seq_len)
    size = batch_size or max(1, BATCH_TOKENS[skeleton.device.type] // length)
    if skeleton.has_experts:
        size = 1  # routers and experts would multiply the tokens of all sequences together
    plan = make_plan(skeleton, chosen, samples, length, size)
    added = bytes_of_dtype(skeleton, plan, DTYPES[dtype])
    plan = replace(plan, target_bytes=plan.target_bytes + added)
    if destination is None:
        return Report(plan)
    hidden = _hidden_bytes(skeleton, samples * length if chosen.needs_data else 0)
    needed = peak_bytes(plan.target_bytes, hidden, max_shard_bytes)
    check_free_space(destination, needed - Journal.size(destination))
    with StagedFolder(destination) as stage:
        with Phase("checking weights", len(source.names), quiet=True) as phase:
            source.scan(phase.advance)
        found: Samples | None = None
        if chosen.needs_data:
            found = load_samples(
                data,
                tokenizer,
                num_samples=samples,
                seq_len=length,
                seed=seed,
                chat_template=_read_template(chat_template),
                self_generate=partial(generate_samples, source),
            )
            if strict_samples:
                _check_count(found, samples)
        report = Report(plan, destination)
        report.warn([*plan.warnings, *([note] if note else [])])
        report.warn(found.warnings if found else [])
        report.provenance = _provenance(plan, source, found, seed, dtype)
        if resume and not Journal.size(destination):
            finished = finished_report(destination, plan, report.provenance)
            if finished is not None:
                return finished
        run = _fingerprint(report.provenance, skeleton, size, max_shard_bytes)
        has_head = any(module.layer is None for module in plan.quantized)
        with Journal(destination, run, len(skeleton.layers), resume, has_head) as journal:
            shards = ShardWriter(
                stage.path, max_shard_bytes, work=journal.folder, num_pieces=journal.num_pieces
            )
            output_tensors = CheckpointOutput(skeleton, shards, DTYPES[dtype])
            batches = make_batches(found.ids, size) if found else []
            layerwise = LayerwiseModel(skeleton)
            moving = layerwise.prepare(batches) if batches else []
            if journal.prelude is None:
                report.sensitivity = measure_sensitivity(plan, layerwise, batches, progress)
                if report.sensitivity is not None:
                    journal.set_prelude(asdict(report.sensitivity))
            else:
                report.sensitivity = from_json(Sensitivity, journal.prelude)
            plan = keep_sensitive(plan, report.sensitivity)
            report.layers = _quantize(
                plan, layerwise, moving, output_tensors, journal, report.sensitivity, progress
            )
            head_tensors, report.outside = quantize_head(plan, layerwise, moving)
            output_tensors.write("", head_tensors)
            flagged = kv_warnings({layer.name: layer.kv for layer in report.layers if layer.kv})
            reach = {layer.name: layer.experts for layer in report.layers}
            report.warn([*flagged, *scarce_warnings(reach), *zeroed_warnings(report.layers)])
            report.plan = replace(plan, target_bytes=output_tensors.finish())
            write_json(stage.path / "config.json", _config_json(report, source, DTYPES[dtype]))
            source.write_side_files(stage.path)
            write_json(stage.path / "quantkit.json", report.to_json())
            stage.commit()
    return report


@torch.no_grad()
def _quantize(
    plan: Plan,
    model: LayerwiseModel,
    moving: Sequence[Batch],
    output: CheckpointOutput,
    journal: Journal,
    sensitivity: Sensitivity | None,
    progress: bool,
) -> list[LayerReport]:
    """Quantize and write every decoder layer.

    Layers that the journal has are passed over, and it gets each of the others.
    """
    skeleton = model.skeleton
    chosen = quantized_linears(plan, skeleton)
    cached = set(cached_layers(skeleton.model.config.to_dict()))
    finished = len(journal.layers)
    for layer in skeleton.layer_names[:finished]:
        output.skip(f"{skeleton.disk_name(layer)}.")
        skeleton.unload(layer)
    journal.restore(moving)
    total = len(skeleton.layers)
    with Phase("layer", total, quiet=not progress, done=finished) as phase:
        for number, layer in list(enumerate(skeleton.layer_names))[finished:]:
            skeleton.load(layer)
            modules = {name: m for name, m in chosen.items() if name.startswith(f"{layer}.")}
            kv_spec = None if number in plan.kv_ignored else plan.recipe.kv_spec
            result = calibrate_layer(
                model, number, moving, plan.recipe, modules, number in cached, kv_spec
            )
            output.write(f"{skeleton.disk_name(layer)}.", result.tensors)
            skeleton.unload(layer)
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


def _check_options(dtype: str, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            raise DataError(f"{option} must be at least 1, got {value}")
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype is {dtype!r}; known: {', '.join(DTYPES)}")


def _check_count(found: Samples, asked: int) -> None:
    if len(found.ids) < asked:
        reasons = "; ".join(found.warnings) or f"{len(found.ids)} of {asked} samples usable"
        raise DataError(f"{reasons}; give more --data, or ask for fewer --samples")


def _destination(output: str | Path | None, model: str | Path) -> Path:
    if output is None:
        raise CheckpointError("no output folder is given; give one with -o, or use --dry-run")
    destination = Path(output)
    if destination.exists() and Path(model).exists() and destination.samefile(model):
        raise CheckpointError(f"{destination} is the model itself; choose another output folder")
    check_destination(destination)
    return destination


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UnsupportedError(f"device is {name!r}; known: auto, cpu, cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError(f"device {name!r} is not available; use cpu")
    return torch.device(name)


def _sample_length(
    skeleton: Skeleton, tokenizer: Any, seq_len: int | None
) -> tuple[int, str | None]:
    model_limit = getattr(skeleton.model.config.get_text_config(), "max_position_embeddings", None)
    tokenizer_limit = getattr(tokenizer, "model_max_length", None)
    requested = seq_len or DEFAULT_SEQ_LEN
    return effective_seq_len(requested, seq_len is not None, model_limit, tokenizer_limit)


def _read_template(path: str | Path | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read chat template {path}: {error}") from None


def _config_json(report: Report, source: ModelSource, dtype: torch.dtype | None) -> dict[str, Any]:
    config = dict(source.config_dict)
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    plan, formats = report.plan, report.formats
    scheme = plan.recipe.scheme(plan.ignored, formats, plan.kv_ignored)
    config["quantization_config"] = default_container(scheme).to_config(scheme)
    return config


def _hidden_bytes(skeleton: Skeleton, num_tokens: int) -> int:
    """Return the bytes of what enters a layer, for all samples."""
    hidden_size = int(skeleton.model.config.get_text_config().hidden_size)
    return num_tokens * hidden_size * skeleton.dtype.itemsize


def _fingerprint(
    provenance: dict[str, Any], skeleton: Skeleton, batch_size: int, max_shard_bytes: int
) -> dict[str, Any]:
    """Return all that a resumed run must have in common with the unfinished one."""
    config = json.dumps(skeleton.source.config_dict, sort_keys=True)
    return {
        "batch_size": batch_size,
        "device": skeleton.device.type,
        "max_shard_bytes": max_shard_bytes,
        "config": sha256(config.encode()).hexdigest(),
        **provenance,
    }


def _provenance(
    plan: Plan, source: ModelSource, samples: Samples | None, seed: int, dtype: str
) -> dict[str, Any]:
    """Return what a reader needs to repeat the run; no times, no paths."""
    import transformers

    return {
        "quantkit_version": quantkit.__version__,
        "profile": "portable" if plan.is_portable else "native",
        "recipe": plan.recipe.to_json(),
        "seed": seed,
        "dtype": dtype,
        "source": {"name": source.name, "fingerprint": fingerprint(source)},
        "data": samples.provenance if samples else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
