"""Progress of long work on stderr: a bar with time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Phase:
    """One stretch of work with a known number of steps: `with Phase("layers", 30) as phase`.

    `quiet` shows nothing; short phases may be quiet where the output is not a terminal. `done`
    steps had been done before.
    """

    def __init__(self, label: str, total: int, quiet: bool = False, done: int = 0) -> None:
        self.label = label
        self.total = total
        self._done_before = self._done = done
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._plain = not quiet and not sys.stderr.isatty()
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description:<18}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )

    def __enter__(self) -> Phase:
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self.label, total=self.total, completed=self._done, note="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str = "") -> None:
        """Count one step as done; `note` says what came out of it."""
        self.reach(self._done + 1, note)

    def reach(self, done: int, note: str = "") -> None:
        """Say how many steps are done, more than before; `note` says what came out of them."""
        self._done = done
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, note=note)
        elif self._plain:
            elapsed = time.monotonic() - self._started
            left = elapsed / (self._done - self._done_before) * (self.total - self._done)
            line = f"{self.label} {self._done}/{self.total}  {elapsed:.1f} s, {left:.0f} s left"
            print(f"{line}  {note}".rstrip(), file=sys.stderr, flush=True)
