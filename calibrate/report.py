"""What a calibration run did: the numbers behind quantkit.json and the table at the end."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from quantkit.calibrate.expert_tokens import ExpertReach
from quantkit.calibrate.groups import engine_group, expert_of, kind_of
from quantkit.calibrate.kv_report import KvReport
from quantkit.calibrate.plan import ModulePlan, Plan
from quantkit.calibrate.sensitivity import Sensitivity
from quantkit.calibrate.tiers import TIER_FIELDS

logger = logging.getLogger("quantkit")

RENDER_WIDTH = 100
MAX_ZEROED_SHARE = 0.01
_EXACT = ("input_amax", "input_range")
"""What others compute scales from, and is therefore not rounded in JSON."""
KEEP = "keep"
"""The tier of a module that stays as it is, because the recipe's budget allows for it."""


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One linear module: what was done to it, and what that cost.

    shape [out, in]. tiers: those in force, in order; () is plain rounding, ("keep",) leaves the
    module as it is. SQNR in dB, higher is better: `weight_sqnr_db` of the weight itself,
    `output_sqnr_db` of the module's output on held-out calibration tokens, and `plain_...` what
    plain rounding would have given. Ratios: largest / median row amax of the weight, and largest /
    median channel RMS of the input. top_input_channels: (channel, RMS), largest first.
    input_range: what the largest code of a static input scale stands for, and inputs_clipped how
    many values of the calibration data are beyond it.
    zeroed_share: of the weights that are not zero, how many became zero. predicted_kl: what plain
    rounding of the module's fused group adds to the divergence of the
    model's predictions, in nats a token. None is not known.
    """

    name: str
    shape: tuple[int, int]
    tiers: tuple[str, ...] = ()
    format: str | None = None
    weight_sqnr_db: float | None = None
    plain_output_sqnr_db: float | None = None
    output_sqnr_db: float | None = None
    outlier_ratio: float | None = None
    input_outlier_ratio: float | None = None
    input_amax: float | None = None
    input_range: float | None = None
    top_input_channels: tuple[tuple[int, float], ...] = ()
    num_clipped: int = 0
    inputs_clipped: int | None = None
    zeroed_share: float = 0.0
    outlier_columns: int = 0
    bytes: int = 0
    predicted_kl: float | None = None


@dataclass(slots=True)
class LayerReport:
    """One decoder layer.

    `output_sqnr_db` compares what the layer adds to the residual stream with what the original
    layer adds to the same input, for the first batch; None if no data ran. `scales` holds the KV
    scales by tensor name. `smoothing`: what was done, or not and why, one line a pair. `experts`:
    which tokens the experts were calibrated on, one a list of experts.
    """

    name: str
    modules: list[ModuleReport]
    output_sqnr_db: float | None = None
    scales: dict[str, list[float]] = field(default_factory=dict)
    kv: KvReport | None = None
    smoothing: list[str] = field(default_factory=list)
    experts: list[ExpertReach] = field(default_factory=list)

    def add_sensitivity(self, plan: Plan, number: int, sensitivity: Sensitivity | None) -> None:
        """List what layer `number` of the plan keeps, and what each group was predicted to cost."""
        if sensitivity is None:
            return
        done = {module.name for module in self.modules}
        for planned in plan.modules:
            group = engine_group(planned.name, sensitivity.predicted_kl)
            known = group in sensitivity.predicted_kl
            if planned.layer == number and known and planned.name not in done:
                self.modules.append(
                    ModuleReport(planned.name, planned.shape, (KEEP,), bytes=planned.target_bytes)
                )
        names = {module.name: module for module in self.modules}
        self.modules = [
            replace(module, predicted_kl=sensitivity.predicted_kl.get(engine_group(name, names)))
            for name, module in names.items()
        ]


@dataclass(slots=True)
class Report:
    """The result of `calibrate`: `path` is the checkpoint folder, None after a dry run."""

    plan: Plan
    path: Path | None = None
    layers: list[LayerReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    sensitivity: Sensitivity | None = None
    outside: list[ModuleReport] = field(default_factory=list)  # the output head, if quantized

    def warn(self, warnings: Iterable[str]) -> None:
        """Log warnings and keep them for quantkit.json."""
        for warning in warnings:
            logger.warning(warning)
            self.warnings.append(warning)

    @property
    def modules(self) -> list[ModuleReport]:
        """All linear modules that were quantized or kept, the head last."""
        return [*(module for layer in self.layers for module in layer.modules), *self.outside]

    @property
    def formats(self) -> dict[str, str]:
        """The 8-bit format of every quantized module."""
        return {module.name: module.format for module in self.modules if module.format}

    def to_json(self) -> dict[str, Any]:
        """Return the contents of quantkit.json; the same run gives the same value."""
        return {
            **self.provenance,
            "source_bytes": self.plan.source_bytes,
            "target_bytes": self.plan.target_bytes,
            "tiers": {
                name: bool(getattr(self.plan.recipe.tiers, key))
                for name, key in TIER_FIELDS.items()
            },
            "sensitivity": self._sensitivity_json(),
            "layers": [_layer_json(layer) for layer in self.layers],
            "outside_layers": [_module_json(module) for module in self.outside],
            "warnings": self.warnings,
        }

    def _sensitivity_json(self) -> dict[str, Any] | None:
        if self.sensitivity is None:
            return None
        return {
            "tokens": self.sensitivity.num_tokens,
            "predicted_kl": _rounded(sum(self.sensitivity.predicted_kl.values())),
            "budget": self.plan.recipe.tiers.budget,
        }

    def __str__(self) -> str:
        """Return the table that the command line shows."""
        return render(_result_table(self) if self.layers else _plan_table(self.plan))


def zeroed_warnings(layers: Iterable[LayerReport]) -> list[str]:
    """Return one line a module of which more than 1 % of the weights became zero."""
    lines = []
    for module in (module for layer in layers for module in layer.modules):
        if module.zeroed_share <= MAX_ZEROED_SHARE:
            continue
        effect = (
            f"plain rounding of its group adds about {module.predicted_kl:.2g} nats a token to the "
            "model's divergence"
            if module.predicted_kl is not None
            else "measure the effect with 'quantkit eval --reference'"
        )
        lines.append(
            f"{module.name}: {module.zeroed_share:.1%} of its weights became zero, because one "
            f"scale serves an outlier of {module.outlier_ratio or 0:.3g} times the median row; "
            f"{effect}; a recipe with one scale a channel (fp8-dynamic) keeps them"
        )
    return lines


def _layer_json(layer: LayerReport) -> dict[str, Any]:
    return {
        "name": layer.name,
        "output_sqnr_db": _rounded(layer.output_sqnr_db),
        "scales": layer.scales,
        "smoothing": layer.smoothing,
        "experts": [asdict(experts) for experts in layer.experts],
        "kv": layer.kv.to_json() if layer.kv else None,
        "modules": [_module_json(module) for module in layer.modules],
    }


def _module_json(module: ModuleReport) -> dict[str, Any]:
    return {
        key: _rounded(value) if isinstance(value, float) and key not in _EXACT else value
        for key, value in asdict(module).items()
    }


def _rounded(value: float | None) -> float | None:
    """Round to what is meaningful, 5 digits; an exact result has no dB in JSON."""
    return float(f"{value:.5g}") if value is not None and isfinite(value) else None


def _by_kind(modules: Sequence[ModulePlan]) -> dict[str, list[ModulePlan]]:
    kinds: dict[str, list[ModulePlan]] = {}
    for module in modules:
        kinds.setdefault(kind_of(module.name), []).append(module)
    return kinds


def _plan_table(plan: Plan) -> Table:
    table = Table(title=f"{plan.source_name} with recipe {plan.recipe.name}", title_justify="left")
    for column in ("module", "out x in", "becomes"):
        table.add_column(column, no_wrap=True)
    for column in ("bytes before", "bytes after"):
        table.add_column(column, justify="right")
    for name, modules in _rows(plan.modules).items():
        spec, first = plan.recipe.weights, modules[0]
        becomes = f"{spec.format}, by {spec.granularity.value}" if first.quantized else "unchanged"
        shape = f"{first.shape[0]} x {first.shape[1]}"
        sizes = (sum(m.source_bytes for m in modules), sum(m.target_bytes for m in modules))
        table.add_row(name, shape, becomes, *(f"{size:,}" for size in sizes))
    total = f"all tensors ({len(plan.quantized)} modules in FP8)"
    table.add_section()
    table.add_row(total, "", "", f"{plan.source_bytes:,}", f"{plan.target_bytes:,}")
    return table


def _rows(modules: Sequence[ModulePlan]) -> dict[str, list[ModulePlan]]:
    """Collect what makes a row of a plan: a module, or one linear of all experts of a layer."""
    counts: dict[str, int] = {}
    rows: dict[tuple[str, str] | str, list[ModulePlan]] = {}
    for module in modules:
        expert = expert_of(module.name)
        if expert:
            counts[expert[0]] = max(counts.get(expert[0], 0), expert[1] + 1)
        rows.setdefault((expert[0], expert[2]) if expert else module.name, []).append(module)
    return {
        key if isinstance(key, str) else f"{key[0]}.0-{counts[key[0]] - 1}.{key[1]}": found
        for key, found in rows.items()
    }


def _result_table(report: Report) -> Table:
    """Summarize by kind of module (q_proj, down_proj, ...)."""
    plan = report.plan
    reports = {module.name: module for module in report.modules}
    table = Table(title=f"{plan.source_name} with recipe {plan.recipe.name}", title_justify="left")
    table.add_column("modules")
    quality = "output" if any(r.output_sqnr_db is not None for r in reports.values()) else "weight"
    headers = ("count", "MB before", "MB after", "plain, dB", f"{quality} SQNR, dB", "worst, dB")
    for column in (*headers, "worst in"):
        table.add_column(column, justify="right")
    for kind, modules in _by_kind(plan.modules).items():
        sizes = (sum(m.source_bytes for m in modules), sum(m.target_bytes for m in modules))
        cells = [kind, str(len(modules)), *(f"{size / 1e6:.1f}" for size in sizes)]
        found = [reports[m.name] for m in modules if m.name in reports]
        cells += _quality_cells(found, {m.name: m.layer for m in modules})
        table.add_row(*cells)
    table.add_section()
    sizes = (plan.source_bytes, plan.target_bytes)
    table.add_row("all tensors", "", *(f"{size / 1e6:.1f}" for size in sizes), "", "", "", "")
    return table


def _quality_cells(modules: Sequence[ModuleReport], layers: Mapping[str, int | None]) -> list[str]:
    """Return mean SQNR by plain rounding and as it is, the worst, and where that is."""
    known = {m.name: q for m in modules if (q := _quality(m)) is not None}
    if not known:
        return ["unchanged", "", "", ""]
    plain = [m.plain_output_sqnr_db for m in modules if m.plain_output_sqnr_db is not None]
    worst = min(known, key=lambda name: known[name])
    layer = layers.get(worst)
    return [
        f"{sum(plain) / len(plain):.1f}" if plain else "",
        f"{sum(known.values()) / len(known):.1f}",
        f"{known[worst]:.1f}",
        "" if layer is None else f"layer {layer}",
    ]


def _quality(module: ModuleReport) -> float | None:
    """Return the SQNR of a quantized module's output, or of its weight where no data ran."""
    return module.weight_sqnr_db if module.output_sqnr_db is None else module.output_sqnr_db


def render(table: Table) -> str:
    """Return a table as plain text of RENDER_WIDTH columns, more if a cell would be cut."""
    console = Console(file=io.StringIO(), width=RENDER_WIDTH, no_color=True)
    unlimited = console.options.update(max_width=10 * RENDER_WIDTH)
    console.width = max(RENDER_WIDTH, Measurement.get(console, unlimited, table).maximum)
    console.print(table)
    output = console.file
    return output.getvalue() if isinstance(output, io.StringIO) else ""
