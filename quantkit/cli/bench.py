"""`quantkit bench`: speed of a checkpoint by batch and prompt length, and of each kernel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import devices
from quantkit.cli.console import note, quiet_transformers, write
from quantkit.errors import GenerationError, UnsupportedError, nearest

if TYPE_CHECKING:
    from quantkit.bench.drafting import DraftSpeed
    from quantkit.bench.speed import Runner, Speed
    from quantkit.runtime.decoder import Decoder
    from quantkit.runtime.model import Fp8Model

BASELINES = ("transformers",)


def bench(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A quantized checkpoint.")],
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N,...", help="Lengths of the prompts.")
    ] = "512",
    new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="New tokens for each prompt.")
    ] = 128,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Batch sizes.")] = "1,8",
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs to take the median of.")
    ] = 3,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Measure each kernel beside the machine's limits.")
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(help="transformers: run the original in bfloat16 too, in turn with ours."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The original, for --baseline: a Hugging Face folder, Hub id or .gguf file.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="suffix|auto|PATH",
            help="Measure what drafting brings on real prompts, in turn with plain decoding.",
        ),
    ] = None,
    temperature: Annotated[
        str, typer.Option(metavar="T,...", help="Temperatures, for --draft.")
    ] = "0,0.7",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(metavar="auto|balanced|FILE.json", help=devices.HELP)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure prefill and decode speed: random prompts, greedy, no early end.

    With --draft, measure decoding with and without drafts on real prompts instead.
    """
    batches, lengths = _numbers(batch, "--batch"), _numbers(prompt_tokens, "--prompt-tokens")
    temperatures = _temperatures(temperature)
    _check_baseline(baseline, reference)
    _check_draft(draft, kernels, baseline)
    import torch

    from quantkit.bench.drafting import summarize
    from quantkit.cli.bench_tables import print_drafting, print_speeds
    from quantkit.load import load_fp8

    places = devices.read_device_map(device_map)
    begin = time.perf_counter()
    model = load_fp8(checkpoint, device, draft, threads=threads, device_map=places)
    report: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "threads": torch.get_num_threads(),
        "new_tokens": new_tokens,
        "repeats": repeats,
        "load_seconds": time.perf_counter() - begin,
    }
    quiet_transformers()
    show: Callable[[], None]
    if draft is not None:
        drafting = _draft_speeds(model, batches, temperatures, new_tokens, repeats)
        summary = list(summarize(drafting))
        report |= {"draft": draft, "summary": summary, "results": [asdict(s) for s in drafting]}
        show = partial(print_drafting, drafting, report)
    elif kernels:
        measured, show = _kernel_speeds(model, batches, lengths, repeats)
        report |= measured
    else:
        _require_room(model, max(lengths) + new_tokens)
        results, peak = _model_speeds(model, batches, lengths, new_tokens, repeats, reference)
        report |= {"peak_memory_bytes": peak, "results": [asdict(speed) for speed in results]}
        show = partial(print_speeds, results, report)
    if as_json:
        write(json.dumps(report) + "\n")
    else:
        show()


def _model_speeds(
    model: Fp8Model,
    batches: list[int],
    lengths: list[int],
    new_tokens: int,
    repeats: int,
    reference: str | None,
) -> tuple[list[Speed], int]:
    """Return the speeds, and the peak memory before any baseline was loaded."""
    from quantkit.bench.speed import QuantkitRunner, Workload, measure, peak_memory_bytes

    runners: list[Runner] = [QuantkitRunner(model)]
    runners[0].run(Workload(max(batches), max(lengths), 2))
    peak = peak_memory_bytes()
    if reference is not None:
        from quantkit.bench.baseline import TransformersRunner

        runners.append(TransformersRunner.load(reference))
    results = []
    for length in lengths:
        for size in batches:
            note(f"batch {size}: {repeats} runs of {length} + {new_tokens} tokens")
            results += measure(runners, Workload(size, length, new_tokens), repeats)
    return results, peak


def _kernel_speeds(
    model: Fp8Model, batches: list[int], lengths: list[int], repeats: int
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return what was measured, for the report, and what prints it."""
    from quantkit.runtime.decoder import Decoder

    if not isinstance(model.engine, Decoder):
        raise UnsupportedError("--kernels measures quantkit's own decoder, which cannot run this")
    note("measuring the machine, then each kernel")
    if model.engine.device.type == "cuda":
        return _gpu_kernel_speeds(model.engine, batches, lengths, repeats)
    from quantkit.bench.kernels import measure_kernels
    from quantkit.bench.machine import measure_machine
    from quantkit.cli.bench_tables import print_kernels

    machine = measure_machine(repeats)
    speeds = measure_kernels(model.engine.shape, machine, repeats)
    report = {"machine": asdict(machine), "kernels": [asdict(speed) for speed in speeds]}
    return report, partial(print_kernels, machine, speeds)


def _gpu_kernel_speeds(
    engine: Decoder, batches: list[int], lengths: list[int], repeats: int
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Measure linears at every batch and at prefill's rows, attention at every batch and length."""
    from quantkit.bench.gpu_kernels import measure_gpu_kernels
    from quantkit.bench.gpu_timing import measure_limits
    from quantkit.cli.bench_tables import print_gpu_kernels

    limits = measure_limits(engine.device, repeats)
    rows, contexts = [*batches, 1024, 4096], [(b, n) for b in batches for n in lengths]
    speeds = list(measure_gpu_kernels(engine.shape, limits, engine.device, rows, contexts, repeats))
    report = {"machine": asdict(limits), "kernels": [asdict(speed) for speed in speeds]}
    return report, partial(print_gpu_kernels, limits, speeds)


def _draft_speeds(
    model: Fp8Model,
    batches: list[int],
    temperatures: list[float],
    new_tokens: int,
    repeats: int,
) -> list[DraftSpeed]:
    from quantkit.bench.drafting import groups, measure_drafting
    from quantkit.bench.prompts import PROMPTS

    results = []
    for size in batches:
        for temperature in temperatures:
            for group in groups(size, PROMPTS):
                note(f"batch {size}, temperature {temperature:g}: {group.name}")
                speed = measure_drafting(model, group, temperature, new_tokens, repeats)
                results += [speed] if speed is not None else []
    return results


def _check_draft(draft: str | None, *others: object) -> None:
    if draft is not None and any(others):
        raise typer.BadParameter(
            "is a measurement of its own; leave --kernels and --baseline out", param_hint="--draft"
        )
    if draft == "none":
        raise typer.BadParameter("give what is to draft, or leave it out", param_hint="--draft")


def _check_baseline(baseline: str | None, reference: str | None) -> None:
    if baseline is not None and baseline not in BASELINES:
        raise typer.BadParameter(
            f"{baseline!r} is not known{nearest(baseline, BASELINES)}; use transformers",
            param_hint="--baseline",
        )
    if (baseline is None) != (reference is None):
        raise typer.BadParameter(
            "goes together with --reference MODEL, the original", param_hint="--baseline"
        )


def _numbers(text: str, option: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise typer.BadParameter(
            f"expected positive integers separated by commas, got {text!r}", param_hint=option
        )
    return [int(word) for word in words]


def _temperatures(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value < float("inf") for value in values):
        raise typer.BadParameter(
            f"expected numbers >= 0 separated by commas, got {text!r}", param_hint="--temperature"
        )
    return values


def _require_room(model: Fp8Model, tokens: int) -> None:
    if tokens > model.engine.max_context:
        raise GenerationError(
            f"--prompt-tokens and --new-tokens add up to {tokens}, the model's context is "
            f"{model.engine.max_context}; lower one of them"
        )
