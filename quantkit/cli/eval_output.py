"""What `quantkit eval` prints and writes once everything is measured, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantkit.cli.console import FAILED, note, print_tables, write

if TYPE_CHECKING:
    from quantkit.evaluate import Result, TaskResult


def show(
    result: Result | None, scored: TaskResult | None, as_json: bool, output: Path | None
) -> None:
    """Print what was measured; exits with FAILED if a threshold is not met."""
    if output is not None:
        from quantkit.evaluate.page import write_page

        write_page(result, scored, output)
    violations = [line for each in (result, scored) if each for line in each.violations]
    if as_json:
        page = _to_json(result, scored, violations)
        page |= {} if output is None else {"report": str(output)}
        write(json.dumps(page, indent=2, allow_nan=False) + "\n")
    else:
        _print(result, scored)
        if output is not None:
            write(f"{output}\n")
    for line in violations:
        note(f"failed: {line}")
    if violations:
        raise typer.Exit(FAILED)


def _to_json(
    result: Result | None, scored: TaskResult | None, violations: list[str]
) -> dict[str, Any]:
    """Return what was measured on text, flat, and on tasks, under `tasks`."""
    page: dict[str, Any] = {}
    if result is not None:
        page = result.to_json()
    elif scored is not None:
        page = {"checkpoint": scored.setting.checkpoint, "reference": scored.setting.reference}
    if scored is not None:
        page["tasks"] = scored.to_json()
    return page | {"violations": violations}


def _print(result: Result | None, scored: TaskResult | None) -> None:
    from quantkit.evaluate.report import make_table, make_task_table

    if result is not None:
        print_tables([make_table(result)])
        write(f"{result.setting}\n")
    if result is not None and scored is not None:
        write("\n")
    if scored is not None:
        print_tables([make_task_table(scored)])
        write(f"{scored.setting}\n")
