"""One fault of a checkpoint, and what is wrong with it for whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """What a finding means for those who load the checkpoint.

    ERROR: the engine refuses it, or computes something else than what was calibrated. WARNING: it
    loads, with a loss or under a condition. NOTE: worth knowing.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault: the rule that found it, the engines it concerns, where, what, and what to do.

    `places` are tensors, keys of a configuration, or files. Where one cause has many, `problem`
    speaks of the first.
    """

    rule: str
    severity: Severity
    engines: tuple[str, ...]
    places: tuple[str, ...]
    problem: str
    advice: str

    @property
    def where(self) -> str:
        """The first place, and how many more there are."""
        others = len(self.places) - 1
        return f"{self.places[0]} (and {others} more)" if others else self.places[0]

    def to_json(self) -> dict[str, Any]:
        """Return all fields in JSON's types."""
        return {**asdict(self), "severity": self.severity.value}


def error(rule: str, engines: Sequence[str], place: str, problem: str, advice: str = "") -> Finding:
    """Return a finding that keeps `engines` from computing what was calibrated."""
    return Finding(rule, Severity.ERROR, tuple(engines), (place,), problem, advice)


def warning(
    rule: str, engines: Sequence[str], place: str, problem: str, advice: str = ""
) -> Finding:
    """Return a finding that `engines` live with."""
    return Finding(rule, Severity.WARNING, tuple(engines), (place,), problem, advice)


def note(rule: str, engines: Sequence[str], place: str, problem: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(rule, Severity.NOTE, tuple(engines), (place,), problem, advice)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings of one cause, which differ in place only; errors first, else in their order."""
    joined: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.rule, finding.severity, finding.engines, finding.advice)
        joined.setdefault(key, []).append(finding)
    order = list(Severity)
    groups = sorted(joined.values(), key=lambda group: order.index(group[0].severity))
    return [
        replace(group[0], places=tuple(dict.fromkeys(p for f in group for p in f.places)))
        for group in groups
    ]
