"""Damaged checkpoints either work or are refused with one of our errors: no crash, no hang."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.shards import ShardReader, write_json
from tests import checkpoints, tiny
from tests.checkpoints import DYNAMIC, FAMILIES, NATIVE, OTHERS, STATIC
from tests.foreign import FOREIGN, NAMES
from tests.inspection.documents import document
from tests.robustness.foreign_files import BIN, GGUF
from tests.robustness.mutations import SHARD

ROOT = Path(__file__).parents[2]
FEW, SEEDS = 69, 10_000
"""Of the suite: three of each model. Of the long sweep: a few minutes on one core."""


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
    write_others(folder)
    for name in NAMES:
        shutil.copytree(FOREIGN / name, folder / name)
    return folder


def write_others(folder: Path) -> None:
    """Write models to calibrate that are no safetensors: pickles of both kinds, GGUF."""
    weights = ShardReader(folder / "source-native")
    tensors = {name: weights.tensor(name).clone() for name in weights.names}
    for name, zipped in (("source-bin", True), ("source-old-bin", False)):
        shutil.copytree(folder / "source-native", folder / name)
        (folder / name / SHARD).unlink()
        torch.save(tensors, folder / name / BIN, _use_new_zipfile_serialization=zipped)
    if importlib.util.find_spec("gguf") is None:
        return
    from tests.gguf_model import write_gguf

    (folder / "source-gguf").mkdir()
    write_gguf(folder / "source-gguf" / GGUF, tensors, tokenizer=True)


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


def test_some_damaged_checkpoints_work_or_are_refused(good: Path, tmp_path: Path) -> None:
    result = attempts(good, tmp_path, 0, FEW, timeout=600)
    assert not result["faults"]
    for name, outcomes in result["intact"].items():
        expected = {"load": "finite", **({"write": "str"} if name in BASES else {})}
        if name.startswith("source"):
            expected = {"source": "opened", "tokens": "read"}
        assert {way: outcomes[way] for way in expected} == expected, name
    assert sum(result["counts"].values()) == FEW * 6
    assert result["counts"]["load: refused"] > FEW // 3
    assert result["counts"]["source: opened"] > 1
    assert result["counts"]["tokens: read"] > 1


@pytest.mark.slow
def test_thousands_of_damaged_checkpoints_work_or_are_refused(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = attempts(good, tmp_path, FEW, SEEDS, timeout=3600)
    with capsys.disabled():
        print(f"\n{SEEDS} damaged checkpoints: {json.dumps(result['counts'], indent=1)}")
        print(*result["faults"], sep="\n")
    assert not result["faults"]
