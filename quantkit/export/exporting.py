"""The whole run: a checkpoint and a format in, a folder in the Hub's layout out.

Whatever can be refused is refused before a tensor is written, and what engines would refuse before
the folder appears.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.calibrate.progress import Phase
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.containers import CONTAINERS
from quantkit.containers.modelopt import SIDE_FILE
from quantkit.errors import CheckpointError, DataError
from quantkit.export.conversion import Conversion, plain_modules
from quantkit.export.hub import Hub
from quantkit.export.model_card import Card
from quantkit.export.origin import CARD, read_origin
from quantkit.export.result import Export, ExportRefusedError
from quantkit.export.target import FORMATS, engines_of, target_scheme
from quantkit.inspection import inspect
from quantkit.inspection.record import read_record
from quantkit.lint import Finding, Severity, check_engines, lint
from quantkit.shards import MAX_SHARD_BYTES, ShardWriter, read_json, write_json
from quantkit.side_files import copy_side_files
from quantkit.staging import MARKER, StagedFolder, check_free_space

logger = logging.getLogger("quantkit")

SOURCE_CARD = "README.source.md"
"""What the source's own model card is called beside ours."""
MEASURED = ("measurements", "count", "data", "window", "stride", "dtype", "activations")
"""What a card needs of the output of `quantkit eval --json`."""


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    format: str = FORMATS[0],
    engines: Sequence[str] | None = None,
    tp: int = 1,
    quality: str | Path | None = None,
    push: str | None = None,
    private: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> Export:
    """Write a checkpoint in a format that other engines load, with a model card.

    Args:
        checkpoint: folder that `calibrate` or `export` wrote.
        output: folder to write; appears complete or not at all.
        format: "compressed-tensors", "fp8-block" or "modelopt". Codes stay as they are where the
            format can hold them; other weights are rounded again, and the result says at what loss.
        engines: those that must load it ("vllm", "sglang", "transformers", "tensorrt-llm"; `--for`
            on the command line). Default: all that the format is meant for; those that would not
            load it are warned of.
        tp: tensor-parallel size that the servers will run with.
        quality: file with the output of `quantkit eval --json`, for the model card.
        push: repository OWNER/NAME on the Hub to upload the result to.
        private: create that repository as a private one.
        max_shard_bytes: size limit of one safetensors file.
        progress: show progress on stderr.

    Raises ExportRefusedError if one of `engines` would not load the result, and other QuantKitError
    for what cannot be done; `output` is then as it was before.
    """
    asked = None if engines is None else check_engines(engines)
    destination, source = Path(output), open_checkpoint(checkpoint)
    _check_destination(destination, source)
    plain = plain_modules(source)
    scheme = target_scheme(source.scheme, format, plain)
    measured = None if quality is None else _read_quality(Path(quality))
    hub = None if push is None else Hub(push, private)
    conversion = Conversion(source, scheme, CONTAINERS[format], _input_amax(source.path), plain)
    size = sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
    check_free_space(destination, size + min(size, max_shard_bytes))
    meant = engines_of(format, scheme)
    with StagedFolder(destination) as stage:
        total = _write(conversion, stage.path, max_shard_bytes, progress)
        findings = lint(stage.path, asked or meant, tp).findings
        result = Export(
            path=destination,
            format=format,
            engines=_passing(findings, asked, meant),
            findings=findings,
            num_modules=len(source.quantized) - len(plain),
            loss=conversion.loss,
            bytes=total,
        )
        write_json(stage.path / MARKER, _report(source.path, result))
        card = _card(result, conversion, stage.path, push or destination.name, measured)
        (stage.path / CARD).write_text(card.text(), encoding="utf-8")
        stage.commit()
    return result if hub is None else replace(result, url=hub.push(destination))


def _write(conversion: Conversion, folder: Path, max_shard_bytes: int, progress: bool) -> int:
    """Write config, weights and side files; return the bytes of all tensors."""
    source, scheme, container = conversion.source, conversion.scheme, conversion.container
    block = {"quantization_config": container.to_config(scheme)}
    write_json(folder / "config.json", {**source.config, **block})
    for name, value in container.side_files(scheme).items():
        write_json(folder / name, value)
    copy_side_files(source.path, folder, ("config.json", MARKER, SIDE_FILE, CARD))
    writer = ShardWriter(folder, max_shard_bytes)
    with Phase("module", len(source.quantized), quiet=not progress) as phase:
        for name, tensor in conversion.tensors(phase.advance):
            writer.add(name, tensor)
    return writer.finish()


def _check_destination(destination: Path, source: Checkpoint) -> None:
    if destination.exists() and destination.samefile(source.path):
        raise CheckpointError(
            f"{destination} is the checkpoint itself; choose another output folder"
        )


def _read_quality(path: Path) -> dict[str, Any]:
    """Read what `quantkit eval --json` printed; it must have been compared with an original."""
    found = read_json(path)
    missing = [key for key in MEASURED if key not in found]
    if missing or any("mean_kl" not in entry for entry in found["measurements"].values()):
        raise DataError(
            f"{path} is not what 'quantkit eval CKPT --reference MODEL --json' prints: it has no "
            f"{missing[0] if missing else 'mean_kl'}"
        )
    return found


def _input_amax(folder: Path) -> dict[str, float]:
    """Return the largest |input| of each module that calibration noted."""
    if not (folder / MARKER).is_file():
        return {}
    modules = [module for layer in read_record(folder).layers for module in layer.modules]
    return {module.name: module.input_amax for module in modules if module.input_amax}


def _passing(
    findings: Sequence[Finding], asked: Sequence[str] | None, meant: Sequence[str]
) -> tuple[str, ...]:
    """Return the engines without an error; refuse if it is one that was asked for."""
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    failing = {engine for finding in errors for engine in finding.engines}
    passing = tuple(engine for engine in asked or meant if engine not in failing)
    if errors and (asked or not passing):
        first = errors[0]
        raise ExportRefusedError(
            f"{', '.join(sorted(failing))} would not load this ({first.where}: {first.problem}); "
            f"{first.advice or 'see what quantkit check says'}; nothing was written",
            findings,
        )
    for engine in sorted(failing):
        first = next(finding for finding in errors if engine in finding.engines)
        logger.warning("%s will not load it: %s: %s", engine, first.where, first.problem)
    return passing


def _report(source: Path, result: Export) -> dict[str, Any]:
    """Return quantkit.json: the checkpoint's own, and what was done since."""
    report = read_json(source / MARKER) if (source / MARKER).is_file() else {}
    facts = result.to_json()
    kept = ("format", "engines", "modules", "rounded_again", "weight_sqnr_db")
    done = {"profile": "portable", "target_bytes": result.bytes}
    return {**report, **done, "export": {key: facts[key] for key in kept}}


def _card(
    result: Export,
    conversion: Conversion,
    folder: Path,
    name: str,
    measured: Mapping[str, Any] | None,
) -> Card:
    """Return the model card; the source's own, if it has one, is kept beside it."""
    source = conversion.source.path
    inspection = inspect(folder)
    previous = SOURCE_CARD if (source / SOURCE_CARD).is_file() else CARD
    if previous == CARD and (source / CARD).is_file():
        (folder / SOURCE_CARD).write_bytes((source / CARD).read_bytes())
    return Card(
        name=name,
        format_name=result.format,
        scheme=conversion.scheme,
        origin=read_origin(source, previous, inspection.record.source_name),
        inspection=inspection,
        engines=result.engines,
        codes=result.codes,
        quality=measured,
    )
