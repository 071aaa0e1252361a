"""Checkpoints without a fault have no finding; what they are not meant for is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.lint import ENGINES, lint
from tests.lint.folders import BASES


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("base", BASES)
def test_a_good_checkpoint_has_no_finding(base: str, sharded: bool, tmp_path: Path) -> None:
    make, engines = BASES[base]
    draft = make()
    if sharded:
        draft.split()
    report = lint(draft.save(tmp_path), engines)
    assert report.findings == ()
    assert report.ok
    assert report.summary == "; ".join(f"{engine}: ok" for engine in engines)


@pytest.mark.parametrize("base", [base for base, (_, e) in BASES.items() if e != ENGINES])
def test_an_engine_that_cannot_load_it_is_named(base: str, tmp_path: Path) -> None:
    make, engines = BASES[base]
    others = [engine for engine in ENGINES if engine not in engines]
    report = lint(make().save(tmp_path), others)
    assert not report.ok
    assert {engine for finding in report.errors for engine in finding.engines} == set(others)


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_good_checkpoint_may_be_shared(gpus: int, tmp_path: Path) -> None:
    make, _ = BASES["dynamic"]
    assert lint(make().save(tmp_path), tp=gpus).findings == ()
