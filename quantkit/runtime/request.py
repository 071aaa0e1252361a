"""One sequence on its way: its tokens, its text, and when it ends.

`Request.accept` is the only place where a token becomes part of a sequence, however it was found.
Nothing here knows of models, caches or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.sampling import Prefix
from quantkit.runtime.stats import Stats
from quantkit.runtime.text import TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model wrote after one prompt.

    `ids` are the new tokens, the one that ended the sequence included. `text` is their text
    without special tokens and without the stop string; None if the model has no tokenizer.
    `logprobs` has one {token id: log p} per id when asked for.
    """

    ids: list[int]
    text: str | None
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    stats: Stats


@dataclass(frozen=True, slots=True)
class Token:
    """One new token: its sequence, and the text it released (held back text follows later)."""

    sequence: int
    id: int
    text: str


@dataclass(slots=True)
class Request:
    """The prompt of a sequence, what was generated, and how much may follow."""

    sequence: int  # its number in the batch and in the cache
    prompt: list[int]
    budget: int  # most new tokens, by max_new_tokens and by the context
    params: ResolvedParams
    text: TextStream | None
    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt) + len(self.ids)

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self.budget - len(self.ids)

    def tokens_from(self, position: int) -> list[int]:
        """Return the tokens at `position` and after."""
        known = len(self.prompt)
        if position >= known:
            return self.ids[position - known :]
        return [*self.prompt[position:], *self.ids]

    def prefix(self, drafted: Sequence[int] = ()) -> Prefix:
        """Return what precedes the token after `drafted`, were that accepted."""
        generated = [*self.ids, *drafted] if drafted else self.ids
        return Prefix(self.sequence, self.prompt, generated)

    def accept(self, token_id: int) -> Token:
        """Append a token, and end the sequence if it does."""
        self.ids.append(token_id)
        piece = ""
        if token_id in self.params.ending_ids:
            self.finish_reason = "stop"
        elif self.text is not None:
            armed = len(self.ids) >= self.params.min_new_tokens
            piece = self.text.push(token_id, armed)
            if self.text.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and self.room == 0:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text is not None:
            piece += self.text.finish()
        return Token(self.sequence, token_id, piece)

    def completion(self) -> Completion:
        """Return the result."""
        return Completion(
            ids=self.ids,
            text=self.text.text if self.text else None,
            finish_reason=self.finish_reason or "length",
            logprobs=None if self.params.logprobs is None else self.logprobs,
            stats=self.stats,
        )
