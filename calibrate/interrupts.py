"""Ctrl-C that is not lost: libraries in C may drop it, or turn it into an error of their own."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptWatch:
    """Context manager that notes a Ctrl-C, which is raised as ever; `seen` tells of it.

    Watches in the main thread only, and where nobody else handles the signal.
    """

    def __init__(self) -> None:
        self.seen = False
        self._watching = False

    def __enter__(self) -> InterruptWatch:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._watching = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watching:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(number, frame)
