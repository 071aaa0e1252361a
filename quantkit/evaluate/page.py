"""Results as one HTML page, in the style of the report of `quantkit inspect`.

Needs the optional extra `report` (matplotlib and jinja2).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.evaluate.report import task_cells, task_columns, text_columns, text_rows
from quantkit.evaluate.result import Result
from quantkit.evaluate.task_result import TaskResult
from quantkit.inspection.html_file import render, write_html

TEMPLATE = "report.html"


def write_page(result: Result | None, scored: TaskResult | None, output: Path) -> None:
    """Write what was measured on text, on tasks, or both; see `html_file` for what it raises."""
    write_html(render_page(result, scored), output)


def render_page(result: Result | None, scored: TaskResult | None) -> str:
    """Return the page; the same results give the same text."""
    return render(__package__, TEMPLATE, _values(result, scored))


def _values(result: Result | None, scored: TaskResult | None) -> dict[str, Any]:
    from markupsafe import Markup

    from quantkit.evaluate import plots

    charts: dict[str, str | None] = {"kl": None, "position": None, "tasks": None}
    if result is not None:
        charts |= {"kl": plots.kl_distribution(result), "position": plots.kl_by_position(result)}
    if scored is not None:
        charts["tasks"] = plots.task_scores(scored)
    settings = [each.setting for each in (result, scored) if each is not None]
    compared = scored is not None and any(score.change for score in scored.scores)
    return {
        "checkpoint": settings[0].checkpoint,
        "reference": settings[0].reference,
        "result": result,
        "scored": scored,
        "violations": _violations((result, scored)),
        "charts": {name: chart and Markup(chart) for name, chart in charts.items()},
        "text_columns": text_columns(result) if result else [],
        "text_rows": text_rows(result) if result else [],
        "task_columns": task_columns(compared),
        "task_rows": [task_cells(score, compared) for score in scored.scores] if scored else [],
    }


def _violations(results: Sequence[Result | TaskResult | None]) -> list[str]:
    return [line for result in results if result is not None for line in result.violations]
