"""A run that was killed goes on where it was, and ends with the same bytes."""

from __future__ import annotations

import json
import logging
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
from transformers import LlamaConfig

from quantkit.calibrate import Report, calibrate, joint_run, journal, pipeline
from quantkit.calibrate.journal import Interrupted
from quantkit.errors import CalibrationError, CheckpointError, DataError
from tests import tiny
from tests.calibrate import models
from tests.cli.command import quantkit

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"samples": 4, "tiers": "none", "max_shard_bytes": 12_000}


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**{**tiny.LLAMA, **sizes})
    return tiny.save_model(tmp_path_factory.mktemp("models") / "three", config)


@pytest.fixture
def run(three_layers: Path, calibration_file: Path, tmp_path: Path) -> Callable[..., Report]:
    def call(name: str = "out", **options: Any) -> Report:
        given = {"data": [str(calibration_file)], "progress": False, **OPTIONS, **options}
        return calibrate(given.pop("model", three_layers), tmp_path / name, **given)

    return call


def stop_in_layer(
    monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> Callable[[], None]:
    """Let calibrating layer `number` raise; the function that is returned undoes it."""
    original = joint_run.calibrate_layer

    def stopping(model: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        if layer == number:
            raise error
        return original(model, layer, *args, **kwargs)

    monkeypatch.setattr(joint_run, "calibrate_layer", stopping)
    return lambda: monkeypatch.setattr(joint_run, "calibrate_layer", original)


def count_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of every layer that is calibrated."""
    original, ran = joint_run.calibrate_layer, list[int]()

    def counting(model: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        ran.append(number)
        return original(model, number, *args, **kwargs)

    monkeypatch.setattr(joint_run, "calibrate_layer", counting)
    return ran


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


KILLS: dict[str, tuple[Any, Any]] = {
    "any point": (12, 1),
    "again": ([[30, 5], [70, 12, 3], [-4]], [[30, 5], [50, 30], [70, 12, 3], [-7], [-4], [-2]]),
    "all tiers": (40, 10),
    "without data": (30, 10),
    "shared keys": (120, 30),
    "spilled": (60, 8),
}
"""Where to kill: in the suite, and in the long run. A step, or trials of several kills each."""

KILL_OPTIONS: dict[str, dict[str, Any]] = {
    "any point": OPTIONS,
    "again": OPTIONS,
    "all tiers": {"samples": 4, "budget": 1.4, "tiers": None},
    "without data": {"samples": 4, "kv": "none", "tiers": "none"},
    "shared keys": OPTIONS,
    "spilled": {**OPTIONS, "samples": 10, "hidden_share": 0.0},
}

Kill = Callable[[int], dict[str, Any]]


class TestKill:
    """Kill -9 at many points of a run, in a process of its own; see `killing`.

    Each point leaves the old or the new result, and resuming runs no finished layer.
    """

    @pytest.fixture
    def kill(
        self,
        three_layers: Path,
        model_of: Callable[[str], Path],
        calibration_file: Path,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Kill:
        """Return a function that runs all variants, of the suite (0) or of the long run (1)."""
        models = dict.fromkeys(KILLS, three_layers) | {"shared keys": model_of("gemma4-shared-kv")}

        def run(extent: int) -> dict[str, Any]:
            variants = {
                name: [str(models[name]), KILLS[name][extent], KILL_OPTIONS[name]] for name in KILLS
            }
            folder = tmp_path_factory.mktemp("kills")
            arguments = [str(calibration_file), str(folder), json.dumps(variants)]
            done = subprocess.run(
                [sys.executable, "-m", "tests.calibrate.killing", *arguments],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            assert done.returncode == 0, done.stderr
            result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return result

        return run

    def test_at_some_points(self, kill: Kill) -> None:
        results = kill(0)
        assert not {name: result["wrong"] for name, result in results.items() if result["wrong"]}
        assert results["any point"]["layers"] == 3
        assert results["any point"]["points"] > 60
        assert results["any point"]["tried"] >= 6
        assert results["again"]["tried"] == 3
        assert results["shared keys"]["layers"] == 4
        assert min(result["tried"] for result in results.values()) >= 2

    @pytest.mark.slow
    def test_at_every_point(self, kill: Kill, capsys: pytest.CaptureFixture[str]) -> None:
        results = kill(1)
        with capsys.disabled():
            for name, result in results.items():
                print(f"\nkilled, {name}: {result['tried']} times of {result['points']} points")
        assert not {name: result["wrong"] for name, result in results.items() if result["wrong"]}
        assert results["any point"]["tried"] == results["any point"]["points"]


class TestCtrlC:
    def test_it_says_how_to_go_on_and_does(
        self, run: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = run("expected")
        again = stop_in_layer(monkeypatch, 2, KeyboardInterrupt())
        with pytest.raises(Interrupted, match=r"interrupted after 2 of 3 layers; .*--resume"):
            run()
        assert beside(tmp_path) == [".out.journal", "expected"]
        again()
        ran = count_layers(monkeypatch)
        report = run(resume=True)
        assert ran == [2]
        assert report.to_json() == expected.to_json()
        assert contents(tmp_path / "out") == contents(tmp_path / "expected")
        assert beside(tmp_path) == ["expected", "out"]

    @pytest.mark.parametrize(("layer", "expected"), [(2, Interrupted), (0, KeyboardInterrupt)])
    def test_it_counts_also_where_a_library_makes_another_error_of_it(
        self,
        run: Callable[..., Report],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        layer: int,
        expected: type[BaseException],
    ) -> None:
        original = joint_run.calibrate_layer

        def in_c(model: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            if number < layer:
                return original(model, number, *args, **kwargs)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                raise ValueError("could not determine the shape of a storage") from None

        signal.signal(signal.SIGINT, signal.default_int_handler)
        monkeypatch.setattr(joint_run, "calibrate_layer", in_c)
        with pytest.raises(expected) as caught:
            run()
        assert type(caught.value) is expected
        assert beside(tmp_path) == ([".out.journal"] if layer else [])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_before_the_first_layer_is_finished_nothing_is_left(
        self, run: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stop_in_layer(monkeypatch, 0, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt) as caught:
            run()
        assert not isinstance(caught.value, Interrupted)
        assert beside(tmp_path) == []

    def test_the_command_ends_with_130_and_one_line(
        self, three_layers: Path, tmp_path: Path
    ) -> None:
        rows = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": tiny.sentence(60)}] * 150)
        words = ["calibrate", three_layers, "-o", tmp_path / "out", "--data", rows]
        words += ["--samples", "150", "--batch-size", "1", "--tiers", "none"]
        command = [sys.executable, "-m", "quantkit", *map(str, words)]
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        first = tmp_path / ".out.journal" / "layer-00000.json"
        deadline = time.monotonic() + 120
        while not first.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
        assert stdout == ""
        assert "Traceback" not in stderr
        last = stderr.splitlines()[-1]
        assert last.startswith("interrupted after ")
        assert last.endswith("layers; the same command with --resume continues")
        done = quantkit(*words, "--resume")
        assert done.returncode == 0, done.stderr
        assert "continuing after " in done.stderr
        assert "layer 1/3" not in done.stderr
        assert beside(tmp_path) == ["out", "rows.jsonl"]


class TestFailures:
    @pytest.mark.parametrize(
        "error", [CalibrationError("no scale"), RuntimeError("a bug")], ids=["ours", "bug"]
    )
    def test_an_error_that_would_only_come_again_leaves_nothing(
        self,
        run: Callable[..., Report],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
    ) -> None:
        run(samples=2)
        before = contents(tmp_path / "out")
        stop_in_layer(monkeypatch, 2, error)
        with pytest.raises(type(error), match=str(error)):
            run()
        assert contents(tmp_path / "out") == before
        assert beside(tmp_path) == ["out"]

    @pytest.mark.parametrize(
        "error",
        [
            OSError(28, "No space left on device"),
            MemoryError(),
            torch.OutOfMemoryError("no memory"),
        ],
        ids=["disk", "memory", "gpu"],
    )
    def test_one_that_may_pass_keeps_what_is_finished(
        self,
        run: Callable[..., Report],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        error: Exception,
    ) -> None:
        run("expected")
        again = stop_in_layer(monkeypatch, 1, error)
        with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)):
            run()
        assert "1 of 3 layers are kept in" in caplog.text
        assert "--resume" in caplog.text
        again()
        ran = count_layers(monkeypatch)
        run(resume=True)
        assert ran == [1, 2]
        assert contents(tmp_path / "out") == contents(tmp_path / "expected")

    def test_a_wrong_option_before_the_layers_does_not_touch_an_unfinished_run(
        self, run: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        again = stop_in_layer(monkeypatch, 2, KeyboardInterrupt())
        with pytest.raises(Interrupted):
            run()
        before = contents(tmp_path / ".out.journal")
        with pytest.raises(DataError):
            run(data=["absent.jsonl"])
        assert contents(tmp_path / ".out.journal") == before
        again()
        ran = count_layers(monkeypatch)
        run(resume=True)
        assert ran == [2]


class TestFingerprint:
    @pytest.fixture
    def unfinished(
        self, run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., Report]:
        again = stop_in_layer(monkeypatch, 1, KeyboardInterrupt())
        with pytest.raises(Interrupted):
            run()
        again()
        return run

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"recipe": "fp8-block"}, ["recipe.name was fp8-dynamic, is fp8-block"]),
            ({"kv": "none"}, ["recipe.kv was fp8, is none"]),
            ({"seed": 1}, ["seed was 0, is 1"]),
            ({"samples": 3}, ["data.samples was 4, is 3"]),
            ({"batch_size": 1}, ["batch_size was ", ", is 1"]),
            ({"dtype": "float16"}, ["dtype was auto, is float16"]),
            ({"ignore": ["down_proj"]}, ["recipe.ignore.1 was not there, is down_proj"]),
            ({"max_shard_bytes": 10**6}, ["max_shard_bytes was 12000, is 1000000"]),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_another_run_is_not_resumed(
        self,
        unfinished: Callable[..., Report],
        tmp_path: Path,
        options: dict[str, Any],
        parts: list[str],
    ) -> None:
        before = contents(tmp_path / ".out.journal")
        with pytest.raises(CheckpointError) as caught:
            unfinished(resume=True, **options)
        message = str(caught.value)
        assert message.startswith(f"the unfinished run of {tmp_path / 'out'} was another one: ")
        assert message.endswith("repeat it as it was, or run without --resume to start over")
        assert all(part in message for part in parts), message
        assert contents(tmp_path / ".out.journal") == before
        assert beside(tmp_path) == [".out.journal"]

    def test_nor_with_another_model_config_or_text(
        self,
        unfinished: Callable[..., Report],
        three_layers: Path,
        calibration_file: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        config = LlamaConfig.from_pretrained(three_layers)
        other = tiny.save_model(tmp_path / "m" / "three", config, seed=1)
        with pytest.raises(CheckpointError, match="one: the model's weights differ;"):
            unfinished(resume=True, model=other)
        edited = tmp_path / "c" / "three"
        edited.mkdir(parents=True)
        for path in three_layers.iterdir():
            (edited / path.name).write_bytes(path.read_bytes())
        text = (edited / "config.json").read_text()
        (edited / "config.json").write_text(text.replace("1e-06", "1e-05"))
        with pytest.raises(CheckpointError, match=r"one: the model's config.json differ;"):
            unfinished(resume=True, model=edited)
        rows = calibration_file.read_text().replace(" the ", " a ")
        (tmp_path / calibration_file.name).write_text(rows)
        with pytest.raises(CheckpointError, match="the calibration tokens differ;"):
            unfinished(resume=True, data=[str(tmp_path / calibration_file.name)])
        monkeypatch.setattr("quantkit.__version__", "9.9")
        with pytest.raises(CheckpointError, match=r"quantkit_version was .*, is 9\.9"):
            unfinished(resume=True)

    def test_without_resume_it_is_discarded_and_that_is_said_once(
        self,
        unfinished: Callable[..., Report],
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        ran = count_layers(monkeypatch)
        unfinished()
        assert ran == [0, 1, 2]
        lines = [r.getMessage() for r in caplog.records if "unfinished" in r.getMessage()]
        assert len(lines) == 1
        assert "1 layer" in lines[0]
        assert "--resume would continue it" in lines[0]
        assert beside(tmp_path) == ["out"]

    def test_a_damaged_journal_is_named(
        self, unfinished: Callable[..., Report], tmp_path: Path
    ) -> None:
        path = tmp_path / ".out.journal" / "layer-00000.json"
        path.write_text("{")
        with pytest.raises(CheckpointError, match=r"layer-00000\.json.*without --resume to start"):
            unfinished(resume=True)

    def test_truncated_hidden_states_are_never_used(
        self, unfinished: Callable[..., Report], tmp_path: Path
    ) -> None:
        path = tmp_path / ".out.journal" / "hidden-00001-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=r"hidden-00001-00000\.safetensors is damaged"):
            unfinished(resume=True)
        assert beside(tmp_path) == []


class TestNothingToResume:
    def test_a_first_run_starts_and_says_so(
        self, run: Callable[..., Report], caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        with caplog.at_level(logging.INFO, "quantkit"):
            run(resume=True)
        assert "no unfinished run" in caplog.text
        assert beside(tmp_path) == ["out"]

    def test_a_finished_run_is_told_from_its_folder_and_does_nothing(
        self,
        run: Callable[..., Report],
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first = run()
        before = contents(tmp_path / "out")
        ran = count_layers(monkeypatch)
        with caplog.at_level(logging.INFO, "quantkit"):
            report = run(resume=True)
        assert ran == []
        assert "is finished: there is nothing to resume" in caplog.text
        assert contents(tmp_path / "out") == before
        assert report.to_json() == json.loads((tmp_path / "out" / "quantkit.json").read_text())
        assert str(report) == str(first)
        assert report.path == tmp_path / "out"

    @pytest.mark.parametrize(
        "options", [{"seed": 1}, {"kv": "none"}, {"dtype": "float16"}], ids=str
    )
    def test_a_finished_run_with_other_options_is_replaced(
        self,
        run: Callable[..., Report],
        monkeypatch: pytest.MonkeyPatch,
        options: dict[str, Any],
    ) -> None:
        run()
        ran = count_layers(monkeypatch)
        run(resume=True, **options)
        assert ran == [0, 1, 2]


class TestOneAtATime:
    def test_a_second_run_is_refused_while_the_first_lasts(
        self, run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        original = joint_run.calibrate_layer
        messages = []

        def nested(*args: Any, **kwargs: Any) -> Any:
            with pytest.raises(CheckpointError) as caught:
                run(resume=True)
            messages.append(str(caught.value))
            return original(*args, **kwargs)

        monkeypatch.setattr(joint_run, "calibrate_layer", nested)
        run()
        assert len(messages) == 3
        assert messages[0] == (
            f"another process ({os.getpid()}) is writing {tmp_path / 'out'}; wait until it ends, "
            "or choose another output folder"
        )
        assert beside(tmp_path) == ["out"]

    def test_only_one_set_of_hidden_states_is_kept(
        self, run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        add, found = journal.Journal.add, []

        def adding(self: journal.Journal, *args: Any) -> None:
            add(self, *args)
            found.append(sorted(p.name for p in self.folder.glob("hidden*")))

        monkeypatch.setattr(journal.Journal, "add", adding)
        run()
        assert found == [["hidden-00001-00000.safetensors"], ["hidden-00002-00000.safetensors"], []]


class TestSpace:
    @pytest.mark.parametrize(("dtype", "factor"), [("auto", 1), ("float32", 2)])
    def test_the_dtype_counts(
        self,
        run: Callable[..., Report],
        three_layers: Path,
        monkeypatch: pytest.MonkeyPatch,
        dtype: str,
        factor: int,
    ) -> None:
        """The plan says to the byte what the tensors take (B28)."""
        needed = []
        monkeypatch.setattr(pipeline, "check_free_space", lambda _, size: needed.append(size))
        report = run(dtype=dtype, kv="none")
        assert (
            calibrate(three_layers, dry_run=True, dtype=dtype, kv="none").plan.target_bytes
            == report.plan.target_bytes
        )
        kept = 2 * 128 * 32 * 2 + 7 * 32 * 2  # embeddings and head, norms, in bfloat16
        quantized = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
        scales = 3 * 4 * (2 * 32 + 2 * 16 + 2 * 48 + 32)
        assert report.plan.target_bytes == factor * kept + quantized + scales
        assert needed == [report.plan.target_bytes + OPTIONS["max_shard_bytes"]]


def test_a_model_of_every_kind_can_be_resumed(
    model_of: Callable[[str], Path],
    calibration_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a layer gets beside hidden states is there again."""
    refused = {"mpt"}
    for kind in models.MORE.keys() - refused:
        options: dict[str, Any] = {"data": [str(calibration_file)], "samples": 3, "tiers": "none"}
        options |= {"progress": False}
        if kind == "mamba":  # caches no keys
            options |= {"kv": "none"}
        calibrate(model_of(kind), tmp_path / kind, **options)
        again = stop_in_layer(monkeypatch, 1, KeyboardInterrupt())
        with pytest.raises(Interrupted):
            calibrate(model_of(kind), tmp_path / f"{kind}-2", **options)
        again()
        calibrate(model_of(kind), tmp_path / f"{kind}-2", resume=True, **options)
        assert contents(tmp_path / kind) == contents(tmp_path / f"{kind}-2"), kind
