"""Run the real command line in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUANTKIT = [sys.executable, "-m", "quantkit"]

SLOW_KERNELS = "warning: the compiled kernels are not in use; the reference kernels are slow\n"
"""Part of standard error wherever the extension is not built; no test is about it."""


def quantkit(*arguments: str | Path, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    """Run `quantkit ARGUMENTS` with `stdin` piped in; streams are text, without SLOW_KERNELS."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*QUANTKIT, *map(str, arguments)], input=data, capture_output=True, timeout=120
    )
    errors = done.stderr.decode().replace(SLOW_KERNELS, "")
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), errors)


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
