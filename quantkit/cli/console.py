"""Standard output and standard error: results go to one, everything else to the other."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from io import TextIOWrapper

from quantkit.errors import QuantKitError


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
