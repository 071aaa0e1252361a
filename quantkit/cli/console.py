"""Standard output and standard error: results go to one, everything else to the other."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING

from quantkit.errors import QuantKitError

FAILED = 1
"""Exit code of a command whose check or threshold failed."""

if TYPE_CHECKING:
    from rich.table import Table


def open_console() -> None:
    """Prepare both streams; raises QuantKitError if standard output is closed."""
    if sys.stdout is None:
        raise QuantKitError("standard output is closed; redirect it to a file or to /dev/null")
    if isinstance(sys.stdout, TextIOWrapper):
        # Text a model wrote must not fail on a terminal with a small character set.
        sys.stdout.reconfigure(errors="replace")
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logger = logging.getLogger("quantkit")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def write(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables with a blank line between them, on standard output."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(markup=False, highlight=False, emoji=False)
    unlimited = console.options.update(max_width=10_000)
    widths = [Measurement.get(console, unlimited, table) for table in tables]
    # Numbers are never cut, not even in a narrow terminal; in a file nothing is wrapped either.
    if console.is_terminal:
        console.width = max(console.width, *(width.minimum for width in widths))
    else:
        console.width = max(width.maximum for width in widths)
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)


def note(text: str) -> None:
    """Write a line to standard error."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def close_stdout() -> None:
    """Flush standard output; if its reader is gone or its disk is full, drop what is left."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # Python flushes again at exit, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quiet_transformers() -> None:
    """Keep the warnings and progress bars of transformers out of standard error."""
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", module="transformers")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


class _Formatter(logging.Formatter):
    """Show the level only where it matters."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"
