"""Damaged checkpoints either work or are refused with one of our errors: no crash, no hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.shards import write_json
from tests import checkpoints, tiny
from tests.checkpoints import DYNAMIC, FAMILIES, NATIVE, OTHERS, STATIC
from tests.foreign import FOREIGN, NAMES
from tests.inspection.documents import document

ROOT = Path(__file__).parents[2]
SEEDS = 10_000
"""Of the long sweep: a few minutes on one core."""


BASES = {
    "dynamic": ("llama", DYNAMIC, "fp8-head"),
    "native": ("llama", NATIVE, "fp8"),
    "static-yarn": ("llama-rope-yarn", STATIC, "fp8"),
    "gemma3": ("gemma3", DYNAMIC, "none"),
    "phi3": ("phi3", DYNAMIC, "none"),
    "smollm3": ("smollm3", NATIVE, "none"),
    "transformers": ("gpt-neox", DYNAMIC, "fp8"),
}
"""Of checkpoints of ours: model, scheme, KV cache. The last one runs through transformers."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of intact ones: checkpoints of ours and of other tools, and a source."""
    work = tmp_path_factory.mktemp("built")
    folder = tmp_path_factory.mktemp("good")
    for name, (family, scheme, kv) in BASES.items():
        (work / name).mkdir()
        built = checkpoints.build(work / name, (FAMILIES | OTHERS)[family](), scheme, kv)
        tiny.save_tokenizer(built).rename(folder / name)
    write_json(folder / "dynamic" / "quantkit.json", document())
    for family in ("native", "gemma3"):
        tiny.save_tokenizer(work / family / "source").rename(folder / f"source-{family}")
    for name in NAMES:
        shutil.copytree(FOREIGN / name, folder / name)
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
    for name, outcomes in result["intact"].items():
        way, expected = ("source", "opened") if name.startswith("source") else ("load", "finite")
        assert outcomes[way] == expected, name
    assert sum(result["counts"].values()) == 60 * 4
    assert result["counts"]["load: refused"] > 20


@pytest.mark.slow
def test_thousands_of_damaged_checkpoints_work_or_are_refused(good: Path, tmp_path: Path) -> None:
    result = attempts(good, tmp_path, 60, SEEDS, timeout=1800)
    print(json.dumps(result["counts"], indent=1), *result["faults"], sep="\n")
    assert not result["faults"]
