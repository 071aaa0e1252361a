"""Inspect a checkpoint: everything that the tables, the page and `--json` show, gathered once."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.inspection import groups
from quantkit.inspection.foreign import is_foreign, read_foreign
from quantkit.inspection.groups import (
    ChannelRow,
    KindRow,
    SensitivityRow,
    TierRow,
    layer_label,
)
from quantkit.inspection.record import LayerRecord, ModuleRecord, Record, read_record
from quantkit.inspection.sizes import Sizes, read_sizes

NUM_CHANNELS = 20
"""Outlier channels that are listed; the file has up to eight for every module."""
WORSE_DB = -0.1
"""A loss against plain rounding that is worth a warning; less is chance."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint's facts, and what follows from them."""

    record: Record
    sizes: Sizes
    kinds: list[KindRow]
    tiers: list[TierRow]
    sensitivity: list[SensitivityRow]
    channels: list[ChannelRow]
    warnings: list[str]

    @property
    def bytes_per_weight(self) -> float | None:
        """Bytes on disk for a weight of the listed modules, those that were kept included."""
        return self.sizes.bytes_per_weight(self.record.modules)

    def to_json(self) -> dict[str, Any]:
        """Return all facts; what the checkpoint does not say is None."""
        record, sizes = self.record, self.sizes
        return {
            "path": str(record.folder),
            "quantkit_version": record.version,
            "profile": record.profile,
            "recipe": record.recipe_name,
            "source": {"name": record.source_name, "fingerprint": record.fingerprint},
            "seed": record.seed,
            "data": asdict(record.data) if record.data else None,
            "source_bytes": record.source_bytes,
            "target_bytes": record.target_bytes,
            "bytes_per_weight": self.bytes_per_weight,
            "tiers": record.tiers,
            "tiers_in_force": [asdict(row) for row in self.tiers],
            "kinds": [asdict(row) for row in self.kinds],
            "rest": None if sizes.rest is None else [asdict(row) for row in sizes.rest],
            "sensitivity": asdict(record.sensitivity) if record.sensitivity else None,
            "sensitivity_groups": [asdict(row) for row in self.sensitivity],
            "outlier_channels": [asdict(row) for row in self.channels],
            "layers": [self._layer_json(layer) for layer in record.layers],
            "warnings": self.warnings,
        }

    def _layer_json(self, layer: LayerRecord) -> dict[str, Any]:
        return {
            "name": layer.name,
            "number": layer.number,
            "output_sqnr_db": layer.output_sqnr_db,
            "kv": asdict(layer.kv) if layer.kv else None,
            "modules": [self._module_json(module) for module in layer.modules],
        }

    def _module_json(self, module: ModuleRecord) -> dict[str, Any]:
        return asdict(module) | {
            "kind": module.kind,
            "gain_db": module.gain_db,
            "bytes_before": self.sizes.before(module),
            "bytes": self.sizes.after(module),
        }


def inspect(checkpoint: str | os.PathLike[str]) -> Inspection:
    """Gather what is known about a checkpoint folder; reads quantkit.json and weight headers.

    Of a checkpoint that another tool wrote it is what the weights say. Raises CheckpointError if
    the folder has neither a readable quantkit.json nor such a checkpoint.
    """
    folder = Path(checkpoint)
    record = read_foreign(folder) if is_foreign(folder) else read_record(folder)
    sizes = read_sizes(record)
    return Inspection(
        record=record,
        sizes=sizes,
        kinds=groups.by_kind(record, sizes),
        tiers=groups.by_tiers(record),
        sensitivity=groups.by_sensitivity(record),
        channels=groups.outlier_channels(record, NUM_CHANNELS),
        warnings=[*record.warnings, *_findings(record, sizes)],
    )


def _findings(record: Record, sizes: Sizes) -> list[str]:
    """What a reader should know that calibration had no reason to warn of."""
    found = [sizes.problem] if sizes.problem else []
    if not record.layers:
        found.append("quantkit.json lists no layers, so there is no error to show")
    flagged = [layer_label(layer) for layer in record.layers if layer.kv and layer.kv.flagged]
    if flagged:
        found.append(f"FP8 does not hold the keys of these layers well: {', '.join(flagged)}")
    worse = [m.name for m in record.modules if (m.gain_db or 0.0) < WORSE_DB]
    if worse:
        names = ", ".join(worse[:3]) + (f" and {len(worse) - 3} more" if len(worse) > 3 else "")
        found.append(f"worse than with plain rounding, in output SQNR: {names}")
    return found
