"""Hidden states that live on the disk between layers: the same bits, and nothing left behind."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibrate import calibrate, joint_run, journal, moving, setup
from quantkit.calibrate.batches import Batch, Call
from quantkit.calibrate.free_memory import free_bytes
from quantkit.calibrate.journal import Interrupted
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.ranks import BLOCK_SEQUENCES
from quantkit.errors import CalibrationError, CheckpointError

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"budget": 1.3}),
    "smoothed": ("llama", {"tiers": "range,smoothing", "budget": 0}),
    "static": ("llama", {"recipe": "fp8-static", "budget": 0}),
    "with the head": ("llama", {"recipe": "fp8-accurate"}),
    "shared keys": ("gemma4-shared-kv", {"tiers": "none"}),
    "experts": ("qwen2-moe", {"budget": 0}),
    "static, plain": ("llama", {"recipe": "fp8-static", "tiers": "none"}),
}
Run = Callable[..., Path]


@pytest.fixture
def run(model_of: Callable[[str], Path], calibration_file: Path, tmp_path: Path) -> Run:
    """Calibrate a kind of model into a folder of `tmp_path`, on two blocks of samples."""

    def call(kind: str, name: str, **options: Any) -> Path:
        given = {"data": [str(calibration_file)], "samples": 12, "progress": False, **options}
        calibrate(model_of(kind), tmp_path / name, **given)
        return tmp_path / name

    return call


@pytest.fixture
def spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "HIDDEN_SHARE", 0.0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that gets the path of every file of hidden states that is read."""
    original, read = moving.safe_open, list[Path]()

    def opening(path: Path, *args: Any, **kwargs: Any) -> Any:
        read.append(path)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(moving, "safe_open", opening)
    return read


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_those_of_hidden_states_in_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant: str
) -> None:
    kind, options = VARIANTS[variant]
    read = watch_reads(monkeypatch)
    expected = contents(run(kind, "memory", **options))
    assert not read
    monkeypatch.setattr(setup, "HIDDEN_SHARE", 0.0)
    assert contents(run(kind, "disk", **options)) == expected
    assert {path.name for path in read} >= {
        f"hidden-{layer:05d}-{block:05d}.safetensors" for layer in (0, 1) for block in (0, 1)
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "memory"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_do_not_depend_on_memory_for_what_is_inside_a_layer(
    run: Run, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    kind, options = VARIANTS[variant]
    expected = contents(run(kind, "held", **options))
    monkeypatch.setattr(setup.Setup, "holds", lambda *args: False)
    assert contents(run(kind, "repeated", **options)) == expected


class TestEnds:
    @pytest.fixture
    def stop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[BaseException], Callable[[], None]]:
        """Let the second layer raise; the function that is returned undoes it."""
        original = joint_run.calibrate_layer

        def set_up(error: BaseException) -> Callable[[], None]:
            def stopping(model: Any, number: int, *args: Any, **kwargs: Any) -> Any:
                if number == 1:
                    raise error
                return original(model, number, *args, **kwargs)

            monkeypatch.setattr(joint_run, "calibrate_layer", stopping)
            return lambda: monkeypatch.setattr(joint_run, "calibrate_layer", original)

        return set_up

    @pytest.mark.parametrize("share", [0.0, 1.0], ids=["disk", "memory"])
    def test_a_run_that_is_taken_up_ends_alike_wherever_it_keeps_them(
        self, run: Run, stop: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float
    ) -> None:
        expected = contents(run("llama", "expected", budget=0))
        monkeypatch.setattr(setup, "HIDDEN_SHARE", 1.0 - share)
        again = stop(KeyboardInterrupt())
        with pytest.raises(Interrupted):
            run("llama", "out", budget=0)
        again()
        monkeypatch.setattr(setup, "HIDDEN_SHARE", share)
        assert contents(run("llama", "out", budget=0, resume=True)) == expected
        assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out"]

    @pytest.mark.usefixtures("spilling")
    def test_an_error_leaves_nothing(self, run: Run, stop: Any, tmp_path: Path) -> None:
        stop(CalibrationError("no scale"))
        with pytest.raises(CalibrationError, match="no scale"):
            run("llama", "out", budget=0)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.usefixtures("spilling")
    def test_two_sets_of_files_are_the_most(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add, found = journal.Journal.add, []

        def adding(self: journal.Journal, *args: Any) -> None:
            before = sorted(path.name[:12] for path in self.folder.glob("hidden*"))
            add(self, *args)
            found.append((before, [path.name[:12] for path in self.folder.glob("hidden*")]))

        monkeypatch.setattr(journal.Journal, "add", adding)
        run("llama", "out", tiers="none")
        first, second, third = (2 * [f"hidden-{n:05d}"] for n in range(3))
        assert found == [(first + second, second), (second + third, third)]


class Blocks:
    """Two blocks of one batch each, of which the second is alone in its block."""

    def __init__(self, folder: Path | None) -> None:
        self.states = [UserDict[str, tuple[Tensor, ...]]() for _ in range(2)]
        self.moving = Moving(2, 2, folder=folder)
        for number, shared in enumerate(self.states):
            hidden = torch.randn(3, 4, 2).bfloat16().transpose(0, 1)
            calls = [Call((), {"shared": shared}) for _ in range(3)]
            self.moving.append([Batch(hidden, None, calls, first=number * BLOCK_SEQUENCES)])

    def pass_layer(self) -> None:
        for number, (batch,) in enumerate(self.moving.rounds(moves=True)):
            batch.hidden = (batch.hidden.transpose(0, 1) * 1.5).transpose(0, 1)
            self.states[number]["keys"] = (batch.hidden[0] + 1, batch.hidden[1])

    def all(self) -> list[Tensor]:
        """Return everything that is on its way."""
        return [
            tensor
            for number, (batch,) in enumerate(self.moving.rounds())
            for tensor in (batch.hidden, *self.states[number].get("keys", ()))
        ]


def test_what_comes_back_from_the_disk_is_what_went_there(tmp_path: Path) -> None:
    torch.manual_seed(1)
    in_memory = Blocks(None)
    torch.manual_seed(1)
    on_disk = Blocks(tmp_path)
    for _ in range(3):
        for one, other in zip(in_memory.all(), on_disk.all(), strict=True):
            assert torch.equal(one, other)
        in_memory.pass_layer()
        on_disk.pass_layer()
    assert not any(on_disk.states)


def test_nothing_is_in_memory_between_layers(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    batches = [batch for block in blocks.moving._blocks for batch in block]
    for block in blocks.moving.rounds(moves=True):
        assert [batch.hidden.is_meta for batch in batches].count(False) == len(block) == 1
    assert all(batch.hidden.is_meta and batch.hidden.shape == (4, 3, 2) for batch in batches)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    (tmp_path / "hidden-00000-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"hidden-00000-00001\.safetensors is damaged"):
        blocks.all()


def test_free_memory_is_some_of_the_machine() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert 0 < free < 2**48


def test_a_container_has_its_limit_less_what_cannot_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.calibrate.free_memory.CGROUP", tmp_path)
    for name, text in {
        "memory.max": "1000000\n",
        "memory.current": "700000\n",
        "memory.stat": "anon 500000\ninactive_file 150000\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert free_bytes(torch.device("cpu")) == 450_000
    (tmp_path / "memory.max").write_text("max\n")
    unlimited = free_bytes(torch.device("cpu"))
    assert unlimited is not None
    assert unlimited > 450_000
