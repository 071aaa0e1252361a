"""The command line on a checkpoint that another tool wrote, with no quantkit.json beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantkit.cli.main import main
from tests import tiny

MODELOPT = Path(__file__).parents[1] / "fixtures" / "foreign" / "modelopt-fp8-kv"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(MODELOPT, tmp_path / "foreign")
    return tiny.save_tokenizer(tmp_path / "foreign")


def printed_by(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[str, str]:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_generate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "the cat", "--max-new-tokens", "4"]
    assert printed_by(capsys, "generate", folder, *flags)[0].strip()


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, notes = printed_by(capsys, "inspect", folder)
    assert "modelopt, weights per tensor, inputs static per tensor" in table
    assert table.count("down_proj") == 1
    assert "no quantkit.json" in notes


def test_eval_measures_both_kinds_of_cache(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(tiny.sentence(60))
    flags = ["--data", text, "--window", "32", "--json"]
    result = json.loads(printed_by(capsys, "eval", folder, *flags)[0])
    assert result["measurements"].keys() == {"none", "fp8"}
