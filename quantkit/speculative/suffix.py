"""The suffix drafter: what followed the last time that the text ended like this.

It looks in the sequence itself (prompt and output), in earlier outputs of this process, and in a
corpus that the user gave; the longest match drafts. There is no model: a draft takes microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request
from quantkit.runtime.verification import NO_DRAFT, Draft, Guess
from quantkit.speculative.drafter import DraftSession, Judge
from quantkit.speculative.drawing import Draw
from quantkit.speculative.suffix_automaton import START, Cursor, SuffixAutomaton

EARLIER_TOKENS = 1 << 15
"""Capacity of the store of earlier outputs; its automaton takes about 500 bytes a token."""
TOKENS_PER_MATCH = 5
"""Tokens drafted for every matching one: a long match promises a long continuation."""
HALF_SURE = 6
"""Matching tokens at which the next one is taken to be right half of the time, to begin with."""
LONG_MATCH = 8
"""Matches from here on are counted together."""
BOUNDARY = -1
"""Between the texts of a store; it equals no token, so no match crosses it."""


@dataclass(slots=True)
class TextStore:
    """Texts to find continuations in; the oldest go when there are more than `capacity` tokens.

    `version` changes when they do, and cursors into the automaton then mean nothing any more.
    """

    capacity: int | None = None
    version: int = 0
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    _texts: deque[list[int]] = field(default_factory=deque)

    def add(self, text: Sequence[int]) -> None:
        """Add a text, or its end if it is longer than the capacity."""
        self._texts.append(list(text[-self.capacity :] if self.capacity else text))
        self._index(self._texts[-1])
        if self.capacity and len(self.automaton.tokens) > self.capacity:
            self._rebuild(self.capacity // 2)

    def clear(self) -> None:
        """Remove all texts."""
        self._texts.clear()
        self._rebuild(0)

    def _index(self, text: Sequence[int]) -> None:
        for token in (*text, BOUNDARY):
            self.automaton.append(token)

    def _rebuild(self, target: int) -> None:
        """Keep the newest texts: half of the capacity, so that this happens rarely."""
        while len(self._texts) > 1 and sum(map(len, self._texts)) > target:
            self._texts.popleft()
        self.automaton = SuffixAutomaton()
        self.version += 1
        for text in self._texts:
            self._index(text)


@dataclass(slots=True)
class Follower:
    """One sequence's match in a store."""

    source: str
    store: TextStore
    cursor: Cursor = START
    version: int = -1

    def read(self, tokens: Sequence[int], new: int) -> None:
        """Follow the sequence `tokens`, of which the last `new` are new."""
        if self.version != self.store.version:
            self.version, self.cursor = self.store.version, START
            new = max(new, 4 * LONG_MATCH)
        advance, cursor = self.store.automaton.advance, self.cursor
        for token in tokens[-new:] if new else ():
            cursor = advance(cursor, token)
        self.cursor = cursor

    def continuation(self, limit: int) -> list[int]:
        """Return what followed the match, up to the end of that text."""
        end = self.store.automaton.end_of(self.cursor)
        found = self.store.automaton.tokens[end : end + limit]
        return found[: found.index(BOUNDARY)] if BOUNDARY in found else found


class SuffixSession:
    """Drafting for one generation; implements DraftSession."""

    passes = 0

    def __init__(self, engine: Engine, earlier: TextStore, corpus: TextStore) -> None:
        self.engine = engine
        self._earlier = earlier
        self._corpus = corpus
        self._own: dict[int, SuffixAutomaton] = {}
        self._followers: dict[int, list[Follower]] = {}

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], judge: Judge
    ) -> list[Draft]:
        """Return the continuation of the longest match of each request; see DraftSession."""
        return [
            self._draft(request, limit) for request, limit in zip(requests, limits, strict=True)
        ]

    def finish(self, request: Request) -> None:
        """Keep the output for later requests."""
        if self._own.pop(request.sequence, None) is not None:
            del self._followers[request.sequence]
            self._earlier.add(request.ids)

    def _draft(self, request: Request, limit: int) -> Draft:
        own, followers = self._read(request)
        best = max(followers, key=lambda follower: follower.cursor[1])
        length = best.cursor[1]
        if own.match_length >= length:
            length, source = own.match_length, "own"
        else:
            source = best.source
        limit = min(limit, TOKENS_PER_MATCH * length)
        if limit < 1:
            return NO_DRAFT
        tokens = (
            repeat(own.tokens, own.match_end, limit)
            if source == "own"
            else (best.continuation(limit))
        )
        feature = min(length, LONG_MATCH)
        guesses = [
            Guess(source, feature, (length + depth) / (length + depth + HALF_SURE))
            for depth in range(len(tokens))
        ]
        return Draft(tokens, guesses)

    def _read(self, request: Request) -> tuple[SuffixAutomaton, list[Follower]]:
        """Take in what the request has got since the last time."""
        own = self._own.get(request.sequence)
        if own is None:
            own = self._own[request.sequence] = SuffixAutomaton(request.prompt)
            self._followers[request.sequence] = [
                Follower("earlier", self._earlier),
                Follower("corpus", self._corpus),
            ]
        new = request.tokens_from(len(own.tokens))
        for token in new:
            own.append(token)
        followers = self._followers[request.sequence]
        for follower in followers:
            follower.read(own.tokens, len(new))
        return own, followers


class SuffixDrafter:
    """Drafts what followed before; implements Drafter. `corpus` holds texts as token ids."""

    def __init__(
        self, corpus: Iterable[Sequence[int]] = (), earlier_tokens: int = EARLIER_TOKENS
    ) -> None:
        self._earlier = TextStore(earlier_tokens)
        self._corpus = TextStore()
        for text in corpus:
            self._corpus.add(text)

    def session(self, target: Engine, num_sequences: int, draw: Draw) -> DraftSession:
        """Return a session; it neither watches the target nor draws."""
        return SuffixSession(target, self._earlier, self._corpus)

    def forget(self) -> None:
        """Forget earlier outputs; the corpus stays."""
        self._earlier.clear()


def repeat(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on; where the text ends, it repeats what was copied."""
    copied = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(copied) < count:
        copied.append(copied[-period])
    return copied
