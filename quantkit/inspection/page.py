"""An Inspection as one HTML page: charts inline, nothing fetched, written whole or not at all.

Needs the optional extra `report` (matplotlib and jinja2).
"""

from __future__ import annotations

import importlib.util
import json
from importlib import resources
from pathlib import Path
from typing import Any

from quantkit.errors import QuantKitError, UnsupportedError
from quantkit.inspection import words
from quantkit.inspection.groups import layer_label, tier_label
from quantkit.inspection.inspection import Inspection
from quantkit.inspection.overview import command, overview
from quantkit.staging import staged_file

TEMPLATE = "report.html"
SUFFIXES = (".html", ".htm")
KV_NONE = "This checkpoint leaves the KV cache as it is."
KV_ABSENT = "The error of the KV cache is not recorded."
NUM_GROUPS = 20
"""Fused groups in the sensitivity table; the chart has all."""


def check_output(output: Path) -> None:
    """Raise before any work if the page cannot be made or must not be written there.

    UnsupportedError without the extra, QuantKitError for a name that is no page's.
    """
    absent = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if absent:
        raise UnsupportedError(
            f"an HTML report needs {' and '.join(absent)}; pip install 'quantkit[report]'"
        )
    if output.suffix.lower() not in SUFFIXES:
        raise QuantKitError(
            f"--output is {output}, expected a name that ends in .html; the report is a web page"
        )
    if output.is_dir():
        raise QuantKitError(f"--output {output} is a folder; give the name of a file in it")


def write_page(inspection: Inspection, output: Path) -> None:
    """Write the page to `output`, replacing an earlier one only when the new one is complete.

    Raises as `check_output` does, and QuantKitError if the place cannot be written.
    """
    check_output(output)
    page = render_page(inspection)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(output) as file:
            file.write(page.encode())
    except OSError as error:
        raise QuantKitError(
            f"cannot write {output}: {error.strerror}; choose another --output"
        ) from None


def render_page(inspection: Inspection) -> str:
    """Return the page; the same checkpoint gives the same text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["words"] = words
    environment.globals["layer_label"] = layer_label
    environment.globals["tier_label"] = tier_label
    source = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(_values(inspection))


def _values(inspection: Inspection) -> dict[str, Any]:
    from markupsafe import Markup

    from quantkit.inspection import plots
    from quantkit.inspection.drawing import PALETTE

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
        "palette": PALETTE,
        "allowed": [name for name, on in (record.tiers or {}).items() if on],
        "forbidden": [name for name, on in (record.tiers or {}).items() if not on],
        "sensitivity": inspection.sensitivity[:NUM_GROUPS],
        "command": command(record),
        "recipe": json.dumps(record.recipe, indent=2, ensure_ascii=False),
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
    }
