"""How a long text is cut into windows so that every token but the first is scored exactly once.

Pure arithmetic on token ids; knows no model. A window is what a model reads at once: up to `window`
tokens, the last of which predicts a token that is not read. A window starts `stride` tokens after
the one before it and scores only what that one did not reach; the rest of it is context. Tokens
that the tokenizer puts before every text (BOS) stand at the start of every window, as models that
were trained with them expect, and are never scored; with BOS they are "the first".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import DataError

MIN_TOKENS = 2
"""Fewest tokens of a text, BOS not counted: one to predict from, one to predict."""


@dataclass(frozen=True, slots=True)
class Window:
    """One pass of a model. Shapes: inputs int64 [n]; targets int64 [n - start].

    `targets[i]` follows `inputs[start + i]` and is token `position + i` of text number `text`, both
    counted from 0, BOS not counted. Rows before `start` are context.
    """

    inputs: Tensor
    targets: Tensor
    start: int
    position: int
    text: int = 0


@dataclass(frozen=True, slots=True)
class Cutting:
    """How texts are cut: window and stride in tokens, and what stands before every window.

    Raises DataError if no cutting with these numbers scores every token.
    """

    window: int
    stride: int
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.window < max(len(self.prefix), 1):
            raise DataError(
                f"--window must be at least {max(len(self.prefix), 1)}, got {self.window}"
            )
        if not 1 <= self.stride <= self.scored:
            raise DataError(
                f"--stride must be between 1 and the window, {self.scored}, got {self.stride}; a "
                "longer stride would leave tokens out"
            )

    @property
    def scored(self) -> int:
        """Most tokens that one window can score."""
        return self.window - max(len(self.prefix) - 1, 0)

    def count(self, num_tokens: int) -> int:
        """Return how many tokens of a text are scored: all, or without BOS all but the first."""
        return num_tokens if self.prefix else num_tokens - 1

    def windows(self, tokens: Sequence[int], text: int = 0) -> Iterator[Window]:
        """Yield the windows of one text, given without BOS. It has at least two tokens."""
        if len(tokens) < MIN_TOKENS:
            raise DataError(
                f"a text of {len(tokens)} tokens cannot be scored; the minimum is {MIN_TOKENS}"
            )
        ids = torch.tensor(tokens, dtype=torch.int64)
        lead = torch.tensor(self.prefix, dtype=torch.int64)
        first = 0 if self.prefix else 1  # the first token that is scored
        done, begin = first, first
        while done < len(ids):
            end = min(begin + self.scored, len(ids))
            read = ids[begin : end - 1] if self.prefix else ids[begin - 1 : end - 1]
            inputs = torch.cat((lead, read))
            yield Window(inputs, ids[done:end], len(inputs) - (end - done), done, text)
            done, begin = end, begin + self.stride

    def num_windows(self, num_tokens: int) -> int:
        """Return how many windows a text of `num_tokens` has."""
        beyond = max(self.count(num_tokens) - self.scored, 0)
        return 1 + -(-beyond // self.stride)
