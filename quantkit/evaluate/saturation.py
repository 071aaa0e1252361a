"""What static scales could not hold in an evaluation: inputs of linears, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.runtime.saturation import SaturationCount

WORTH_A_WARNING = 1e-4
"""The share of a module's inputs, or of a layer's keys or values, from which it is named."""
MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class SaturationSummary:
    """Counts by name, as the runtime gives them: modules, and "keys" or "values" of a layer."""

    counts: Mapping[str, SaturationCount] = field(default_factory=dict)

    @property
    def total(self) -> SaturationCount:
        """All of them together."""
        found = self.counts.values()
        return SaturationCount(sum(c.values for c in found), sum(c.saturated for c in found))

    def __str__(self) -> str:
        """Return the cell of the table."""
        return f"{self.total.saturated:,} of {self.total.values:,}"

    def to_json(self) -> dict[str, Any]:
        """Return the totals, and the counts of whatever saturated at all."""
        return {
            "values": self.total.values,
            "saturated": self.total.saturated,
            "by_name": {
                name: {"values": count.values, "saturated": count.saturated}
                for name, count in self.counts.items()
                if count.saturated
            },
        }

    def warning(self) -> str | None:
        """Return one line that names what saturates often, the worst first; None if nothing."""
        often = [(n, c) for n, c in self.counts.items() if c.share > WORTH_A_WARNING]
        if not often:
            return None
        often.sort(key=lambda pair: -pair[1].share)
        shown = ", ".join(f"{name} ({count.share:.2%})" for name, count in often[:MOST_NAMES])
        more = f" and {len(often) - MOST_NAMES} more" if len(often) > MOST_NAMES else ""
        return (
            f"more than {WORTH_A_WARNING:.2%} of the values are beyond their static scales: "
            f"{shown}{more}; calibrate on text that resembles what the model will read"
        )
