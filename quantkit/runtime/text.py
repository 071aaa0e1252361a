"""Text that grows token by token: incremental detokenization, and stop strings.

What is released is never taken back, never ends inside a UTF-8 character, and adds up to
`tokenizer.decode(all ids, skip_special_tokens=True)`. Nothing here knows where tokens come from.
"""

from __future__ import annotations

import re
from typing import Any

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A SentencePiece byte-fallback token."""


class Detokenizer:
    """Turn token ids into text as they arrive.

    Text is decoded from a short window: the tokens behind the last piece give the context that
    decides about leading spaces. `held` is text that more tokens may still change.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.held = ""
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._window: list[int] = []
        self._context = 0  # tokens at the head of the window whose text has been released
        self._known = 0  # characters of that text

    def push(self, token_id: int) -> str:
        """Append a token and return the text that has become final, often none."""
        self._window.append(token_id)
        self.held = self._decode(self._window)[self._known :]
        # A character whose bytes are still arriving decodes to U+FFFD.
        if self.held.endswith("\ufffd") or self._ends_in_byte_token():
            return ""
        return self.flush()

    def flush(self) -> str:
        """Return the text held back, as final."""
        piece, self.held = self.held, ""
        if piece:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._known = len(self._decode(self._window))
        return piece

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces would reach across tokens, and corrupts BPE text.
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _ends_in_byte_token(self) -> bool:
        """A run of byte tokens decodes as a whole: one bad byte in it changes all of it."""
        visible = next((i for i in reversed(self._window) if i not in self._special), None)
        if visible is None:
            return False
        token = self._tokenizer.convert_ids_to_tokens(visible)
        return token is not None and BYTE_TOKEN.fullmatch(token) is not None


class TextStream:
    """The text of one sequence, cut before the first stop string.

    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = stop
        self._pending = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._pieces)

    def push(self, token_id: int, armed: bool = True) -> str:
        """Append a token and return the text it releases.

        Sets `stopped` when a stop string is complete. With `armed=False` stop strings are not
        looked for, neither now nor later in the text so far.
        """
        self._pending += self._detokenizer.push(token_id)
        if not armed:
            return self._release(len(self._pending))
        found = self._first_stop(self._pending + self._detokenizer.held)
        if found is not None:
            self.stopped = True
            self._pending += self._detokenizer.flush()
            return self._release(found)
        return self._release(len(self._pending) - self._possible_stop())

    def finish(self) -> str:
        """Return what was held back: no token follows that could change it."""
        if self.stopped:
            return ""
        self._pending += self._detokenizer.flush()
        return self._release(len(self._pending))

    def _release(self, length: int) -> str:
        piece, self._pending = self._pending[:length], self._pending[length:]
        self._pieces.append(piece)
        return piece

    def _first_stop(self, text: str) -> int | None:
        """Return where the earliest stop string begins in `text`."""
        return min((at for at in map(text.find, self._stop) if at >= 0), default=None)

    def _possible_stop(self) -> int:
        """Return the length of the longest end of the pending text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._pending)), 0, -1):
            tail = self._pending[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
