"""The tables that `quantkit bench` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.cli.console import print_tables

if TYPE_CHECKING:
    from quantkit.bench.drafting import DraftSpeed
    from quantkit.bench.gpu_timing import GpuKernelSpeed, GpuLimits
    from quantkit.bench.kernels import KernelSpeed
    from quantkit.bench.machine import Machine
    from quantkit.bench.speed import Speed


def print_speeds(speeds: Sequence[Speed], report: dict[str, Any]) -> None:
    """Print prefill and decode speeds."""
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


def print_drafting(speeds: Sequence[DraftSpeed], report: dict[str, Any]) -> None:
    """Print what drafting brought, prompt by prompt and by kind."""
    rows = [
        (
            speed.prompt,
            str(speed.batch),
            f"{speed.temperature:g}",
            f"{speed.plain_tokens_per_second:.1f}",
            f"{speed.draft_tokens_per_second:.1f}",
            f"{speed.speed_up:.2f}",
            _cell(speed.drafts.get("draft_acceptance_rate"), 2),
            _cell(speed.drafts.get("mean_acceptance_length"), 2),
            f"{speed.identical}/{speed.batch}",
        )
        for speed in speeds
    ]
    title = (
        f"draft {report['draft']}, at most {report['new_tokens']} new tokens, "
        f"{report['threads']} threads; tokens/s without and with drafts"
    )
    headings = ("prompt", "batch", "T", "plain", "draft", "ratio", "accept", "length", "same")
    _print_table(title, headings, rows, names=1)
    _print_summary(report["summary"])


def _print_summary(summaries: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            str(summary["kind"]),
            str(summary["batch"]),
            f"{summary['temperature']:g}",
            f"{summary['speed_up']:.2f}",
            f"{summary['worst_speed_up']:.2f}",
        )
        for summary in summaries
    ]
    _print_table("speed-ups by kind", ("kind", "batch", "T", "median", "worst"), rows, names=1)


def print_kernels(machine: Machine, speeds: Sequence[KernelSpeed]) -> None:
    """Print the speed of each kernel beside the machine's limits."""
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


def print_gpu_kernels(limits: GpuLimits, speeds: Sequence[GpuKernelSpeed]) -> None:
    """Print the speed of each CUDA kernel beside the GPU's limits and torch's kernels."""
    rows = [
        (
            speed.kernel,
            speed.shape,
            _cell(speed.microseconds, 1),
            _cell(speed.gb_per_second, 0),
            _cell(speed.tflops, 0),
            f"{speed.of_limit:.2f}",
            _cell(speed.times_torch, 2),
        )
        for speed in speeds
    ]
    title = (
        f"{limits.name}: copies at {limits.copy_gb_per_second:.0f} GB/s, torch multiplies bfloat16 "
        f"at {limits.bf16_tflops:.0f} and E4M3 at {limits.fp8_tflops:.0f} TFLOP/s"
    )
    headings = ("kernel", "shape", "us", "GB/s", "TFLOP/s", "of limit", "x torch")
    _print_table(title, headings, rows, names=2)


def _print_table(
    title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], names: int
) -> None:
    """Print a table whose first `names` columns are text."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < names else "right")
    for row in rows:
        table.add_row(*row)
    print_tables([table])


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
