"""Kill -9 at random moments of calibrate and export; see `random_kills`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests import checkpoints, tiny

ROOT = Path(__file__).parents[1]
FEW, MANY = range(3), range(3, 23)
Kill = tuple[str, Path, dict[str, Any]]


@pytest.fixture(params=["calibrate", "export"])
def killed(request: pytest.FixtureRequest, calibration_file: Path, tmp_path: Path) -> Kill:
    """Return a command, its model, and its options."""
    if request.param == "calibrate":
        sizes = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
        model = tiny.save_model(tmp_path / "model", LlamaConfig(**{**tiny.LLAMA, **sizes}))
        options = {"samples": 4, "tiers": "none", "max_shard_bytes": 12_000}
        return "calibrate", model, {**options, "data": [str(calibration_file)]}
    (tmp_path / "built").mkdir()
    model = checkpoints.build(
        tmp_path / "built", checkpoints.FAMILIES["llama"](), checkpoints.STATIC, "fp8"
    )
    return "export", model, {"format": "modelopt"}


def kill(killed: Kill, folder: Path, seeds: range) -> dict[str, Any]:
    command, model, options = killed
    arguments = [command, str(model), str(folder), json.dumps([*seeds]), json.dumps(options)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.random_kills", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_three_kills_leave_nothing_or_what_can_go_on(killed: Kill, tmp_path: Path) -> None:
    result = kill(killed, tmp_path / "runs", FEW)
    assert result["wrong"] == {}
    assert sum(result["counts"].values()) == len(FEW)


@pytest.mark.slow
def test_twenty_kills_leave_nothing_or_what_can_go_on(
    killed: Kill, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = kill(killed, tmp_path / "runs", MANY)
    with capsys.disabled():
        print(f"\n{killed[0]}, killed {len(MANY)} times: {result['counts']}")
    assert result["wrong"] == {}
    assert sum(result["counts"].values()) == len(MANY)
