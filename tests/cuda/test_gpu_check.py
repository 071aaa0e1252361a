"""The script of a GPU run, without a GPU: tables of made-up numbers, and runs that end early."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.bench.gpu_model import KINDS, ModelSpeed
from quantkit.bench.gpu_tiles import TileSpeed
from quantkit.bench.gpu_timing import GpuKernelSpeed, GpuLimits
from tests.gpu import check

LIMITS = GpuLimits("a GPU", 4260.0, 790.0, 1504.0)
KERNELS = [
    GpuKernelSpeed("w8a16 down", "1 x 14336 x 4096", 16.8, 3495.0, None, 0.82, 31.7),
    GpuKernelSpeed("gate/up + gate, then quantize", "128 x 4096 x 28672", 40.0, None, 750.0, 0.5),
]
MODELS = [ModelSpeed(kind, 10000, 1000, 4, 0.5, 0.01) for kind in KINDS]


@pytest.fixture(autouse=True)
def keep_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def record_of(limit: float = 60.0) -> tuple[dict[str, Any], dict[str, Callable[[], None]]]:
    record: dict[str, Any] = {}
    clock = check.Clock(limit)

    def kernels() -> None:
        record["limits"] = check.asdict(LIMITS)
        clock.until_late(iter(KERNELS), record.setdefault("kernels", []))

    def models() -> None:
        clock.until_late(iter(MODELS), record.setdefault("model", []))

    return record, {"kernels": kernels, "model": models}


def test_all_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, jobs = record_of()
    record["tiles"] = [check.asdict(TileSpeed("64x128x128", 96, 4096, 4096, 7.5))]
    assert check.run_parts(jobs, tmp_path, record) == 0
    printed = capsys.readouterr().out
    for text in ("w8a16 down", "then quantize", "fp8 + kv8", "10000/1000", "64x128x128 7.5"):
        assert text in printed
    assert len(json.loads((tmp_path / "gpu-check.json").read_text())["model"]) == len(KINDS)
    assert (tmp_path / "gpu-check.txt").read_text() in printed


def test_a_part_that_fails_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, jobs = record_of()

    def broken() -> None:
        raise RuntimeError("no such kernel")

    assert check.run_parts({"tests": broken, **jobs}, tmp_path, record) == 1
    printed = capsys.readouterr().out
    assert "w8a16 down" in printed
    assert printed.splitlines()[-1] == "FAILED: tests: no such kernel"


def test_a_run_that_is_cut_off_prints_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, jobs = record_of()

    def killed() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    jobs = {"kernels": jobs["kernels"], "tiles": killed, "model": jobs["model"]}
    assert check.run_parts(jobs, tmp_path, record) == 1
    printed = capsys.readouterr().out
    assert "w8a16 down" in printed
    assert "fp8 + kv8" not in printed
    assert "cut off" in printed.splitlines()[-1]
    assert "kernels" in json.loads((tmp_path / "gpu-check.json").read_text())


def test_no_more_is_measured_after_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, jobs = record_of(limit=0.0)
    assert check.run_parts(jobs, tmp_path, record) == 0
    assert len(record["kernels"]) == len(record["model"]) == 1
    assert "out of time" in capsys.readouterr().out


def test_the_order_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["check", "--sanitize", "--tiles", "--seconds", "400"])
    options = check.parse_options()
    jobs = check.parts(options, torch.device("cpu"), {})
    assert list(jobs) == ["tests", *check.SANITIZERS, "kernels", "model", "tiles"]
    quick = argparse.Namespace(**{**vars(options), "skip_tests": True, "sanitize": False})
    assert list(check.parts(quick, torch.device("cpu"), {})) == ["kernels", "model", "tiles"]
    files = {path.stem.removeprefix("test_") for path in Path(check.__file__).parent.glob("test_*")}
    assert set(check.TESTS) == files
