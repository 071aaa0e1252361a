"""`quantkit check`: what keeps engines from running a checkpoint, as tables or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.console import FAILED, write

if TYPE_CHECKING:
    from quantkit.lint import Report


def check(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="A quantized checkpoint, of any tool.")
    ],
    engines: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="ENGINE,...",
            help="vllm, sglang, transformers, tensorrt-llm. [default: all four]",
        ),
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs that are to share the model.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all findings as JSON instead of tables.")
    ] = False,
) -> None:
    """Say which engines load a checkpoint, and what is wrong with it; exit with 1 on an error."""
    from quantkit.lint import ENGINES, lint

    chosen = ENGINES if engines is None else [name.strip() for name in engines.split(",")]
    report = lint(checkpoint, chosen, tp)
    if as_json:
        write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        _print_tables(report)
        write(f"{report.summary}\n")
    if not report.ok:
        raise typer.Exit(FAILED)


def _print_tables(report: Report) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    from quantkit.lint.tables import make_tables

    console = Console(markup=False, highlight=False, emoji=False)
    tables = list(make_tables(report))
    if not console.is_terminal and tables:  # in a file nothing is wrapped
        unlimited = console.options.update(max_width=10_000)
        console.width = max(Measurement.get(console, unlimited, t).maximum for _, t in tables)
    for title, table in tables:
        console.print(title)
        console.print(table)
        console.print()
