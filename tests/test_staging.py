"""A destination is complete or untouched, whatever happens on the way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from quantkit import staging
from quantkit.errors import CheckpointError
from quantkit.shards import read_json
from quantkit.staging import (
    MARKER,
    StagedFolder,
    check_destination,
    check_free_space,
    staged_file,
)


def produce(destination: Path, content: str) -> Path:
    with StagedFolder(destination) as stage:
        (stage.path / MARKER).write_text(content)
        (stage.path / "sub").mkdir()
        return stage.commit()


def fail(destination: Path, error: BaseException) -> None:
    with StagedFolder(destination) as stage:
        (stage.path / MARKER).write_text("half")
        raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_commit_moves_everything_and_leaves_nothing_beside(tmp_path: Path) -> None:
    out = produce(tmp_path / "a" / "out", "1")
    assert names(out) == [MARKER, "sub"]
    assert names(tmp_path / "a") == ["out"]


def test_an_empty_folder_may_be_the_destination(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert (produce(tmp_path / "out", "1") / MARKER).read_text() == "1"


def test_an_earlier_result_is_replaced_as_a_whole(tmp_path: Path) -> None:
    out = produce(tmp_path / "out", "1")
    (out / "stale.safetensors").write_text("old")
    produce(tmp_path / "out", "2")
    assert (out / MARKER).read_text() == "2"
    assert names(out) == [MARKER, "sub"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "error", [ValueError("boom"), KeyboardInterrupt(), OSError(28, "No space")]
)
def test_a_failure_leaves_the_previous_result(tmp_path: Path, error: BaseException) -> None:
    out = produce(tmp_path / "out", "1")
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        fail(out, error)
    assert (out / MARKER).read_text() == "1"
    assert names(tmp_path) == ["out"]


def test_a_failure_without_previous_result_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"), StagedFolder(tmp_path / "out"):
        raise ValueError("boom")
    assert names(tmp_path) == []


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with StagedFolder(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


def test_an_operating_system_error_says_that_the_destination_is_as_it_was(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"No space.*out is as it was"),
        StagedFolder(tmp_path / "out"),
    ):
        raise OSError(28, "No space left on device")


def test_what_a_killed_run_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / ".out.incomplete"
    left.mkdir()
    (left / "half").write_text("x")
    assert names(produce(tmp_path / "out", "1")) == [MARKER, "sub"]
    assert names(tmp_path) == ["out"]


def test_a_failing_commit_puts_the_previous_result_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = produce(tmp_path / "out", "1")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".incomplete"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        produce(out, "2")
    assert (out / MARKER).read_text() == "1"


def test_a_folder_of_someone_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a quantkit checkpoint"):
        StagedFolder(tmp_path)
    assert names(tmp_path) == ["thesis.tex"]


def test_a_file_or_a_link_at_the_destination_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match=f"{name} exists and is not a folder"):
            check_destination(tmp_path / name)


def test_a_destination_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not a writable folder"):
        check_destination(tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_parent_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match="not a writable folder"):
            check_destination(tmp_path / "out")
    finally:
        tmp_path.chmod(0o755)


def test_a_relative_destination_is_beside_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert produce(Path("out"), "1") == tmp_path / "out"


@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_the_folder_follows_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        out = produce(tmp_path / "out", "1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~mask


def test_too_little_space_is_said_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 999})())
    check_free_space(tmp_path / "not" / "there" / "yet", 999)
    with pytest.raises(CheckpointError, match=r"needs 1,000 bytes and the disk has 999 free"):
        check_free_space(tmp_path / "out", 1000)


def test_what_a_kill_between_the_two_renames_left_is_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    produce(tmp_path / "out", "1").rename(tmp_path / ".out.previous")
    with StagedFolder(tmp_path / "out"):
        assert (tmp_path / "out" / MARKER).read_text() == "1"
    assert "is the earlier result again" in caplog.text
    assert names(tmp_path) == ["out"]


def test_what_a_kill_after_the_second_rename_left_is_removed(tmp_path: Path) -> None:
    produce(tmp_path / "out", "1").rename(tmp_path / ".out.previous")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MARKER).write_text("2")
    with StagedFolder(tmp_path / "out"):
        pass
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / MARKER).read_text() == "2"


def test_opening_a_result_that_was_set_aside_says_where_it_is(tmp_path: Path) -> None:
    produce(tmp_path / "out", "1").rename(tmp_path / ".out.previous")
    with pytest.raises(CheckpointError, match=r"does not exist.*rename .*\.out\.previous"):
        read_json(tmp_path / "out" / "config.json")


def test_ctrl_c_in_a_commit_puts_the_previous_result_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = produce(tmp_path / "out", "1")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name.endswith(".incomplete"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        produce(out, "2")
    assert (out / MARKER).read_text() == "1"
    assert names(tmp_path) == ["out"]


def test_a_destination_has_one_writer(tmp_path: Path) -> None:
    with StagedFolder(tmp_path / "out") as stage:
        (stage.path / "mine").write_text("x")
        with pytest.raises(CheckpointError, match=rf"another process \({os.getpid()}\) is writing"):
            produce(tmp_path / "out", "2")
        produce(tmp_path / "other", "3")
        assert names(stage.path) == ["mine"]
    assert (produce(tmp_path / "out", "4") / MARKER).read_text() == "4"


def test_the_lock_of_a_dead_process_means_nothing(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").write_text("1\n")
    produce(tmp_path / "out", "1")
    assert names(tmp_path) == ["out"]


def test_parents_made_for_nothing_are_removed(tmp_path: Path) -> None:
    with StagedFolder(tmp_path / "a" / "b" / "out"):
        pass
    assert names(tmp_path) == []


def test_other_errors_of_the_operating_system_are_not_called_a_disks(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError), StagedFolder(tmp_path / "out"):
        raise ConnectionError("the network")


def test_a_staged_file_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def write_half() -> None:
        with staged_file(path) as file:
            file.write(b"half")
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        write_half()
    assert names(tmp_path) == []
    with staged_file(path) as file:
        file.write(b"all")
        assert not path.exists()
    assert path.read_bytes() == b"all"
    assert names(tmp_path) == ["x"]
