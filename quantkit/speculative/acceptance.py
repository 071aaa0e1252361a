"""How often guesses are accepted: counts by source, feature and place in the draft."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from quantkit.runtime.verification import Draft, Guess

PRIOR_WEIGHT = 4.0
"""Trials that a prior counts for."""
PROMISE_WEIGHT = 1.0
"""Accepted tokens that the priors of a source are trusted for at first."""
HIGHEST_PRIOR = 0.95
"""However well a source does, a kind that is new is not certain."""
HIGHEST_RATE = 0.995
"""However well a source does on a text, no token is certain."""
MEMORY = 200.0
"""Trials of a kind after which its counts are halved, so that they follow the text."""
PLACES = 8
"""Places in a draft from here on are counted together."""
RECENT = 0.95
"""Weight of the past, per judged token, in how a source has done on the texts at hand."""
RECENT_WEIGHT = 4.0
"""Tokens as expected that a source is trusted for when texts begin."""
FIRST_PROSPECT = 0.6
"""P(accepted) of a token that a source has yet to draft, before any was counted."""

_ANY = object()
"""In place of a feature: all of them."""


class Acceptance:
    """Estimates P(a drafted token is accepted | all before it are).

    Only tokens that were judged are counted: those after the first refused one say nothing. A kind
    of guess is counted at each place of a draft, and at all places together: that is what is
    assumed of a place that was hardly ever reached. Where a kind is new, its prior is corrected by
    how the priors of all kinds of the source have done so far. Texts differ more than kinds do: all
    estimates of a source are corrected by how they have done on the texts at hand.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}  # accepted, tried
        self._promised: dict[str, tuple[float, float]] = {}  # accepted, sum of priors
        self._recent: dict[str, tuple[float, float]] = {}  # accepted, expected

    def begin_texts(self) -> None:
        """Forget how sources have done on the texts so far; new ones begin."""
        self._recent.clear()

    def rate(self, guess: Guess, place: int) -> float:
        """Return the estimate for a guess at a place of its draft, counted from 0."""
        return min(self._fortune(guess.source) * self._usual(guess, place), HIGHEST_RATE)

    def _usual(self, guess: Guess, place: int) -> float:
        """Return the estimate for any text."""
        anywhere = (guess.source, guess.feature)
        hits, promised = self._promised.get(guess.source, (0.0, 0.0))
        honesty = (hits + PROMISE_WEIGHT) / (promised + PROMISE_WEIGHT)
        prior = self._estimate(anywhere, min(honesty * guess.prior, HIGHEST_PRIOR))
        return self._estimate((*anywhere, min(place, PLACES)), prior)

    def prospect(self, source: str, place: int) -> float:
        """Return the estimate for what `source` would draft at a place, whatever that is."""
        prior = self._estimate(source, FIRST_PROSPECT)
        usual = self._estimate((source, _ANY, min(place, PLACES)), prior)
        return min(self._fortune(source) * usual, HIGHEST_RATE)

    def _fortune(self, source: str) -> float:
        """Return by what factor `source` does better on the texts at hand than on others."""
        hits, expected = self._recent.get(source, (0.0, 0.0))
        return (hits + RECENT_WEIGHT) / (expected + RECENT_WEIGHT)

    def survivals(self, guesses: Sequence[Guess], least: float = 0.0) -> list[float]:
        """Return for each guess the estimate that it and all before it are accepted.

        Those from the first on that is below `least` are left out.
        """
        survival, result = 1.0, []
        for place, guess in enumerate(guesses):
            survival *= self.rate(guess, place)
            if survival < least:
                break
            result.append(survival)
        return result

    def observe(self, draft: Draft, accepted: int, judged: int) -> None:
        """Count a draft of which `judged` tokens were judged and the first `accepted` accepted."""
        for place, guess in enumerate(draft.guesses[:judged]):
            source, feature, near = guess.source, guess.feature, min(place, PLACES)
            hits, expected = self._recent.get(source, (0.0, 0.0))
            self._recent[source] = (
                RECENT * hits + (place < accepted),
                RECENT * expected + self._usual(guess, place),
            )
            for kind in (
                source,
                (source, feature),
                (source, feature, near),
                (source, _ANY, near),
            ):
                self._count(kind, place < accepted)
            hits, promised = self._promised.get(source, (0.0, 0.0))
            keep = 1.0 if promised < MEMORY else 0.5
            self._promised[source] = (
                keep * hits + (place < accepted),
                keep * promised + guess.prior,
            )

    def _count(self, kind: Hashable, accepted: bool) -> None:
        hits, trials = self._counts.get(kind, (0.0, 0.0))
        if trials >= MEMORY:
            hits, trials = hits / 2, trials / 2
        self._counts[kind] = hits + accepted, trials + 1

    def _estimate(self, kind: Hashable, prior: float) -> float:
        hits, trials = self._counts.get(kind, (0.0, 0.0))
        return (hits + PRIOR_WEIGHT * prior) / (trials + PRIOR_WEIGHT)
