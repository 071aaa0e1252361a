"""`quantkit inspect`: what calibration did to a checkpoint, in tables, JSON or an HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.console import note, print_tables, write


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="A folder that `calibrate` or another tool wrote."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.html", help="Also write a self-contained HTML page."
        ),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every module and layer of a large model.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all facts as JSON instead of tables.")
    ] = False,
) -> None:
    """Show per layer and module what calibration did: tiers, errors, outliers, sizes."""
    from quantkit.inspection import inspect as gather

    inspection = gather(checkpoint)
    if output is not None:
        from quantkit.inspection.page import write_page

        write_page(inspection, output)
    if as_json:
        page = {"report": None if output is None else str(output)}
        write(json.dumps(inspection.to_json() | page, indent=2, allow_nan=False) + "\n")
        return
    from quantkit.inspection.tables import make_tables

    print_tables(make_tables(inspection, show_all))
    for warning in inspection.warnings:
        note(f"warning: {warning}")
    if output is not None:
        write(f"{output}\n")
