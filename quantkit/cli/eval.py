"""`quantkit eval`: what a checkpoint lost against its original, as a table, JSON or a gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.console import note, quiet_transformers, write

if TYPE_CHECKING:
    from quantkit.evaluate import Result

FAILED = 1


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A quantized checkpoint.")],
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The original, to compare with: a Hugging Face folder, Hub id or .gguf file.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="builtin, FILE.txt, FILE.jsonl or hf:NAME[:CONFIG][:SPLIT]; may be repeated. "
            "[default: builtin]"
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens a model sees at once. [default: 2048, or the model's limit]"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from one window to the next. [default: the window]"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Use only this much text. [default: all]")
    ] = None,
    activations: Annotated[
        str,
        typer.Option(
            help="emulate: quantize them as an 8-bit engine does; skip: leave them alone."
        ),
    ] = "emulate",
    kv: Annotated[
        str | None,
        typer.Option(help="fp8 or none. [default: both, where the checkpoint has KV scales]"),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="What both models compute in: float32, bfloat16 or float16.")
    ] = "float32",
    max_kl: Annotated[
        float | None, typer.Option(help="Exit with 1 if the mean KL is above this.")
    ] = None,
    max_ppl_ratio: Annotated[
        float | None, typer.Option(help="Exit with 1 if the perplexity ratio is above this.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code from the reference's folder."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure perplexity, and with --reference how far the checkpoint is from the original."""
    if reference is None and (max_kl is not None or max_ppl_ratio is not None):
        raise typer.BadParameter(
            "compares with the original; give --reference MODEL",
            param_hint="--max-kl" if max_kl is not None else "--max-ppl-ratio",
        )
    quiet_transformers()
    from quantkit.evaluate import evaluate as run

    result = run(
        checkpoint,
        reference,
        data=data or ["builtin"],
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        activations=activations,
        kv=kv,
        dtype=dtype,
        max_kl=max_kl,
        max_ppl_ratio=max_ppl_ratio,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        write(json.dumps(result.to_json(), indent=2) + "\n")
    else:
        _print_table(result)
    for line in result.violations:
        note(f"failed: {line}")
    if result.violations:
        raise typer.Exit(FAILED)


def _print_table(result: Result) -> None:
    from rich.console import Console

    from quantkit.evaluate.report import make_table

    Console().print(make_table(result))
    write(f"{result.setting}\n")
