"""How a drafter that has logits draws its tokens, so that the verifier can judge them.

The drafter hands over its logits and learns tokens; which noise they were drawn with, and whether
their law has to be kept, is the business of the verification in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.runtime.choice import argmax, gumbel_argmax
from quantkit.runtime.noise import noise_key
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import Prefix, is_processed, log_weights, process
from quantkit.speculative.rejection import Purpose, round_key
from quantkit.speculative.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row, its probability under the drafter, and that law if it must be kept."""

    tokens: list[int]
    confidences: list[float]
    laws: Tensor | None  # float64 [rows, vocab]


class Draw(Protocol):
    """Draw the next token of several drafts."""

    def __call__(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None = None,
    ) -> Drawn:
        """Shapes: logits float32 [len(requests), columns]; `drafted` is what precedes them.

        Columns are those of `vocabulary`, or the tokens of the target.
        """
        ...


def draw_coupled(params: ResolvedParams) -> Draw:
    """Return a Draw that uses the target's own noise: equal laws then give equal tokens."""

    def draw(
        logits: Tensor,
        requests: Sequence[Request],
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None = None,
    ) -> Drawn:
        prefixes = _prefixes(requests, drafted)
        if vocabulary is not None and is_processed(prefixes, params):
            logits, vocabulary = vocabulary.widen(logits), None
        if params.temperature == 0:
            scores = process(logits, prefixes, params)
            return _of_columns(argmax(scores), scores, vocabulary)
        keys = [noise_key(params.seed, prefix.sequence, prefix.position) for prefix in prefixes]
        weights = log_weights(logits, prefixes, params)
        if vocabulary is None:
            return _of_columns(gumbel_argmax(weights, keys), weights, None)
        # The noise is that of token ids, and a small vocabulary's are far apart.
        tokens = gumbel_argmax(vocabulary.widen(weights), keys)
        columns = torch.searchsorted(vocabulary.token_ids, tokens)
        return _of_columns(columns, weights, vocabulary)

    return draw


def draw_independent(params: ResolvedParams) -> Draw:
    """Return a Draw whose noise has nothing to do with the verifier's, as rejection needs it."""
    if params.temperature == 0:
        return draw_coupled(params)

    def draw(
        logits: Tensor,
        requests: Sequence[Request],
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None = None,
    ) -> Drawn:
        keys = [
            round_key(params, request, len(tokens), Purpose.DRAFT)
            for request, tokens in zip(requests, drafted, strict=True)
        ]
        wide = logits if vocabulary is None else vocabulary.widen(logits)
        weights = log_weights(wide, _prefixes(requests, drafted), params)
        tokens = gumbel_argmax(weights, keys)
        # A law is compared with the target's, which is float64: equal weights must be equal there.
        laws = weights.double().softmax(-1)
        return Drawn(tokens.tolist(), _at(laws, tokens), laws)

    return draw


def _prefixes(requests: Sequence[Request], drafted: Sequence[Sequence[int]]) -> list[Prefix]:
    return [request.prefix(tokens) for request, tokens in zip(requests, drafted, strict=True)]


def _of_columns(columns: Tensor, scores: Tensor, vocabulary: DraftVocabulary | None) -> Drawn:
    """Return what was drawn, given its column in each row of scores."""
    tokens = columns if vocabulary is None else vocabulary.token_ids[columns]
    return Drawn(tokens.tolist(), _at(scores.softmax(-1), columns), None)


def _at(laws: Tensor, columns: Tensor) -> list[float]:
    probabilities: list[float] = laws.gather(-1, columns[:, None])[:, 0].tolist()
    return probabilities
