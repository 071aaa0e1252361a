"""The `quantkit` command: its subcommands, and how every way of ending becomes an exit code.

Exit codes: 0 done; 1 a check failed, or a bug in quantkit; 2 usage or bad input; 130 interrupted;
141 the reader of standard output went away. An error is one line on standard error; --debug adds
the traceback.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from quantkit import __version__
from quantkit.cli.bench import bench
from quantkit.cli.calibrate import calibrate
from quantkit.cli.check import check
from quantkit.cli.console import close_stdout, note, open_console
from quantkit.cli.draft import draft
from quantkit.cli.eval import evaluate
from quantkit.cli.export import export
from quantkit.cli.generate import generate
from quantkit.cli.inspect import inspect
from quantkit.errors import QuantKitError

BUG, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="FP8 quantization of language models, and a runtime for the result.",
)
# Each with the line of `quantkit --help`, which would cut the command's own first line short.
app.command("calibrate", short_help="Quantize a model to FP8, with KV scales.")(calibrate)
app.command("check", short_help="Say which engines load a checkpoint, and why not.")(check)
app.command("export", short_help="Write a checkpoint for other servers, and check it.")(export)
app.command("inspect", short_help="Show what calibration did, layer by layer.")(inspect)
app.command("eval", short_help="Measure what quantization cost: KL, perplexity, tasks.")(evaluate)
app.command("generate", short_help="Continue a prompt, or answer it with --chat.")(generate)
app.command("bench", short_help="Measure speed: prefill, decode, kernels, drafts.")(bench)
app.command("draft", short_help="Train a drafter that --draft auto uses.")(draft)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quantkit {__version__}")
        raise typer.Exit


@app.callback()
def declare_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; accepted anywhere.")
    ] = False,
) -> None:
    """Declare what every command shares; `main` has acted on --debug before this runs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line (the process's own by default) and exit the process."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in line
    try:
        open_console()
        code = _run([word for word in line if word != "--debug"])
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        code, message = _explain(error)
        if message:
            note(" ".join(message.split()))
    close_stdout()
    sys.exit(code)


def _run(line: list[str]) -> int:
    """Parse and run; unlike typer's own entry point it lets every exception through."""
    command = typer.main.get_command(app)
    code = 0
    try:
        with command.make_context("quantkit", line) as context:
            command.invoke(context)
    except typer.Exit as end:
        code = end.exit_code
    sys.stdout.flush()
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code for an error, and the line that tells the user about it."""
    match error:
        case typer.TyperException():
            return error.exit_code, _explain_usage(error)
        case KeyboardInterrupt() | typer.Abort():
            return INTERRUPTED, "interrupted"
        case BrokenPipeError():
            return BROKEN_PIPE, ""
        case QuantKitError():
            return BAD_INPUT, f"error: {error}"
        case OSError():
            place = f": {error.filename}" if error.filename else ""
            return BAD_INPUT, f"error: {error.strerror or error}{place}"
    first = str(error).strip().partition("\n")[0]
    hint = "this is a bug in quantkit; run again with --debug for the traceback"
    return BUG, f"error: unexpected {type(error).__name__}: {first}; {hint}"


def _explain_usage(error: typer.TyperException) -> str:
    """Put a usage error into one line, with the command whose help has the answer."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "quantkit"
    text = error.format_message().strip().rstrip(".")
    return f"error: {text[:1].lower()}{text[1:]}; see '{command} --help'"
