"""Several processes under torchrun calibrate what one does, to the last bit, and end together.

On CPUs over gloo. A process costs seconds of imports, so each torchrun runs all variants.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from quantkit.calibrate import calibrate
from quantkit.calibrate.batches import make_batches, own_blocks
from quantkit.calibrate.ranks import BLOCK_SEQUENCES, Ranks
from quantkit.calibrate.shared_work import group_owners
from tests import tiny

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
SAMPLES = 21
"""Three blocks, the last of them not full."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of several lengths, more tokens in all than there are channels to tell apart."""
    folder = tmp_path_factory.mktemp("rows")
    texts = [{"text": tiny.sentence(20 + 7 * (n % 5), seed=n)} for n in range(SAMPLES)]
    return tiny.write_jsonl(folder / "rows.jsonl", texts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**{**tiny.LLAMA, "num_hidden_layers": 3})
    return tiny.save_model(tmp_path_factory.mktemp("models") / "llama", config)


@pytest.fixture(scope="module")
def variants(llama: Path, rows: Path, model_of: Callable[[str], Path]) -> dict[str, Any]:
    """Options by name: every statistic that is summed over processes is in one of them."""
    common = {"model": str(llama), "data": [str(rows)], "samples": SAMPLES}
    experts = {**common, "model": str(model_of("qwen2-moe"))}
    return {
        "dynamic": {**common, "budget": 1.3},
        "smoothed": {**common, "tiers": "range,smoothing", "budget": 0},
        "static": {**common, "recipe": "fp8-static", "budget": 0},
        "percentile": {**common, "recipe": "fp8-static", "observer": "percentile", "tiers": "none"},
        "accurate": {**common, "recipe": "fp8-accurate", "samples": 9},
        "block": {**common, "recipe": "fp8-block", "batch_size": 3},
        "experts": {**experts, "budget": 0},
        "static experts": {**experts, "recipe": "fp8-static", "budget": 0, "kv": "none"},
        "shared keys": {**common, "model": str(model_of("gemma4-shared-kv")), "tiers": "none"},
        "weights": {**common, "tiers": "none", "kv": "none"},
    }


def torchrun(processes: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, "--nproc-per-node", str(processes), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENV,
        timeout=600,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(variants: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one process."""
    folder = tmp_path_factory.mktemp("alone")
    for name, options in variants.items():
        calibrate(output=folder / name, progress=False, **options)
    return folder


@pytest.mark.parametrize("processes", [2, 5])
def test_any_number_of_processes_writes_the_same_bytes(
    alone: Path, variants: dict[str, Any], tmp_path: Path, processes: int
) -> None:
    """With 5 there are more processes than blocks."""
    given = variants if processes == 2 else {k: variants[k] for k in ("dynamic", "static")}
    done = torchrun(processes, "-m", "tests.calibrate.ranked", tmp_path, json.dumps(given))
    assert done.returncode == 0, done.stderr
    for name in given:
        assert contents(tmp_path / name) == contents(alone / name), name
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(given)


class TestCommand:
    @pytest.fixture
    def words(self, llama: Path, rows: Path, tmp_path: Path) -> list[str | Path]:
        command = ["-m", "quantkit", "calibrate", llama, "-o", tmp_path / "out", "--data", rows]
        return [*command, "--samples", str(SAMPLES), "--budget", "1.3"]

    def test_only_the_first_process_speaks(
        self, alone: Path, words: list[str | Path], tmp_path: Path
    ) -> None:
        done = torchrun(2, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(tmp_path / "out")
        assert done.stdout.count("all tensors") == 1
        assert done.stderr.count("layer 3/3") == 1
        assert contents(tmp_path / "out") == contents(alone / "dynamic")

    def test_an_error_in_all_is_said_once(self, words: list[str | Path], tmp_path: Path) -> None:
        done = torchrun(2, *words, "--kv", "fp9")
        assert done.returncode != 0
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr
        assert "fp9" in errors[0]
        assert not list(tmp_path.iterdir())

    def test_a_killed_process_ends_the_run_which_can_be_resumed(
        self, alone: Path, words: list[str | Path], tmp_path: Path
    ) -> None:
        command = [*TORCHRUN, "--nproc-per-node", "2", *map(str, words)]
        with subprocess.Popen(
            command, cwd=ROOT, env=ENV, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as run:
            first = tmp_path / ".out.journal" / "layer-00000.json"
            deadline = time.monotonic() + 300
            while not first.exists() and run.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            os.kill(helper_of(run.pid), signal.SIGKILL)
            _, stderr = run.communicate(timeout=120)
        assert run.returncode != 0
        assert (tmp_path / ".out.journal").is_dir(), stderr
        done = torchrun(3, *words, "--resume")
        assert done.returncode == 0, done.stderr
        assert "continuing after " in done.stderr
        assert "layer 1/3" not in done.stderr
        assert contents(tmp_path / "out") == contents(alone / "dynamic")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def helper_of(launcher: int) -> int:
    """Return the process that torchrun started as its second."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if b"RANK=1" in environment:
            return child
    raise AssertionError(f"{launcher} has no second process among {children}")


class TestShares:
    def test_blocks_go_around_and_every_sequence_is_somewhere(self) -> None:
        batches = make_batches([torch.full((5 + n % 3,), n) for n in range(30)], 4)
        found = [own_blocks(batches, Ranks(rank, 3)) for rank in range(3)]
        places = {
            (batch.first + n, int(row[0]))
            for blocks in found
            for block in blocks
            for batch in block
            for n, row in enumerate(batch.ids)
        }
        ordered = [int(row[0]) for batch in batches for row in batch]
        assert places == set(enumerate(ordered))
        blocks = [[block[0].block for block in of_rank] for of_rank in found]
        assert blocks == [[0, 3], [1], [2]]
        sizes = [sum(len(batch.ids) for batch in block) for block in found[0]]
        assert sizes == [BLOCK_SEQUENCES, 30 - 3 * BLOCK_SEQUENCES]

    def test_the_costly_group_has_an_owner_of_its_own(self) -> None:
        shapes = {"q_proj": (64, 64), "k_proj": (16, 64), "o_proj": (64, 64)}
        shapes |= {"gate_proj": (256, 64), "up_proj": (256, 64), "down_proj": (64, 256)}
        modules = {f"a.{n}": nn.Linear(k, rows, device="meta") for n, (rows, k) in shapes.items()}
        assert group_owners(modules, 1) == dict.fromkeys(
            ("a.q_proj", "a.o_proj", "a.gate_proj", "a.down_proj"), 0
        )
        owners = group_owners(modules, 2)
        assert [n for n, owner in owners.items() if owner == owners["a.down_proj"]] == [
            "a.down_proj"
        ]
        assert len(set(group_owners(modules, 4).values())) == 4

    def test_one_process_sends_to_itself(self) -> None:
        ranks, value = Ranks(), {"x": torch.ones(2)}
        assert ranks.broadcast(value) is value
        assert ranks.share(value) == ranks.gather(value) == [value]
        assert ranks.send(value, 0, 0) is value
        ranks.wait()
