"""Apply all rules to one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from quantkit.errors import UnsupportedError
from quantkit.lint.engines import ENGINES, check_engines
from quantkit.lint.finding import Finding, merged
from quantkit.lint.report import Report
from quantkit.lint.rules import RULES
from quantkit.lint.subject import Subject, open_subject


def lint(path: str | Path, engines: Iterable[str] = ENGINES, tp: int = 1) -> Report:
    """Say what keeps engines from running a checkpoint as it was calibrated.

    Reads JSON files, the headers of safetensors files, and scales; loads no model and writes
    nothing. `tp` GPUs are to share the model. Raises CheckpointError for what is no checkpoint's
    folder, and UnsupportedError for an unknown engine or a number of GPUs below 1.
    """
    chosen = check_engines(engines)
    if tp < 1:
        raise UnsupportedError(f"--tp must be at least 1, got {tp}")
    subject = open_subject(Path(path), tp)
    findings = merged(_narrowed(subject, chosen))
    return Report(str(path), chosen, tp, tuple(findings))


def _narrowed(subject: Subject, engines: tuple[str, ...]) -> Iterator[Finding]:
    """Yield what the rules find, for the chosen engines only."""
    for rule in RULES:
        for finding in rule(subject):
            concerned = tuple(engine for engine in finding.engines if engine in engines)
            if concerned:
                yield replace(finding, engines=concerned)
