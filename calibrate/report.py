"""What a calibration run did: the numbers behind quantkit.json and the table at the end."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from quantkit.calibrate.plan import ModulePlan, Plan

RENDER_WIDTH = 100


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One quantized linear module: shape [out, in]; `input_amax` only for static inputs."""

    name: str
    shape: tuple[int, int]
    weight_sqnr_db: float
    input_amax: float | None


@dataclass(slots=True)
class LayerReport:
    """One decoder layer.

    `output_sqnr_db` compares what the layer adds to the residual stream with what the original
    layer adds to the same input, for the first batch; None if no data ran. `scales` holds the KV
    scales by tensor name.
    """

    name: str
    modules: list[ModuleReport]
    output_sqnr_db: float | None = None
    scales: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """The result of `calibrate`: `path` is the checkpoint folder, None after a dry run."""

    plan: Plan
    path: Path | None = None
    layers: list[LayerReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of quantkit.json; the same run gives the same value."""
        return {
            **self.provenance,
            "source_bytes": self.plan.source_bytes,
            "target_bytes": self.plan.target_bytes,
            "layers": [_layer_json(layer) for layer in self.layers],
            "warnings": self.warnings,
        }

    def __str__(self) -> str:
        """Return the table that the command line shows."""
        return render(_result_table(self) if self.layers else _plan_table(self.plan))


def _layer_json(layer: LayerReport) -> dict[str, Any]:
    return {
        "name": layer.name,
        "output_sqnr_db": _rounded(layer.output_sqnr_db),
        "scales": layer.scales,
        "modules": [
            {
                "name": module.name,
                "shape": list(module.shape),
                "weight_sqnr_db": _rounded(module.weight_sqnr_db),
                "input_amax": module.input_amax,
            }
            for module in layer.modules
        ],
    }


def _rounded(value: float | None) -> float | None:
    """Round dB to what is meaningful; an exact result has no dB in JSON."""
    return round(value, 3) if value is not None and isfinite(value) else None


def _by_kind(modules: Sequence[ModulePlan]) -> dict[str, list[ModulePlan]]:
    kinds: dict[str, list[ModulePlan]] = {}
    for module in modules:
        kinds.setdefault(module.name.rpartition(".")[2], []).append(module)
    return kinds


def _plan_table(plan: Plan) -> Table:
    table = Table(title=f"{plan.source_name} with recipe {plan.recipe.name}", title_justify="left")
    for column in ("module", "out x in", "becomes"):
        table.add_column(column, no_wrap=True)
    for column in ("bytes before", "bytes after"):
        table.add_column(column, justify="right")
    for module in plan.modules:
        spec = plan.recipe.weights
        becomes = f"{spec.format}, by {spec.granularity.value}" if module.quantized else "unchanged"
        shape = f"{module.shape[0]} x {module.shape[1]}"
        sizes = (f"{module.source_bytes:,}", f"{module.target_bytes:,}")
        table.add_row(module.name, shape, becomes, *sizes)
    total = f"all tensors ({len(plan.quantized)} modules in FP8)"
    table.add_section()
    table.add_row(total, "", "", f"{plan.source_bytes:,}", f"{plan.target_bytes:,}")
    return table


def _result_table(report: Report) -> Table:
    """Summarize by kind of module (q_proj, down_proj, ...)."""
    plan = report.plan
    reports = {module.name: module for layer in report.layers for module in layer.modules}
    table = Table(title=f"{plan.source_name} with recipe {plan.recipe.name}", title_justify="left")
    table.add_column("modules")
    for column in ("count", "MB before", "MB after", "weight SQNR, dB", "worst, dB", "worst in"):
        table.add_column(column, justify="right")
    for kind, modules in _by_kind(plan.modules).items():
        sizes = (sum(m.source_bytes for m in modules), sum(m.target_bytes for m in modules))
        cells = [kind, str(len(modules)), *(f"{size / 1e6:.1f}" for size in sizes)]
        found = [reports[m.name] for m in modules if m.name in reports]
        if found:
            worst = min(found, key=lambda module: module.weight_sqnr_db)
            mean = sum(module.weight_sqnr_db for module in found) / len(found)
            layer = next((m.layer for m in modules if m.name == worst.name), None)
            place = "" if layer is None else f"layer {layer}"
            cells += [f"{mean:.1f}", f"{worst.weight_sqnr_db:.1f}", place]
        else:
            cells += ["unchanged", "", ""]
        table.add_row(*cells)
    table.add_section()
    sizes = (plan.source_bytes, plan.target_bytes)
    table.add_row("all tensors", "", *(f"{size / 1e6:.1f}" for size in sizes), "", "", "")
    return table


def render(table: Table) -> str:
    """Return a table as plain text of RENDER_WIDTH columns, more if a cell would be cut."""
    console = Console(file=io.StringIO(), width=RENDER_WIDTH, no_color=True)
    unlimited = console.options.update(max_width=10 * RENDER_WIDTH)
    console.width = max(RENDER_WIDTH, Measurement.get(console, unlimited, table).maximum)
    console.print(table)
    output = console.file
    return output.getvalue() if isinstance(output, io.StringIO) else ""
