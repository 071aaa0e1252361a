"""How a drafter that has logits draws its tokens, so that the verifier can judge them.

The drafter hands over its logits and learns tokens; which noise they were drawn with, and whether
their law has to be kept, is the business of the verification in use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantkit.runtime.choice import gumbel_argmax
from quantkit.runtime.noise import noise_key
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import (
    MIN_TEMPERATURE,
    Prefix,
    is_plain,
    is_processed,
    log_weights,
    process,
)
from quantkit.runtime.sending import send_numbers
from quantkit.sampling_ops import draw_rows
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
    plain = is_plain(params)

    def draw(
        logits: Tensor,
        requests: Sequence[Request],
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None = None,
    ) -> Drawn:
        scores, temperature = logits, max(params.temperature, MIN_TEMPERATURE)
        if not plain:
            prefixes = _prefixes(requests, drafted)
            if vocabulary is not None and is_processed(prefixes, params):
                scores, vocabulary = vocabulary.widen(scores), None
            if params.temperature == 0:
                scores = process(scores, prefixes, params)
            else:
                scores, temperature = log_weights(scores, prefixes, params), 1.0
        if params.temperature == 0:
            return _draw_rows(scores, None, vocabulary, 1.0)
        keys = [
            noise_key(params.seed, request.sequence, request.length + len(tokens))
            for request, tokens in zip(requests, drafted, strict=True)
        ]
        # The noise is that of token ids, whichever have a column.
        drawn = _draw_rows(scores, keys, vocabulary, temperature)
        if not all(map(math.isfinite, drawn.confidences)):
            log_weights(logits, _prefixes(requests, drafted), params)  # says where
        return drawn

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


def _draw_rows(
    scores: Tensor,
    keys: Sequence[int] | None,
    vocabulary: DraftVocabulary | None,
    temperature: float,
) -> Drawn:
    """Return what the op draws, where columns are those of a vocabulary or all tokens."""
    ids, size = (None, 0) if vocabulary is None else (vocabulary.token_ids, vocabulary.size)
    noise = None if keys is None else send_numbers(keys, scores.device)
    tokens, likelihoods = draw_rows(scores.contiguous(), noise, ids, size, temperature)
    return Drawn(tokens.tolist(), likelihoods.tolist(), None)


def _at(laws: Tensor, columns: Tensor) -> list[float]:
    probabilities: list[float] = laws.gather(-1, columns[:, None])[:, 0].tolist()
    return probabilities
