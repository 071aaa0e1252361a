"""Work in a forked process, which may be killed. For programs that have one thread."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable


def in_child(work: Callable[[], object], kill_after: float | None = None) -> int:
    """Run in a forked process, killed after so many seconds if given; return its exit code.

    Below 0 it is the signal that ended the process, and 1 says that `work` raised.
    """
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
