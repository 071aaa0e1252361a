"""What a check found, and what that means for each engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from quantkit.lint.finding import Finding, Severity


@dataclass(frozen=True, slots=True)
class Report:
    """All findings on one checkpoint for the engines that were asked about."""

    path: str
    engines: tuple[str, ...]
    tensor_parallel: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings by which an engine refuses the checkpoint or computes something else."""
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    @property
    def ok(self) -> bool:
        """Whether there is no error for any of the engines."""
        return not self.errors

    def verdict(self, engine: str) -> str:
        """Return "ok", or how many errors and warnings there are for one engine."""
        counts = Counter(f.severity for f in self.findings if engine in f.engines)
        parts = [
            f"{counts[severity]} {severity}{'s' if counts[severity] > 1 else ''}"
            for severity in (Severity.ERROR, Severity.WARNING)
            if counts[severity]
        ]
        return ", ".join(parts) or "ok"

    @property
    def summary(self) -> str:
        """The verdicts on one line."""
        return "; ".join(f"{engine}: {self.verdict(engine)}" for engine in self.engines)

    def to_json(self) -> dict[str, Any]:
        """Return everything in JSON's types."""
        return {
            "path": self.path,
            "tensor_parallel": self.tensor_parallel,
            "ok": self.ok,
            "engines": {engine: self.verdict(engine) for engine in self.engines},
            "findings": [finding.to_json() for finding in self.findings],
        }
