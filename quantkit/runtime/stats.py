"""Counters of one generation: tokens, seconds, and the seed. Counting happens in `generation`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Stats:
    """What a call, or one sequence of it, did.

    The prompt's tokens and the first new token of each sequence belong to prefill, all others to
    decode. Seconds exclude what the consumer of a stream does between tokens. For a sequence,
    `decode_seconds` is the time of the steps it took part in.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    decode_tokens: int = 0  # new tokens less the first of each sequence
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    time_to_first_token: float | None = None  # seconds; of a call: until every sequence had one
    seed: int | None = None  # of sampling, also when drawn afresh; None if greedy

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens per second, or None if nothing was measured."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second over all sequences, or None if nothing was measured."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Return all counters and both rates, ready for JSON."""
        return {
            **asdict(self),
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
        }
