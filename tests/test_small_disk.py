"""Real disks that are too small, fill up while a run lasts, or are read-only; other writers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from quantkit.calibrate import calibrate, joint_run, setup
from quantkit.errors import CheckpointError
from quantkit.export import export, exporting
from tests import checkpoints, tiny

MEGABYTE = 1 << 20
Write = Callable[..., Any]
"""Calibrates or exports to a folder, over an earlier result if there is one."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of one megabyte; skip where that is not permitted.

    Limits on the size of a file stand in for it there: in `tests/cli/test_calibrate.py`,
    `tests/export/test_export.py` and `tests/test_shards.py`.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    with suppress(FileNotFoundError):
        if subprocess.run(mount, capture_output=True).returncode == 0:
            yield folder
            subprocess.run(["umount", "-l", str(folder)], check=True)
            return
    pytest.skip("this system lets the tests mount no file system")


@pytest.fixture(params=["calibrate", "export"])
def write(request: pytest.FixtureRequest, calibration_file: Path, tmp_path: Path) -> Write:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**{**tiny.LLAMA, **sizes})
    if request.param == "calibrate":
        model = tiny.save_model(tmp_path / "model", config)
        given = {"data": [str(calibration_file)], "samples": 4, "tiers": "none", "kv": "none"}
        return lambda out, **more: calibrate(model, out, progress=False, **given, **more)
    (tmp_path / "built").mkdir()
    model = checkpoints.build(tmp_path / "built", config, checkpoints.DYNAMIC, "fp8")
    return lambda out, **_: export(model, out, progress=False)


def fill(disk: Path, leave: int = 0) -> None:
    """Leave no more bytes free than that."""
    with (disk / "filler").open("wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(file.tell() - leave)


def fill_when_it_starts_writing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another process take the space after it was found to be there."""
    layer = joint_run.calibrate_layer

    def filling_layer(model: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        if number == 1:
            fill(disk)
        return layer(model, number, *args, **kwargs)

    monkeypatch.setattr(joint_run, "calibrate_layer", filling_layer)
    monkeypatch.setattr(exporting, "check_free_space", lambda *_: fill(disk, 16_384))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"filler"}


def test_b28_a_disk_that_is_too_small_is_found_before_any_work(
    write: Write, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_run, "calibrate_layer", None)
    (disk / "filler").write_bytes(bytes(MEGABYTE - 20_000))
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes and the disk has [\d,]+ free"):
        write(disk / "out")
    assert names(disk) == set()


@pytest.mark.parametrize("earlier", [False, True], ids=["new", "over an earlier result"])
def test_b28_a_disk_that_fills_up_leaves_what_was_there(
    write: Write, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """Once there is space again the same command gives the same bytes, resumed or not."""
    write(tmp_path / "expected" / "out")
    if earlier:
        write(disk / "out")
        (disk / "out" / "mark").write_text("the earlier one")
    before = contents(disk / "out") if earlier else {}
    with monkeypatch.context() as patch:
        fill_when_it_starts_writing(disk, patch)
        message = rf"^cannot write {re.escape(str(disk))}.*: No space left on device; "
        with pytest.raises(CheckpointError, match=message):
            write(disk / "out")
    assert (contents(disk / "out") if earlier else {}) == before
    assert names(disk) - {".out.journal"} == ({"out"} if earlier else set())
    (disk / "filler").unlink()
    write(disk / "out", resume=True)
    assert contents(disk / "out") == contents(tmp_path / "expected" / "out")
    assert names(disk) == {"out"}


@pytest.mark.parametrize("write", ["calibrate"], indirect=True)
def test_b28_neither_do_hidden_states_that_find_no_space(
    write: Write, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "HIDDEN_SHARE", 0.0)
    test_b28_a_disk_that_fills_up_leaves_what_was_there(write, disk, tmp_path, monkeypatch, False)


def test_b28_a_read_only_disk_is_found_before_any_work(
    write: Write, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_run, "calibrate_layer", None)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(disk))} is not a writable folder"):
        write(disk / "out")
    assert names(disk) == set()


HOLD = """
import sys
from pathlib import Path
from quantkit.staging import StagedFolder
with StagedFolder(Path(sys.argv[1])) as stage:
    (stage.path / "half").write_text("written")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_that_writes_there_is_named_until_it_dies(
    write: Write, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=rf"another process \({other.pid}\) is writing"):
            write(tmp_path / "out")
        assert (tmp_path / ".out.incomplete" / "half").read_text() == "written"
        other.kill()
    write(tmp_path / "out")
    assert {path.name for path in tmp_path.glob("*out*")} == {"out"}
    assert "half" not in contents(tmp_path / "out")
