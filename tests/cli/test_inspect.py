"""`quantkit inspect` as its users run it: on a checkpoint that this version wrote, and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.cli.main import main
from quantkit.inspection import inspect
from tests.cli.command import assert_one_line_error, quantkit
from tests.inspection.documents import document, write_folder


def test_a_fresh_checkpoint_is_shown_on_stdout(tiny_checkpoint: Path) -> None:
    done = quantkit("inspect", tiny_checkpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model ")
    assert "tiny-llama" in done.stdout
    for kind in ("q_proj", "down_proj"):
        assert done.stdout.count(kind) == 2
    assert "\x1b" not in done.stdout


def test_json_is_all_of_stdout_and_equals_the_library(tiny_checkpoint: Path) -> None:
    done = quantkit("inspect", tiny_checkpoint, "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value.pop("report") is None
    assert value == json.loads(json.dumps(inspect(tiny_checkpoint).to_json()))
    report = json.loads((tiny_checkpoint / "quantkit.json").read_text())
    assert value["source_bytes"] == report["source_bytes"]
    names = [module["name"] for layer in report["layers"] for module in layer["modules"]]
    assert [m["name"] for layer in value["layers"] for m in layer["modules"]] == names


def test_a_page_is_written_and_named_last(tiny_checkpoint: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = quantkit("inspect", tiny_checkpoint, "-o", page)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(page)
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.endswith("</html>\n")
    done = quantkit("inspect", tiny_checkpoint, "-o", page, "--json")
    assert json.loads(done.stdout)["report"] == str(page)
    assert page.read_text() == text


def test_warnings_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, document(), weights=True)
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(folder)])
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "warning: 16 of 32 samples usable",
        "warning: FP8 does not hold the keys of these layers well: 1",
    ]
    assert "warning" not in printed.out


def test_all_shows_every_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, document(10), weights=True)
    counts = []
    for flags in ([], ["--all"]):
        with pytest.raises(SystemExit, match="0"):
            main(["inspect", str(folder), *flags])
        counts.append(capsys.readouterr().out.count("e4m3"))
    assert counts == [10, 69]


def test_a_narrow_terminal_cuts_no_number(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, document(10), weights=True)
    done = subprocess.run(
        [sys.executable, "-m", "quantkit", "inspect", str(folder), "--all"],
        env=os.environ | {"COLUMNS": "40", "FORCE_COLOR": "1", "TERM": "xterm"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "…" not in done.stdout
    assert "30.0 -> 33.0" in done.stdout


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["has no quantkit.json", "give the folder that 'quantkit calibrate' wrote"]),
        ("{", ["quantkit.json", "restore the file, or calibrate again"]),
        ('{"layers": 1}', ["layers is 1, expected a list"]),
    ],
)
def test_what_is_no_checkpoint_is_one_line_and_code_2(
    tmp_path: Path, content: str | None, parts: list[str]
) -> None:
    if content is not None:
        (tmp_path / "quantkit.json").write_text(content)
    assert_one_line_error(quantkit("inspect", tmp_path), 2, *parts)


def test_nothing_is_printed_if_the_page_cannot_be_written(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    done = quantkit("inspect", tiny_checkpoint, "-o", tmp_path / "report.pdf")
    assert_one_line_error(done, 2, "report.pdf", "ends in .html")
