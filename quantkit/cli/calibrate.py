"""`quantkit calibrate`: from a model to an FP8 checkpoint."""

from __future__ import annotations

import _thread
import json
import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.console import note, quiet_transformers, write

if TYPE_CHECKING:
    from quantkit.calibrate.plan import Plan
    from quantkit.calibrate.report import Report

INTERRUPTED, BAD_INPUT = 130, 2
"""Exit codes after Ctrl-C and after an error, as everywhere in the command line."""


def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, Hub id or .gguf file.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="Folder to write.")
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="fp8-dynamic, fp8-static, fp8-block, fp8-accurate, or a FILE.toml.",
        ),
    ] = "fp8-dynamic",
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="builtin, self, FILE.txt, FILE.jsonl or hf:NAME[:CONFIG][:SPLIT]; may be "
            "repeated. [default: builtin]",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration samples in all.")] = 128,
    strict_samples: Annotated[
        bool,
        typer.Option("--strict-samples", help="Fail if the data gives fewer usable samples."),
    ] = False,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens per sample. [default: 2048, or the model's limit]"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences at once, 8 at most; changes no result. [default: what suits the device]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the samples.")] = 0,
    kv: Annotated[
        str | None,
        typer.Option(help="fp8, fp8-head, fp8-e3m4 or none. [default: as the recipe says]"),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            help="none, or which of the recipe's tiers to use: range, compensation, smoothing, "
            "formats, outliers, keep; with commas. [default: all of the recipe's]"
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Bytes a weight up to which the most sensitive modules stay as they are; 0 keeps "
            "none. [default: as the recipe says]"
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Leave these modules alone; may be repeated."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Output head in 8 bits, for quantkit alone: e3m4, e4m3 or e5m2; none leaves it. "
            "[default: as the recipe says]"
        ),
    ] = None,
    observer: Annotated[
        str | None,
        typer.Option(
            help="Decides the range of static inputs: amax, percentile, percentile:P or error. "
            "[default: as the recipe says]"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Dtype of unquantized tensors; auto keeps the source's.")
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show modules, bytes, memory and time; write nothing.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the unfinished run of OUT: after Ctrl-C, a kill, a full disk. Without "
            "this it is discarded.",
        ),
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja template for `messages` rows.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the model folder.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the run report as JSON instead of tables.")
    ] = False,
) -> None:
    """Quantize a causal language model to FP8, with scales for an FP8 KV cache."""
    quiet_transformers()
    sys.unraisablehook = _keep_interrupt
    from quantkit.calibrate import calibrate as run
    from quantkit.calibrate.journal import Interrupted
    from quantkit.calibrate.ranks import LostProcessError, is_helper

    helps = is_helper()  # of several processes the first speaks, but of what it cannot know
    if helps:
        logging.getLogger("quantkit").setLevel(logging.ERROR)
    try:
        report = run(
            model,
            output,
            recipe=recipe,
            data=data or ["builtin"],
            samples=samples,
            strict_samples=strict_samples,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            kv=kv,
            tiers=tiers,
            budget=budget,
            ignore=ignore or [],
            head=head,
            observer=observer,
            device=device,
            dtype=dtype,
            dry_run=dry_run,
            resume=resume,
            chat_template=chat_template,
            trust_remote_code=trust_remote_code,
            progress=not helps,
        )
    except Interrupted as interrupted:
        note(str(interrupted))
        raise typer.Exit(INTERRUPTED) from None
    except (KeyboardInterrupt, LostProcessError) as error:
        if not helps:
            raise
        is_interrupt = isinstance(error, KeyboardInterrupt)
        raise typer.Exit(INTERRUPTED if is_interrupt else BAD_INPUT) from None
    if helps:
        return
    if as_json:
        value = (
            _plan_json(report.plan) if dry_run else {"path": str(report.path), **report.to_json()}
        )
        write(json.dumps(value, indent=2) + "\n")
    else:
        write(str(report))
        write(_estimates(report.plan) if dry_run else _outcome(report))


def _keep_interrupt(lost: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that came while some object was being deleted, where Python drops it."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        # A moment later: one that came in here would be dropped as well.
        repeat = threading.Timer(0.02, _thread.interrupt_main)
        repeat.daemon = True
        repeat.start()
    else:
        sys.__unraisablehook__(lost)


def _estimates(plan: Plan) -> str:
    memory = f"about {plan.memory_bytes / 1e6:,.0f} MB of memory beyond the mapped source"
    return f"{memory}, about {plan.seconds:,.0f} s on this machine; nothing was written\n"


def _outcome(report: Report) -> str:
    before, after = report.plan.source_bytes, report.plan.target_bytes
    sizes = f"{before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB ({after / before:.0%})"
    return f"{sizes}\n{report.path}\n"


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "recipe": plan.recipe.name,
        "modules": [
            {"name": module.name, "shape": list(module.shape), "quantized": module.quantized}
            for module in plan.modules
        ],
        "source_bytes": plan.source_bytes,
        "target_bytes": plan.target_bytes,
        "memory_bytes": plan.memory_bytes,
        "seconds": round(plan.seconds, 1),
    }
