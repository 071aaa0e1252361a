"""Drafts, and what the target makes of them: the choice of plain decoding, for as long as it holds.

The token at a position is a function of the row of logits, the prefix and the seed (`sampling`). A
drafted token is kept if it equals the token chosen there; the first that differs is replaced by
it. So the output does not depend on drafts at all, and without any this is plain decoding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import sample
from quantkit.runtime.sending import send_numbers


@dataclass(frozen=True, slots=True)
class Guess:
    """Why a token was drafted: acceptance is counted by source, feature and place in the draft.

    `feature` says how sure the source was, in steps coarse enough to count by; `prior` is
    P(accepted) as long as little has been counted.
    """

    source: str
    feature: Hashable
    prior: float


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence, in order.

    `guesses` has one entry a token. `laws` are the distributions the tokens were drawn from,
    float [num_tokens, vocab]; None if they were not drawn but looked up or the likeliest.
    """

    tokens: Sequence[int] = ()
    guesses: Sequence[Guess] = ()
    laws: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Draft:
        """Return the draft cut to `count` tokens."""
        if count >= len(self.tokens):
            return self
        laws = None if self.laws is None else self.laws[:count]
        return Draft(self.tokens[:count], self.guesses[:count], laws)


NO_DRAFT = Draft()


class Verifier(Protocol):
    """Decide from the target's logits which tokens follow."""

    def __call__(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        drafts: Sequence[Draft],
        params: ResolvedParams,
    ) -> list[list[int]]:
        """Return for each request the accepted part of its draft and one more token.

        Shapes: logits float32 [sum of 1 + len(draft), vocab], the rows of a request together; its
        row i follows its tokens and the first i of the draft.
        """
        ...


def verify_coupled(
    logits: Tensor,
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    params: ResolvedParams,
) -> list[list[int]]:
    """Choose as plain decoding does, row after row, while the draft agrees; see Verifier."""
    # Choosing from a row can take as long as a layer. On a CPU no row is chosen from in vain; on a
    # GPU a row costs nothing beside the wait for the answer, so there is one wait.
    span = 1 if logits.device.type == "cpu" else max(map(len, drafts)) + 1
    return choose_rows(logits, requests, drafts, params, span)


def choose_rows(
    logits: Tensor,
    requests: Sequence[Request],
    drafts: Sequence[Draft],
    params: ResolvedParams,
    span: int,
) -> list[list[int]]:
    """Do what `verify_coupled` does, choosing from `span` rows of a request at a time."""
    starts = row_starts(drafts)
    chosen: list[list[int]] = [[] for _ in requests]
    agreeing = list(range(len(requests)))
    while agreeing:
        rows = [
            (index, depth)
            for index in agreeing
            for depth in range(len(chosen[index]), len(drafts[index]) + 1)[:span]
        ]
        places = [starts[index] + depth for index, depth in rows]
        prefixes = [requests[index].prefix(drafts[index].tokens[:depth]) for index, depth in rows]
        picked = _rows(logits, places)
        still = dict.fromkeys(agreeing)
        for (index, depth), token in zip(
            rows, sample(picked, prefixes, params).tolist(), strict=True
        ):
            if index in still:
                chosen[index].append(token)
                if depth == len(drafts[index]) or token != drafts[index].tokens[depth]:
                    del still[index]
        agreeing = list(still)
    return chosen


def _rows(logits: Tensor, places: Sequence[int]) -> Tensor:
    """Return some rows; a copy only if there is no other way."""
    first, last = places[0], places[-1]
    if last - first == len(places) - 1:  # ascending, so side by side
        return logits[first : last + 1]
    return logits[send_numbers(places, logits.device)]


def row_starts(drafts: Sequence[Draft]) -> list[int]:
    """Return the first row of every request, if each has one more row than its draft has tokens."""
    starts = [0]
    for draft in drafts:
        starts.append(starts[-1] + len(draft) + 1)
    return starts[:-1]
