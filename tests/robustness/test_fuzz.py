"""Damaged checkpoints either work or are refused with one of our errors: no crash, no hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.shards import write_json
from tests import checkpoints, tiny
from tests.checkpoints import DYNAMIC, FAMILIES, NATIVE
from tests.inspection.documents import document

ROOT = Path(__file__).parents[2]
SEEDS = 3000
"""Of the long sweep: about four minutes on one core."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of intact ones: a portable and a native checkpoint, and their source."""
    work = tmp_path_factory.mktemp("built")
    folder = tmp_path_factory.mktemp("good")
    for name, scheme, kv in (("portable", DYNAMIC, "fp8-head"), ("native", NATIVE, "fp8")):
        (work / name).mkdir()
        built = checkpoints.build(work / name, FAMILIES["llama"](), scheme, kv)
        tiny.save_tokenizer(built).rename(folder / name)
    write_json(folder / "portable" / "quantkit.json", document())
    tiny.save_tokenizer(work / "native" / "source").rename(folder / "source")
    return folder


def attempts(good: Path, work: Path, first: int, count: int, timeout: float) -> dict[str, Any]:
    """Try seeds in a process of their own; return its counts and faults."""
    arguments = [str(good), str(work), str(first), str(count)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.robustness.attempts", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_sixty_damaged_checkpoints_work_or_are_refused(good: Path, tmp_path: Path) -> None:
    result = attempts(good, tmp_path, 0, 60, timeout=120)
    assert not result["faults"]
    assert sum(result["counts"].values()) == 60 * 4
    assert result["counts"]["load: refused"] > 20


@pytest.mark.slow
def test_thousands_of_damaged_checkpoints_work_or_are_refused(good: Path, tmp_path: Path) -> None:
    result = attempts(good, tmp_path, 60, SEEDS, timeout=1800)
    print(json.dumps(result["counts"], indent=1))
    assert not result["faults"]
