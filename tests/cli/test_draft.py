from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantkit.cli.main import main
from quantkit.speculative.head_weights import is_head


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to write into."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def run(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def test_a_drafter_is_written_into_the_checkpoint_and_found_there(
    checkpoint: Path, calibration_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--minutes", "0.05", "--data", "self", "--data", calibration_file]
    assert run("draft", checkpoint, *options) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{checkpoint / 'draft'}\n"
    assert "written" in printed.err
    assert "first tokens accepted" in printed.err
    assert is_head(checkpoint / "draft")
    answer = ["generate", checkpoint, "--prompt", "the cat", "--max-new-tokens", "8"]
    answer.append("--deterministic")
    assert run(*answer) == 0
    plain = capsys.readouterr().out
    assert run(*answer, "--draft", "auto") == 0
    assert capsys.readouterr().out == plain


def test_json_tells_what_was_learned(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "elsewhere"
    assert run("draft", checkpoint, "-o", output, "--minutes", "0.05", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["path"] == str(output)
    assert result["updates"] > 0
    assert len(result["greedy_acceptance"]) == len(result["sampled_acceptance"])


def test_a_checkpoint_is_not_overwritten(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("draft", checkpoint, "-o", checkpoint) == 2
    assert "is a checkpoint, not a drafter" in capsys.readouterr().err
