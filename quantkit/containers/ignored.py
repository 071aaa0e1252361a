"""Lists of modules that a checkpoint left unquantized, as any of the tools writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate

from quantkit.errors import CheckpointError


class IgnoreList:
    """One list, ready to ask.

    An entry is a full name, the last parts of one (`lm_head` for `model.lm_head`), or a module that
    contains it (`model.visual` for `model.visual.blocks.0`); or a pattern: one with `*`, or `re:`
    and a regular expression that the name begins with.

    Raises CheckpointError for an expression that is none.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        entries = list(entries)
        self._patterns = {e: _compiled(e) for e in entries if e.startswith("re:") or "*" in e}
        self._names = {entry for entry in entries if entry not in self._patterns}

    def entry_for(self, module: str) -> str | None:
        """Return an entry that says that a module is not quantized, None if there is none."""
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            for name in (".".join(parts[:length]), ".".join(parts[-length:])):
                if name in self._names:
                    return name
        return next((e for e, pattern in self._patterns.items() if pattern.match(module)), None)


def _compiled(entry: str) -> re.Pattern[str]:
    if not entry.startswith("re:"):
        return re.compile(translate(entry))
    try:
        return re.compile(entry.removeprefix("re:"))
    except re.error as error:
        raise CheckpointError(
            f"quantization_config ignores {entry!r}, which is no regular expression: {error}"
        ) from None
