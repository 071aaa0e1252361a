"""How a drafter that has logits draws its tokens, so that the verifier can judge them.

The drafter hands over its logits and learns tokens; which noise they were drawn with, and whether
their law has to be kept, is the business of the verification in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantkit.runtime.choice import argmax, gumbel_argmax
from quantkit.runtime.noise import noise_key
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import Prefix, log_weights, process
from quantkit.speculative.rejection import Purpose, round_key


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row, its probability under the drafter, and that law if it must be kept."""

    tokens: list[int]
    confidences: list[float]
    laws: Tensor | None  # float64 [rows, vocab]


class Draw(Protocol):
    """Draw the next token of several drafts."""

    def __call__(
        self, logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]
    ) -> Drawn:
        """Shapes: logits float32 [len(requests), vocab of the target]; `drafted` is before it."""
        ...


def draw_coupled(params: ResolvedParams) -> Draw:
    """Return a Draw that uses the target's own noise: equal laws then give equal tokens."""

    def draw(
        logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]
    ) -> Drawn:
        prefixes = _prefixes(requests, drafted)
        if params.temperature == 0:
            scores = process(logits, prefixes, params)
            return _drawn(argmax(scores), scores, keep_laws=False)
        keys = [noise_key(params.seed, prefix.sequence, prefix.position) for prefix in prefixes]
        weights = log_weights(logits, prefixes, params)
        return _drawn(gumbel_argmax(weights, keys), weights, keep_laws=False)

    return draw


def draw_independent(params: ResolvedParams) -> Draw:
    """Return a Draw whose noise has nothing to do with the verifier's, as rejection needs it."""
    if params.temperature == 0:
        return draw_coupled(params)

    def draw(
        logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]
    ) -> Drawn:
        keys = [
            round_key(params, request, len(tokens), Purpose.DRAFT)
            for request, tokens in zip(requests, drafted, strict=True)
        ]
        weights = log_weights(logits, _prefixes(requests, drafted), params)
        return _drawn(gumbel_argmax(weights, keys), weights, keep_laws=True)

    return draw


def _prefixes(requests: Sequence[Request], drafted: Sequence[Sequence[int]]) -> list[Prefix]:
    return [request.prefix(tokens) for request, tokens in zip(requests, drafted, strict=True)]


def _drawn(tokens: Tensor, scores: Tensor, keep_laws: bool) -> Drawn:
    # A law is compared with the target's, which is float64: equal weights must be equal there.
    laws = scores.double().softmax(-1) if keep_laws else scores.softmax(-1)
    confidences = laws.gather(-1, tokens[:, None])[:, 0]
    return Drawn(tokens.tolist(), confidences.tolist(), laws if keep_laws else None)
