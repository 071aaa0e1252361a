"""`quantkit check` as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.lint import ENGINES, lint
from tests.cli.command import assert_one_line_error, quantkit
from tests.lint.folders import Q0, dynamic

OK = "vllm: ok; sglang: ok; transformers: ok; tensorrt-llm: ok\n"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    draft = dynamic()
    for layer in range(2):
        del draft.tensors[f"model.layers.{layer}.self_attn.q_proj.weight_scale"]
    draft.files.pop("tokenizer.json")
    return draft.save(tmp_path / "broken")


def test_a_fresh_checkpoint_is_clean(tiny_checkpoint: Path) -> None:
    done = quantkit("check", tiny_checkpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, OK, "")


def test_an_error_is_shown_and_the_exit_code_is_1(broken: Path) -> None:
    done = quantkit("check", broken)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "1 error\n" in done.stdout
    assert "1 warning\n" in done.stdout
    assert f"{Q0}.weight (and 1 more)" in done.stdout
    *_, last = done.stdout.splitlines()
    assert last == "; ".join(f"{engine}: 1 error, 1 warning" for engine in ENGINES)
    assert "\x1b" not in done.stdout


def test_warnings_alone_are_no_failure(tmp_path: Path) -> None:
    draft = dynamic()
    draft.files.pop("tokenizer.json")
    done = quantkit("check", draft.save(tmp_path), "--for", "vllm, sglang")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "vllm: 1 warning; sglang: 1 warning"


def test_json_is_all_of_stdout_and_equals_the_library(broken: Path) -> None:
    done = quantkit("check", broken, "--json", "--for", "vllm", "--tp", "2")
    assert done.returncode == 1
    value = json.loads(done.stdout)
    assert value == json.loads(json.dumps(lint(broken, ["vllm"], 2).to_json()))
    (error, *_) = value["findings"]
    assert error["rule"] == "scale-missing"
    assert error["engines"] == ["vllm"]
    assert error["places"] == [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)]
    assert value["engines"] == {"vllm": "1 error, 1 warning"}
    assert value["tensor_parallel"] == 2


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_cuts_nothing(width: int, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    done = quantkit("check", broken)
    assert done.returncode == 1
    assert "…" not in done.stdout
    assert "scale-missing" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--for", "vlm"], ["engine 'vlm' is not known (did you mean 'vllm'?)"]),
        (["--for", ""], ["is not known"]),
        (["--tp", "0"], ["--tp must be at least 1, got 0"]),
        (["--tp", "x"], ["--tp", "check --help"]),
    ],
)
def test_bad_usage_is_one_line_and_code_2(
    arguments: list[str], parts: list[str], broken: Path
) -> None:
    assert_one_line_error(quantkit("check", broken, *arguments), 2, *parts)


@pytest.mark.parametrize(
    ("config", "parts"),
    [(None, ["has no config.json"]), ("{", ["config.json is no JSON"])],
)
def test_what_is_no_checkpoint_is_one_line_and_code_2(
    config: str | None, parts: list[str], tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert_one_line_error(quantkit("check", tmp_path), 2, *parts)
