"""`quantkit export`: a checkpoint in the Hub's layout, for the engines that are to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.console import FAILED, note, quiet_transformers, write

if TYPE_CHECKING:
    from quantkit.export import Export


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="A folder that `calibrate` or `export` wrote.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Folder to write.")],
    format_name: Annotated[
        str, typer.Option("--format", help="compressed-tensors, fp8-block or modelopt.")
    ] = "compressed-tensors",
    engines: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="ENGINE,...",
            help="Engines that must load it: vllm, sglang, transformers, tensorrt-llm. "
            "[default: those that the format is meant for]",
        ),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Tensor-parallel size that the servers will run with."
        ),
    ] = 1,
    quality: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="What `quantkit eval --json` printed, for the card."
        ),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload it to the Hub.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create that repository as a private one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Write a checkpoint in a format that servers load, with a model card, and check it."""
    quiet_transformers()
    from quantkit.export import ExportRefusedError
    from quantkit.export import export as run

    if private and push is None:
        raise typer.BadParameter("needs --push OWNER/NAME", param_hint="--private")
    try:
        result = run(
            checkpoint,
            output,
            format=format_name,
            engines=None if engines is None else [word.strip() for word in engines.split(",")],
            tp=tp,
            quality=quality,
            push=push,
            private=private,
        )
    except ExportRefusedError as error:
        note(f"failed: {error}")
        raise typer.Exit(FAILED) from None
    if as_json:
        write(json.dumps(result.to_json(), indent=2) + "\n")
        return
    _print_table(result)
    write(f"{result.url or result.path}\n")


def _print_table(result: Export) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title="export", title_justify="left")
    table.add_row("format", result.format)
    table.add_row("weights", f"{result.num_modules} in FP8, {result.codes}")
    table.add_row("size", f"{result.bytes / 1e6:,.1f} MB")
    table.add_row("check", f"no error for {', '.join(result.engines)}")
    Console(highlight=False).print(table)
