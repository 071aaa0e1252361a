"""Run the command line: in this process, or where that is what a test is about, in its own."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest import mock

import pytest
import torch

from quantkit.cli.main import main

QUANTKIT = [sys.executable, "-m", "quantkit"]

SLOW_KERNELS = "warning: the compiled kernels are not in use; the reference kernels are slow\n"
"""Part of standard error wherever the extension is not built; no test is about it."""


def quantkit(*arguments: str | Path, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    """Run `quantkit ARGUMENTS` here, with streams and an exit code as a process has them.

    What a process would take with it (log handlers, hooks, thread counts) is put back. Imports
    and torch's start, seconds a time, are shared; `quantkit_process` pays them.
    """
    line = [str(argument) for argument in arguments]
    given = BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
    out, err = BytesIO(), BytesIO()
    with ExitStack() as stack:
        stack.enter_context(_state_restored())
        stack.enter_context(mock.patch.object(sys, "stdin", TextIOWrapper(given)))
        streams = [TextIOWrapper(stream, "utf-8", write_through=True) for stream in (out, err)]
        stack.enter_context(redirect_stdout(streams[0]))
        stack.enter_context(redirect_stderr(streams[1]))
        ended = stack.enter_context(pytest.raises(SystemExit))
        main(line)
    return _completed(line, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def quantkit_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `quantkit ARGUMENTS` in a process of its own, as its users do."""
    line = [*QUANTKIT, *map(str, arguments)]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    return _completed(line, done.returncode, done.stdout, done.stderr)


def _completed(
    line: list[str], code: int, out: bytes, err: bytes
) -> subprocess.CompletedProcess[str]:
    errors = err.decode().replace(SLOW_KERNELS, "")
    return subprocess.CompletedProcess(line, code, out.decode(), errors)


@contextmanager
def _state_restored() -> Iterator[None]:
    """Undo what a command does to its process."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("quantkit")
    handlers, level, hook = logger.handlers, logger.level, sys.unraisablehook
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        logger.handlers, logger.level, sys.unraisablehook = handlers, level, hook
        torch.set_num_threads(threads)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def running_quantkit(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start `quantkit ARGUMENTS` for a test that interrupts it; it does not outlive the block.

    Ctrl-C works in it also where the tests themselves run with SIGINT ignored, as shells start
    background jobs.
    """
    process = subprocess.Popen(
        [*QUANTKIT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def assert_one_line_error(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """Check for the exit code, nothing on stdout, and one line on stderr that has all `parts`."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr
