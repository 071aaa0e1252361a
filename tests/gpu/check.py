"""Everything that needs a GPU, in one run of a few minutes: `make gpu-check`.

    python -m tests.gpu.check [--quick] [--skip-tests] [--tiles] [--sanitize] [--seconds N]
                              [--out FOLDER]

Correctness first (exit code 1 if it fails; the rest still runs), then every kernel beside the
GPU's limits and torch's kernels, then a model of Llama 3 8B's sizes with random weights in
bfloat16, FP8, and FP8 with an FP8 cache. The tables are printed last, and written to FOLDER. After
N seconds nothing more is measured, and what was is printed; so too at SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.bench.gpu_kernels import measure_gpu_kernels
from quantkit.bench.gpu_model import KINDS, ModelSpeed, measure_kind
from quantkit.bench.gpu_tiles import TileSpeed, measure_tiles
from quantkit.bench.gpu_timing import GpuKernelSpeed, GpuLimits, measure_limits
from quantkit.bench.random_weights import LLAMA_3_8B
from quantkit.cli.bench_tables import print_gpu_kernels
from quantkit.extension import load_cuda_kernels

WORK = [(2000, 200), (5000, 500), (10000, 1000)]
SANITIZERS = ("memcheck", "racecheck", "synccheck")
TESTS = (
    "row_kernels",
    "sampling_kernels",
    "linear_kernels",
    "attention_kernels",
    "decoder",
    "second_device",
)
BATCHES = [1, 4, 16, 64]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
TILE_ROWS = [1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 4096]
CONTEXTS = [(1, 1024), (1, 10000), (4, 10000), (16, 5000), (64, 2000)]


def main() -> int:
    options = parse_options()
    if not torch.cuda.is_available() or not load_cuda_kernels():
        sys.stderr.write("needs a CUDA GPU and quantkit/_cuda*.so (make cuda)\n")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    record: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    return run_parts(parts(options, device, record), options.out, record)


def parts(
    options: argparse.Namespace, device: torch.device, record: dict[str, Any]
) -> dict[str, Callable[[], None]]:
    """Return what to do, in order: correctness before speed, cheap before dear."""
    clock = Clock(options.seconds)
    jobs: dict[str, Callable[[], None]] = {}
    if not options.skip_tests:
        jobs["tests"] = run_tests
    for tool in SANITIZERS if options.sanitize else ():
        jobs[tool] = partial(sanitize, tool)
    jobs["kernels"] = partial(kernels, device, options.quick, record, clock)
    jobs["model"] = partial(models, device, options.quick, record, clock)
    if options.tiles:
        jobs["tiles"] = partial(tiles, device, record, clock)
    return jobs


def run_parts(jobs: dict[str, Callable[[], None]], out: Path, record: dict[str, Any]) -> int:
    """Run all, whatever becomes of one; print the tables at the end, however it comes."""
    signal.signal(signal.SIGTERM, cut_off)
    os.environ.setdefault("COLUMNS", "140")  # of tables, where there is no terminal
    failures: list[str] = []
    try:
        for name, job in jobs.items():
            failures += attempt(name, job, record)
            write(record, out)
    except KeyboardInterrupt:
        failures.append("cut off: what follows is not all")
    write(record, out)
    tables = printed(record)
    (out / "gpu-check.txt").write_text(tables)
    print(tables, end="")
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


def cut_off(*_: object) -> None:
    raise KeyboardInterrupt


def write(record: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu-check.json").write_text(json.dumps(record, indent=1))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--skip-tests", action="store_true", help="only measure")
    parser.add_argument("--tiles", action="store_true", help="measure every tile of scaled_mm")
    parser.add_argument("--sanitize", action="store_true", help="compute-sanitizer, minutes")
    parser.add_argument("--seconds", type=float, default=450.0, help="then measure no more")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"))
    return parser.parse_args()


class Clock:
    """Ends measuring when the time is up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def until_late(self, rows: Iterable[Any], into: list[dict[str, Any]]) -> bool:
        """Append what is measured, as dicts; return whether it was all."""
        for row in rows:
            into.append(asdict(row))
            if time.monotonic() > self._end:
                print("--- out of time: the table is not all", flush=True)
                return False
        return True


def attempt(name: str, job: Callable[[], None], record: dict[str, Any]) -> list[str]:
    """Run one part; one that fails must not take the others with it."""
    begin = time.perf_counter()
    failures = []
    try:
        job()
    except Exception as error:
        traceback.print_exc()
        failures = [f"{name}: {error}"]
    record[f"{name}_seconds"] = time.perf_counter() - begin
    print(f"--- {name}: {record[f'{name}_seconds']:.1f} s", flush=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return failures


def run_tests() -> None:
    files = [f"tests/gpu/test_{name}.py" for name in TESTS]
    code = pytest.main(
        [*files, "-q", "--tb=short", "--durations=5", "--maxfail=40", "-p", "no:cacheprovider"]
    )
    if code != 0:
        raise RuntimeError(f"pytest exited with {code}")


def sanitize(tool: str) -> None:
    """Run every kernel of ours under one tool of compute-sanitizer."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", "--kernel-regex"]
    command += ["kns=quantkit", sys.executable, "-m", "tests.gpu.small_calls"]
    command += ["--products"] if tool == "memcheck" else []
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    print("\n".join(result.stdout.splitlines()[-4:]))
    if result.returncode != 0:
        print(result.stdout[-3000:], result.stderr[-1000:])
        raise RuntimeError(f"exit code {result.returncode}")


def kernels(device: torch.device, quick: bool, record: dict[str, Any], clock: Clock) -> None:
    limits = measure_limits(device, repeats=5)
    record["limits"] = asdict(limits)
    rows = ROWS[::3] if quick else ROWS
    contexts = CONTEXTS[1:3] if quick else CONTEXTS
    speeds = measure_gpu_kernels(LLAMA_3_8B, limits, device, rows, contexts, repeats=5)
    clock.until_late(speeds, record.setdefault("kernels", []))


def tiles(device: torch.device, record: dict[str, Any], clock: Clock) -> None:
    sizes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    speeds = measure_tiles(sizes, TILE_ROWS, device, repeats=3)
    clock.until_late(speeds, record.setdefault("tiles", []))


def models(device: torch.device, quick: bool, record: dict[str, Any], clock: Clock) -> None:
    """All kinds at the longest prompts first, so that a short run has something to compare."""
    measured = record.setdefault("model", [])
    for work in (WORK[-1:],) if quick else (WORK[-1:], WORK[:-1]):
        for kind in KINDS:
            speeds = measure_kind(LLAMA_3_8B, kind, work, [1, 4] if quick else BATCHES, device)
            if not clock.until_late(speeds, measured):
                return
            torch.cuda.empty_cache()


def printed(record: dict[str, Any]) -> str:
    """Return the tables as text."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print_tables(record)
    return text.getvalue()


def print_tables(record: dict[str, Any]) -> None:
    if "kernels" in record:
        speeds = [GpuKernelSpeed(**row) for row in record["kernels"]]
        print_gpu_kernels(GpuLimits(**record["limits"]), speeds)
    print_tiles([TileSpeed(**row) for row in record.get("tiles", [])])
    print_models([ModelSpeed(**row) for row in record.get("model", [])])


def print_tiles(speeds: list[TileSpeed]) -> None:
    """One line a size: microseconds of every tile, the quickest first."""
    by_size: dict[tuple[int, int, int], list[TileSpeed]] = {}
    for speed in speeds:
        size = (speed.out_features, speed.in_features, speed.rows)
        by_size.setdefault(size, []).append(speed)
    for (out, columns, rows), found in by_size.items():
        found.sort(key=lambda speed: speed.microseconds)
        cells = "  ".join(f"{speed.tile} {speed.microseconds:.1f}" for speed in found)
        print(f"{rows:5} x {columns} x {out}: {cells}")


def print_models(speeds: list[ModelSpeed]) -> None:
    base = {(s.prompt_tokens, s.new_tokens, s.batch): s.total for s in speeds if s.kind == "bf16"}
    print(
        f"\n{'Llama 3 8B, random':20} {'in/out':>11} {'batch':>5} {'prefill s':>9} {'step ms':>8} "
        f"{'tok/s':>8} {'x bf16':>7}"
    )
    for s in speeds:
        ratio = base.get((s.prompt_tokens, s.new_tokens, s.batch), float("nan")) / s.total
        print(
            f"{s.kind:20} {f'{s.prompt_tokens}/{s.new_tokens}':>11} {s.batch:5} {s.prefill:9.3f} "
            f"{1e3 * s.step:8.2f} {s.tokens_per_second:8.1f} {ratio:7.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
