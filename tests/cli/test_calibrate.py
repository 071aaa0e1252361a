"""`quantkit calibrate` as its users run it: what comes out on which stream, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from quantkit.checkpoint import open_checkpoint
from tests.cli.command import (
    QUANTKIT,
    assert_one_line_error,
    quantkit,
    quantkit_process,
    running_quantkit,
)

OFFLINE_SECONDS = 30
"""Bound of a refusal without network: 5 s of waiting, and imports on a busy machine."""


def run_with(
    *arguments: str | Path, cwd: Path | None = None, prefix: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `quantkit ARGUMENTS` with more environment variables."""
    return subprocess.run(
        [*prefix, *QUANTKIT, *map(str, arguments)],
        env=os.environ | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_result_goes_to_stdout_and_progress_to_stderr(
    tiny_llama: Path, calibration_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    done = quantkit_process("calibrate", tiny_llama, "-o", out, "--data", calibration_file)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny-llama with recipe fp8-dynamic")
    assert re.fullmatch(r"[\d.]+ MB -> [\d.]+ MB \(\d+%\)", lines[-2])
    assert lines[-1] == str(out)
    # Not a terminal: one plain line a layer, with the time left.
    progress = [line for line in done.stderr.splitlines() if line.startswith("layer ")]
    assert [line.split()[1] for line in progress] == ["1/2", "2/2"]
    assert all(re.search(r"\d+\.\d s, \d+ s left +output SQNR [\d.]+ dB$", p) for p in progress)
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    # 16 rows of 128 asked for, and limits: each said once.
    assert done.stderr.count("16 of 128 samples usable") == 1
    assert done.stderr.count("64 tokens, the model's limit") == 1
    assert len(open_checkpoint(out).quantized) == 14
    assert tree(tmp_path / "new")[0] == "out"


def test_json_is_the_report_and_all_of_stdout(
    tiny_llama: Path, calibration_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--recipe", "fp8-static", "--seq-len", "32", "--samples", "4", "--kv", "none"]
    options += ["--ignore", "re:.*down_proj", "--seed", "3", "--batch-size", "2", "--json"]
    done = quantkit("calibrate", tiny_llama, "-o", out, "--data", calibration_file, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("path") == str(out)
    assert report == json.loads((out / "quantkit.json").read_text())
    assert report["seed"] == 3
    assert report["data"]["samples"] == 4
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert block["kv_cache_scheme"] is None
    expected = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert sorted(block["ignore"]) == ["lm_head", *expected]


def test_a_dry_run_prints_the_modules_and_touches_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    places = {"HOME": str(home), "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "c")}
    done = run_with("calibrate", tiny_llama, "-o", out, "--dry-run", **places)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "_proj" in line or "lm_head" in line]
    assert len(rows) == 15
    assert "e4m3, by channel" in rows[0]
    assert "unchanged" in rows[-1]
    assert re.search(r"MB of memory .* s on this machine; nothing was written", done.stdout)
    assert tree(tmp_path) == ["home"]


def test_a_dry_run_in_json(tiny_llama: Path) -> None:
    done = quantkit("calibrate", tiny_llama, "--dry-run", "--json", "--recipe", "fp8-block")
    plan = json.loads(done.stdout)
    assert plan["recipe"] == "fp8-block"
    assert len(plan["modules"]) == 15
    assert {"source_bytes", "target_bytes", "memory_bytes", "seconds"} <= plan.keys()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--recipe", "fp8-dynamc"], ["'fp8-dynamc'", "did you mean 'fp8-dynamic'?"]),
        (["--ignore", "lm_haed"], ["'lm_haed'", "did you mean 'lm_head'?", "--dry-run"]),
        (["--data", "absent.jsonl"], ["absent.jsonl", "does not exist"]),
        (["--seq-len", "128"], ["--seq-len 128", "64"]),
        (["--kv", "fp9"], ["'fp9'", "fp8 (e4m3), fp8-head (e4m3), fp8-e3m4 (e3m4), none"]),
        (["--sampels", "3"], ["--sampels", "--samples", "quantkit calibrate --help"]),
    ],
    ids=lambda value: value[0].strip("-") if value[0].startswith("-") else None,
)
def test_a_wrong_option_is_one_line_that_names_it(
    tiny_llama: Path, tmp_path: Path, options: list[str], parts: list[str]
) -> None:
    done = quantkit("calibrate", tiny_llama, "-o", tmp_path / "out", *options)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(errors) == 1
    assert done.stderr.splitlines()[-1] == errors[0]
    assert all(part in errors[0] for part in parts), errors[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["model", "output", "missing"])
def test_a_path_that_cannot_be_used_is_named(tiny_llama: Path, tmp_path: Path, case: str) -> None:
    (tmp_path / "file").write_text("mine")
    model = {"model": tmp_path / "absent"}.get(case, tiny_llama)
    output = {"output": ["-o", str(tmp_path / "file")], "missing": []}.get(
        case, ["-o", str(tmp_path / "out")]
    )
    named = {"model": "absent does not exist", "output": "is not a folder", "missing": "-o"}[case]
    assert_one_line_error(quantkit("calibrate", model, *output), 2, named)
    assert (tmp_path / "file").read_text() == "mine"
    assert tree(tmp_path) == ["file"]


def test_ctrl_c_ends_with_130_and_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    rows = ["--samples", "4000", "--seq-len", "64", "--batch-size", "1"]
    staging = tmp_path / ".out.incomplete"
    with running_quantkit("calibrate", tiny_llama, "-o", tmp_path / "out", *rows) as process:
        deadline = time.monotonic() + 60
        while not staging.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert staging.exists(), "the run did not start"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == ""
    assert stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


class TestB34Offline:
    """No network: local things work, others are refused within seconds (B34)."""

    PROXY = "http://127.0.0.1:9"  # nothing listens on the discard port

    @pytest.mark.parametrize("offline", ["1", "0"], ids=["declared", "unreachable"])
    def test_an_uncached_hub_id_is_one_line_within_seconds(
        self, tmp_path: Path, offline: str
    ) -> None:
        started = time.monotonic()
        done = run_with(
            "calibrate",
            "some-org/some-model",
            "-o",
            tmp_path / "out",
            HF_HUB_OFFLINE=offline,
            HF_HOME=str(tmp_path / "hf"),
            HTTPS_PROXY=self.PROXY,
            https_proxy=self.PROXY,
        )
        assert time.monotonic() - started < OFFLINE_SECONDS
        cache = str(tmp_path / "hf")
        assert_one_line_error(done, 2, "some-org/some-model", cache, "hf download")
        assert not (tmp_path / "out").exists()

    def test_a_local_folder_and_file_need_no_network(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        """Also when it looks like a Hub id and offline mode is not declared."""
        (tmp_path / "org").mkdir()
        shutil.copytree(tiny_llama, tmp_path / "org" / "name")
        arguments = ("calibrate", "org/name", "-o", "out", "--data", calibration_file)
        cut_off = ("unshare", "-n") if can_unshare() else ()
        done = run_with(
            *arguments,
            cwd=tmp_path,
            prefix=cut_off,
            HF_HOME=str(tmp_path / "hf"),
            HTTPS_PROXY=self.PROXY,
            https_proxy=self.PROXY,
        )
        assert done.returncode == 0, done.stderr
        assert "org/name is a local folder" in done.stderr
        assert len(open_checkpoint(tmp_path / "out").quantized) == 14

    def test_a_cached_model_needs_no_network(self, tiny_llama: Path, tmp_path: Path) -> None:
        commit, repo = "0" * 40, tmp_path / "hf" / "hub" / "models--org--cached"
        snapshot = repo / "snapshots" / commit
        shutil.copytree(tiny_llama, snapshot)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
        done = run_with(
            "calibrate",
            "org/cached",
            "-o",
            tmp_path / "out",
            "--kv",
            "none",
            "--json",
            prefix=("unshare", "-n") if can_unshare() else (),
            HF_HOME=str(tmp_path / "hf"),
            HTTPS_PROXY=self.PROXY,
            https_proxy=self.PROXY,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["source"]["name"] == "org/cached"


def can_unshare() -> bool:
    """Tell whether a process without any network can be started here."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


class TestDiskFull:
    def test_a_limit_on_file_size_is_one_line_and_leaves_nothing(
        self, tiny_llama: Path, tmp_path: Path
    ) -> None:
        limited = ("sh", "-c", 'ulimit -f 40; exec "$@"', "sh")  # blocks of 512 bytes
        arguments = ("calibrate", tiny_llama, "-o", tmp_path / "out", "--samples", "4")
        done = run_with(*arguments, prefix=limited)
        error = done.stderr.splitlines()[-1]
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert error.startswith("error: cannot write")
        assert str(tmp_path) in error
        assert re.search(r"\d+ bytes|File too large", error)
        assert list(tmp_path.iterdir()) == []
