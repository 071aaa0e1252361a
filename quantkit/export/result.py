"""What an export did: the numbers behind its table, its JSON and its model card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.export.requantize import Loss
from quantkit.lint import Finding


class ExportRefusedError(CheckpointError):
    """An engine that was asked for would not load the result; `findings` say why."""

    def __init__(self, message: str, findings: Sequence[Finding]) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


@dataclass(frozen=True, slots=True)
class Export:
    """A finished export.

    `engines` are those for which nothing was found that keeps them from loading it. `num_modules`
    weights are quantized; those that could not keep their codes are counted in `loss`. `bytes` is
    the size of all tensors, `url` where it was pushed to.
    """

    path: Path
    format: str
    engines: tuple[str, ...]
    findings: tuple[Finding, ...]
    num_modules: int
    loss: Loss
    bytes: int
    url: str | None = None

    @property
    def codes(self) -> str:
        """What happened to the codes, in words."""
        if not self.loss.num_modules:
            return "codes as in the checkpoint"
        return (
            f"{self.loss.num_modules} rounded again, at {self.loss.sqnr_db:.1f} dB SQNR to the "
            "checkpoint's values"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything, JSON-ready."""
        sqnr = self.loss.sqnr_db
        return {
            "path": str(self.path),
            "format": self.format,
            "engines": list(self.engines),
            "findings": [finding.to_json() for finding in self.findings],
            "modules": self.num_modules,
            "rounded_again": self.loss.num_modules,
            "weight_sqnr_db": round(sqnr, 3) if isfinite(sqnr) else None,
            "bytes": self.bytes,
            "url": self.url,
        }
