"""What two models say about the same tokens, token by token, in float64.

Takes logits, gives numbers; knows nothing of models, windows or averages. The logits of a chunk are
taken to float64 a few rows at a time, so that the temporaries stay in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""float64 logits of one model worked on at once: 2 MB."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One model's scores. Shapes: float64 [n], n tokens in order.

    `nll`: -log p(token), in nats. `kl`: KL(original || this model) of the whole distribution, in
    nats, and `agrees`: whether both models' likeliest tokens are the same; None for the original
    itself and without one.
    """

    nll: Tensor
    kl: Tensor | None = None
    agrees: Tensor | None = None

    @classmethod
    def join(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """Return the scores of all parts, in their order."""
        kl = [part.kl for part in parts if part.kl is not None]
        agrees = [part.agrees for part in parts if part.agrees is not None]
        return cls(
            torch.cat([part.nll for part in parts]),
            torch.cat(kl) if kl else None,
            torch.cat(agrees) if agrees else None,
        )


def score(logits: Tensor, targets: Tensor) -> TokenScores:
    """Score tokens under one model. Shapes: logits [n, vocab], targets int64 [n]."""
    return compare(logits, (), targets)[0]


def compare(original: Tensor, others: Sequence[Tensor], targets: Tensor) -> list[TokenScores]:
    """Score the same tokens under several models; returns the original's scores first.

    `KL = sum_v p(v) (log p(v) - log q(v))`, p being the original. Logits must be finite.
    Shapes: logits [n, vocab], targets int64 [n].
    """
    models = [original, *others]
    rows = max(1, BLOCK_ELEMENTS // original.shape[-1])
    parts: list[list[TokenScores]] = [[] for _ in models]
    for start in range(0, len(targets), rows):
        block = [logits[start : start + rows] for logits in models]
        for part, found in zip(parts, _compare(block, targets[start : start + rows]), strict=True):
            part.append(found)
    return [TokenScores.join(part) for part in parts]


@dataclass(frozen=True, slots=True)
class _LogSoftmax:
    """Float64 logits less their row's maximum, and what the log-softmax subtracts besides."""

    centred: Tensor  # [rows, vocab]
    log_sum: Tensor  # [rows]
    top: Tensor  # int64 [rows]

    @classmethod
    def of(cls, logits: Tensor) -> _LogSoftmax:
        top, index = logits.max(dim=-1)
        centred = logits.double().sub_(top.unsqueeze(-1))
        return cls(centred, centred.exp().sum(dim=-1).log(), index)

    def nll(self, targets: Tensor) -> Tensor:
        return self.log_sum - self.centred.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def probabilities(self) -> Tensor:
        return (self.centred - self.log_sum.unsqueeze(-1)).exp_()


def _compare(logits: Sequence[Tensor], targets: Tensor) -> list[TokenScores]:
    original, *others = (_LogSoftmax.of(model) for model in logits)
    scores = [TokenScores(original.nll(targets).cpu())]
    if not others:
        return scores
    weights = original.probabilities()
    for other in others:
        # sum p (log p - log q), the constants of both softmaxes taken out of the sum.
        kl = torch.linalg.vecdot(weights, original.centred - other.centred)
        kl += other.log_sum - original.log_sum
        agrees = other.top == original.top
        scores.append(TokenScores(other.nll(targets).cpu(), kl.cpu(), agrees.cpu()))
    return scores
