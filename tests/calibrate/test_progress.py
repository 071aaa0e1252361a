from __future__ import annotations

import pytest

from quantkit.calibrate.progress import Phase


def test_without_a_terminal_there_is_a_line_for_what_was_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Phase("layers", 10) as phase:
        phase.advance("first")
        phase.reach(5)
        phase.advance()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "5/10", "6/10"]
    assert lines[0].endswith("first")
    assert all("s left" in line for line in lines)


def test_a_quiet_phase_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Phase("layers", 10, quiet=True) as phase:
        phase.advance()
    assert capsys.readouterr().err == ""
