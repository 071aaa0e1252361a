"""Counters of one generation: tokens, seconds, the seed, and what drafts brought.

The names of the draft counters are vLLM's. Counting happens in `generation` and, of drafts, in
`quantkit.speculative`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class DraftStats:
    """What drafting brought to a call, or to one sequence of it. Only committed tokens count."""

    num_drafts: int = 0  # steps of a sequence that had drafted tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)  # by place in the draft
    num_steps: int = 0  # decoding steps of a sequence, with and without drafts
    draft_seconds: float = 0.0
    target_seconds: float = 0.0  # of decoding
    plain_seconds: float = 0.0  # what the same tokens would have taken without drafts, estimated

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a step with a draft brings: accepted ones and one more."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Share of drafted tokens that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def speed_up(self) -> float | None:
        """Plain decoding's time for the same tokens over this one's, choosing tokens left out."""
        seconds = self.draft_seconds + self.target_seconds
        return self.plain_seconds / seconds if seconds else None

    def count(self, drafted: int, accepted: int) -> None:
        """Count one draft of a sequence, possibly empty."""
        self.num_steps += 1
        if not drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = drafted - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * missing
        for place in range(accepted):
            self.num_accepted_tokens_per_pos[place] += 1

    def add_seconds(self, draft: float, target: float, plain: float) -> None:
        """Add what a step took, and what its tokens would have taken without drafts."""
        self.draft_seconds += draft
        self.target_seconds += target
        self.plain_seconds += plain

    def to_dict(self) -> dict[str, Any]:
        """Return all counters and what follows from them, ready for JSON."""
        return {
            **asdict(self),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "speed_up": self.speed_up,
        }


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
    drafts: DraftStats | None = None  # None where nothing drafts

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
            "drafts": self.drafts.to_dict() if self.drafts else None,
        }
