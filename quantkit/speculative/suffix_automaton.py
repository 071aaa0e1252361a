"""A suffix automaton: where did the end of this text occur before?

The automaton of a text of n tokens has at most 2 n states and answers in constant time, whatever
the length of the match (Blumer et al., 1985). Appending takes constant time on average: a few
microseconds in Python.
"""

from __future__ import annotations

from collections.abc import Iterable

Cursor = tuple[int, int]
"""A state, and how many tokens of another text match there."""

START: Cursor = (0, 0)


class SuffixAutomaton:
    """All substrings of a growing text.

    `match_length` is the length of the longest end of the text that occurred before, and
    `match_end` the place after one such occurrence, a late one: mostly the latest.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.match_length = 0
        self.match_end = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # the state of the longest end that occurs elsewhere too
        self._length = [0]  # of the longest substring of the state
        self._end = [0]  # the place after one of its occurrences
        self._last = 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add one token."""
        nexts, links, lengths, ends = self._next, self._link, self._length, self._end
        self.tokens.append(token)
        place = len(self.tokens)
        state, last = len(nexts), self._last
        nexts.append({})
        links.append(0)
        lengths.append(place)
        ends.append(place)
        while last >= 0 and token not in nexts[last]:
            nexts[last][token] = state
            last = links[last]
        match = 0 if last < 0 else self._state_of(last, token)
        links[state] = match
        self._last = state
        self.match_length, self.match_end = lengths[match], ends[match]
        ends[match] = place

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """Return the longest match of another text after its next token."""
        nexts, links, lengths = self._next, self._link, self._length
        state, length = cursor
        while state and token not in nexts[state]:
            state = links[state]
            length = lengths[state]
        following = nexts[state].get(token)
        return START if following is None else (following, length + 1)

    def end_of(self, cursor: Cursor) -> int:
        """Return the place after an occurrence of what matches."""
        return self._end[cursor[0]]

    def _state_of(self, last: int, token: int) -> int:
        """Return the state of the longest substring of `last`, and `token`; split one for it."""
        nexts, links, lengths = self._next, self._link, self._length
        found = nexts[last][token]
        if lengths[last] + 1 == lengths[found]:
            return found
        copy = len(nexts)
        nexts.append(nexts[found].copy())
        links.append(links[found])
        lengths.append(lengths[last] + 1)
        self._end.append(self._end[found])
        while last >= 0 and nexts[last].get(token) == found:
            nexts[last][token] = copy
            last = links[last]
        links[found] = copy
        return copy
