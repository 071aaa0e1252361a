"""`quantkit bench`: speed of a checkpoint by batch and prompt length, and of each kernel."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.console import note, quiet_transformers, write
from quantkit.errors import GenerationError, UnsupportedError, nearest

if TYPE_CHECKING:
    from quantkit.bench.kernels import KernelSpeed
    from quantkit.bench.machine import Machine
    from quantkit.bench.speed import Runner, Speed
    from quantkit.runtime.model import Fp8Model

BASELINES = ("transformers",)


def bench(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A quantized checkpoint.")],
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N,...", help="Lengths of the prompts.")
    ] = "512",
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens for each prompt.")] = 128,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Batch sizes.")] = "1,8",
    repeats: Annotated[int, typer.Option(min=1, help="Runs to take the median of.")] = 3,
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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure prefill and decode speed: random prompts, greedy, no early end."""
    batches, lengths = _numbers(batch, "--batch"), _numbers(prompt_tokens, "--prompt-tokens")
    _check_baseline(baseline, reference)
    import torch

    from quantkit.runtime.model import load_fp8

    begin = time.perf_counter()
    model = load_fp8(checkpoint, device=device, threads=threads)
    report: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "threads": torch.get_num_threads(),
        "new_tokens": new_tokens,
        "repeats": repeats,
        "load_seconds": time.perf_counter() - begin,
    }
    quiet_transformers()
    _require_room(model, max(lengths) + new_tokens)
    if kernels:
        machine, speeds = _kernel_speeds(model, repeats)
        report |= {"machine": asdict(machine), "kernels": [asdict(speed) for speed in speeds]}
        if not as_json:
            _print_kernels(machine, speeds)
    else:
        results, peak = _model_speeds(model, batches, lengths, new_tokens, repeats, reference)
        report |= {"peak_memory_bytes": peak, "results": [asdict(speed) for speed in results]}
        if not as_json:
            _print_speeds(results, report)
    if as_json:
        write(json.dumps(report) + "\n")


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


def _kernel_speeds(model: Fp8Model, repeats: int) -> tuple[Machine, list[KernelSpeed]]:
    from quantkit.bench.kernels import measure_kernels
    from quantkit.bench.machine import measure_machine
    from quantkit.runtime.decoder import Decoder

    if not isinstance(model.engine, Decoder) or model.engine.device.type != "cpu":
        raise UnsupportedError("--kernels measures the CPU kernels of models that need no others")
    note("measuring the machine, then each kernel")
    machine = measure_machine(repeats)
    return machine, measure_kernels(model.engine.shape, machine, repeats)


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


def _require_room(model: Fp8Model, tokens: int) -> None:
    if tokens > model.engine.max_context:
        raise GenerationError(
            f"--prompt-tokens and --new-tokens add up to {tokens}, the model's context is "
            f"{model.engine.max_context}; lower one of them"
        )


def _print_speeds(speeds: list[Speed], report: dict[str, Any]) -> None:
    rows = [
        (
            speed.runner,
            str(speed.prompt_tokens),
            str(speed.batch),
            _cell(speed.prefill_tokens_per_second, 1),
            _cell(speed.decode_tokens_per_second, 1),
            _cell(speed.time_to_first_token, 3),
        )
        for speed in speeds
    ]
    title = (
        f"{report['new_tokens']} new tokens, {report['threads']} threads; loaded in "
        f"{report['load_seconds']:.1f} s, peak memory {report['peak_memory_bytes'] / 1e6:.0f} MB"
    )
    headings = (
        "engine",
        "prompt",
        "batch",
        "prefill tok/s",
        "decode tok/s",
        "first (s)",
    )
    _print_table(title, headings, rows, names=1)


def _print_kernels(machine: Machine, speeds: list[KernelSpeed]) -> None:
    rows = [
        (
            speed.kernel,
            speed.shape,
            _cell(speed.microseconds, 1),
            _cell(speed.gb_per_second, 1),
            _cell(speed.gflops, 0),
            f"{speed.of_limit:.2f}",
        )
        for speed in speeds
    ]
    title = (
        f"{machine.threads} threads; memory reads at {machine.read_gb_per_second:.1f} GB/s, torch "
        f"multiplies bfloat16 matrices at {machine.matrix_gflops:.0f} GFLOP/s"
    )
    headings = ("kernel", "shape", "us", "GB/s", "GFLOP/s", "of limit")
    _print_table(title, headings, rows, names=2)


def _print_table(
    title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], names: int
) -> None:
    """Print a table whose first `names` columns are text."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < names else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
