from __future__ import annotations

import signal
from pathlib import Path

import pytest

from quantkit import __version__
from quantkit.cli.main import main
from tests.cli.command import (
    assert_one_line_error,
    quantkit,
    quantkit_process,
    running_quantkit,
)


def test_version_and_help() -> None:
    done = quantkit_process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"quantkit {__version__}\n", "")
    done = quantkit("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("calibrate", "generate", "bench"))
    cut_short = [line for line in done.stdout.splitlines()[1:] if line.endswith("...")]
    assert not cut_short


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["missing command", "see 'quantkit --help'"]),
        (["genrate"], ["'genrate'", "did you mean 'generate'?"]),
        (["--frobnicate"], ["--frobnicate", "see 'quantkit --help'"]),
        (["generate"], ["missing argument 'CKPT'", "see 'quantkit generate --help'"]),
        (["generate", "x", "--temprature", "1"], ["--temprature", "--temperature"]),
        (["generate", "x", "--top-k", "many"], ["--top-k", "integer"]),
        (["generate", "x", "--top-k"], ["--top-k", "requires an argument"]),
        (["generate", "x", "y"], ["unexpected extra argument", "y"]),
        (["bench", "x", "--batch", "1,,2"], ["--batch", "1,,2"]),
        (["bench", "x", "--repeats", "0"], ["--repeats"]),
        (["calibrate"], ["missing argument 'MODEL'"]),
    ],
)
def test_b45_a_wrong_command_line_is_one_line_and_code_2(
    arguments: list[str], parts: list[str]
) -> None:
    done = quantkit(*arguments)
    assert_one_line_error(done, 2)
    for part in parts:
        assert part.lower() in done.stderr.lower()


def test_an_error_is_one_line_and_code_2_of_the_process(tmp_path: Path) -> None:
    done = quantkit_process("generate", tmp_path / "absent", "--prompt", "a")
    assert_one_line_error(done, 2, "absent", "not a folder")


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_missing_folder_is_named(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "absent"
    assert_one_line_error(quantkit(command, folder), 2, str(folder), "not a folder")


@pytest.mark.parametrize("place", [["--debug", "generate"], ["generate", "--debug"]])
def test_debug_adds_the_traceback_wherever_it_stands(place: list[str], tmp_path: Path) -> None:
    done = quantkit(*place, tmp_path / "absent", "--prompt", "a")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


class TestEndings:
    """Endings that no input provokes reliably, raised inside the command."""

    def run(
        self, error: BaseException, monkeypatch: pytest.MonkeyPatch, *arguments: str
    ) -> int | str | None:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("quantkit.load.load_fp8", fail)
        with pytest.raises(SystemExit) as caught:
            main(["generate", "x", "--prompt", "a", *arguments])
        return caught.value.code

    def test_an_unexpected_error_is_one_line_and_code_1(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(ValueError("odd\nvalue"), monkeypatch) == 1
        assert capsys.readouterr().err == (
            "error: unexpected ValueError: odd; this is a bug in quantkit; run again with --debug "
            "for the traceback\n"
        )

    def test_debug_shows_where_it_came_from(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(ValueError("odd"), monkeypatch, "--debug") == 1
        assert "in fail" in capsys.readouterr().err

    def test_a_system_error_names_the_file(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(PermissionError(13, "Permission denied", "/x/y"), monkeypatch) == 2
        assert capsys.readouterr().err == "error: Permission denied: /x/y\n"

    def test_a_reader_that_left_is_no_error_message(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(BrokenPipeError(), monkeypatch) == 141
        assert capsys.readouterr().err == ""


def test_interrupting_is_one_line_and_code_130(tiny_checkpoint: Path) -> None:
    workload = ["--repeats", "100000", "--prompt-tokens", "8", "--new-tokens", "8"]
    with running_quantkit("bench", tiny_checkpoint, *workload) as process:
        assert process.stderr is not None
        started = any(line.startswith("batch") for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert started
    assert process.returncode == 130
    assert rest == "interrupted\n"
