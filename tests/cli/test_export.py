"""`quantkit export` as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.cli.main import main
from tests.cli.command import assert_one_line_error, quantkit


def test_the_path_is_the_last_line_and_the_table_says_what_was_done(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    done = quantkit("export", tiny_checkpoint, "-o", tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == str(tmp_path / "hub")
    assert "codes as in the checkpoint" in done.stdout
    assert "no error for vllm, sglang, transformers, tensorrt-llm" in done.stdout
    assert (tmp_path / "hub" / "README.md").is_file()
    assert "module 14/14" in done.stderr


def test_json_is_all_of_stdout(tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = quantkit("export", tiny_checkpoint, "-o", tmp_path / "hub", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["path"] == str(tmp_path / "hub")
    assert value["rounded_again"] == 0
    assert value["weight_sqnr_db"] is None


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return int(exit_.value.code or 0)


def test_an_engine_that_would_not_load_it_fails_with_1(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two KV heads of 16 are 32 rows, which do not fill a block of 128."""
    out = tmp_path / "hub"
    code = run("export", tiny_checkpoint, "-o", out, "--format", "fp8-block", "--for", "vllm")
    printed = capsys.readouterr()
    assert code == 1
    assert printed.out == ""
    assert "failed: vllm would not load this" in printed.err
    assert not out.exists()


def test_without_for_such_an_engine_is_warned_of(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hub"
    assert run("export", tiny_checkpoint, "-o", out, "--format", "fp8-block") == 0
    printed = capsys.readouterr()
    assert "warning: vllm will not load it" in printed.err
    assert "no error for transformers" in printed.out
    assert "dB SQNR" in printed.out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--format", "gguf"], "--format 'gguf' is not known"),
        (["--for", "vlm"], "did you mean 'vllm'"),
        (["--tp", "0"], "invalid value for '--tp'"),
        (["--private"], "needs --push OWNER/NAME"),
        (["--push", "name"], "give OWNER/NAME"),
        (["--quality", "nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_bad_options_are_one_line_and_2(
    tiny_checkpoint: Path, tmp_path: Path, options: list[str], part: str
) -> None:
    done = quantkit("export", tiny_checkpoint, "-o", tmp_path / "hub", *options)
    assert_one_line_error(done, 2, part)
    assert not (tmp_path / "hub").exists()


def test_a_source_model_is_no_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    done = quantkit("export", tiny_llama, "-o", tmp_path / "hub")
    assert_one_line_error(done, 2, "has no quantization_config", "quantkit calibrate")


def test_a_push_without_a_token_is_refused_before_any_work(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    done = quantkit("export", tiny_checkpoint, "-o", tmp_path / "hub", "--push", "me/model")
    assert_one_line_error(done, 2, "--push me/model needs a token", "HF_TOKEN")
    assert not (tmp_path / "hub").exists()
