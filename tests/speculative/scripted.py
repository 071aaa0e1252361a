"""Speculation by script: drafts come from what plain decoding is known to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Completion, Request
from quantkit.runtime.stats import DraftStats
from quantkit.runtime.text import TextStream
from quantkit.runtime.verification import Draft, Guess, verify_coupled

Script = Callable[[list[int], int, int], list[int]]
"""(tokens that plain decoding writes next, vocabulary, length asked for) -> draft."""


def right(future: list[int], vocab: int, length: int) -> list[int]:
    return future[:length]


def wrong(future: list[int], vocab: int, length: int) -> list[int]:
    return [(token + 1) % vocab for token in [*future, *[0] * length][:length]]


def right_then_wrong(future: list[int], vocab: int, length: int) -> list[int]:
    half = future[: length // 2]
    return half + wrong(future[len(half) :], vocab, length - len(half))


def wrong_then_right(future: list[int], vocab: int, length: int) -> list[int]:
    return wrong(future, vocab, 1) + future[1:length]


def beyond_the_end(future: list[int], vocab: int, length: int) -> list[int]:
    """Everything that plain decoding will write, and then more than anything has room for."""
    return future + [3] * 100


def no_tokens_at_all(future: list[int], vocab: int, length: int) -> list[int]:
    """Ids that are no tokens: the vocabulary of a drafter may be larger."""
    return [*future[: length // 2], vocab, vocab + 7, -1]


SCRIPTS = (
    right,
    wrong,
    right_then_wrong,
    wrong_then_right,
    beyond_the_end,
    no_tokens_at_all,
)


class Scripted:
    """A Speculation; `lengths` are asked for in turn, over and over."""

    verify = staticmethod(verify_coupled)

    def __init__(
        self, script: Script, future: Sequence[Sequence[int]], vocab: int, lengths: Sequence[int]
    ) -> None:
        self.engine: Any = None
        self.stats = DraftStats()
        self.steps: list[tuple[list[int], list[int]]] = []
        self.watch: Callable[[Sequence[Request]], None] = lambda running: None
        self._script = script
        self._future = future
        self._vocab = vocab
        self._lengths = lengths
        self._asked = 0

    def propose(self, running: Sequence[Request]) -> list[Draft]:
        return [self._draft(request) for request in running]

    def _draft(self, request: Request) -> Draft:
        length = self._lengths[self._asked % len(self._lengths)]
        self._asked += 1
        future = list(self._future[request.sequence][len(request.ids) :])
        tokens = self._script(future, self._vocab, length)
        return Draft(tokens, [Guess("script", 0, 0.5)] * len(tokens))

    def observe(
        self,
        running: Sequence[Request],
        drafts: Sequence[Draft],
        counts: Sequence[int],
        draft_seconds: float,
        forward_seconds: float,
    ) -> None:
        self.steps.append(([len(draft) for draft in drafts], list(counts)))
        self.watch(running)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: ResolvedParams,
    speculation: Any = None,
    new_text: Callable[[], TextStream] | None = None,
    width: int | None = None,
) -> list[Completion]:
    if speculation is not None:
        speculation.engine = engine
    return Generation(engine, prompts, params, new_text, speculation, width).completions()


def result(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    """All of a completion that speculation must not change."""
    return [(c.ids, c.text, c.finish_reason, c.logprobs) for c in completions]
