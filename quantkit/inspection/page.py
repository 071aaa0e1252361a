"""An Inspection as one HTML page. Needs the optional extra `report` (matplotlib and jinja2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.inspection import words
from quantkit.inspection.groups import layer_label, tier_label
from quantkit.inspection.html_file import check_output, render, write_html
from quantkit.inspection.inspection import Inspection
from quantkit.inspection.overview import command, overview

TEMPLATE = "report.html"
KV_NONE = "This checkpoint leaves the KV cache as it is."
KV_ABSENT = "The error of the KV cache is not recorded."
NUM_GROUPS = 20
"""Fused groups in the sensitivity table; the chart has all."""


def write_page(inspection: Inspection, output: Path) -> None:
    """Write the page to `output`; raises as `html_file` does."""
    check_output(output)
    write_html(render_page(inspection), output)


def render_page(inspection: Inspection) -> str:
    """Return the page; the same checkpoint gives the same text."""
    globals_ = {"words": words, "layer_label": layer_label, "tier_label": tier_label}
    return render(__package__, TEMPLATE, globals_ | _values(inspection))


def _values(inspection: Inspection) -> dict[str, Any]:
    from markupsafe import Markup

    from quantkit.inspection import plots

    record = inspection.record
    charts = {
        "depth": plots.error_by_depth(inspection),
        "gain": plots.gain_by_kind(inspection),
        "ranges": plots.input_ranges(inspection),
        "bytes": plots.bytes_by_kind(inspection),
        "sensitivity": plots.sensitivity_by_layer(inspection),
        "kv": plots.kv_by_layer(inspection),
    }
    return {
        "inspection": inspection,
        "record": record,
        "overview": overview(inspection),
        "kv_absent": KV_NONE if record.kv == "none" else KV_ABSENT,
        "charts": {name: chart and Markup(chart) for name, chart in charts.items()},
        "has_outputs": any(module.output_sqnr_db is not None for module in record.modules),
        "num_hidden_kinds": max(0, len(inspection.kinds) - plots.MAX_PANELS),
        "allowed": [name for name, on in (record.tiers or {}).items() if on],
        "forbidden": [name for name, on in (record.tiers or {}).items() if not on],
        "sensitivity": inspection.sensitivity[:NUM_GROUPS],
        "command": command(record),
        "recipe": json.dumps(record.recipe, indent=2, ensure_ascii=False),
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
    }
