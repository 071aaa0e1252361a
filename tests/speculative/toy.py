"""A language model of a few tokens, small enough to know its distribution exactly.

The next token depends on the last one only. `simulate` runs the real drawing and verification on
it; `exact` enumerates what must come out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.verification import Draft, Guess, Verifier
from quantkit.speculative.drawing import Draw

LENGTH = 3
"""Tokens of a simulated sequence."""


def table(vocab: int, seed: int, scale: float = 1.5) -> Tensor:
    """Logits after each token, float32 [vocab, vocab]."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def params(**values: Any) -> ResolvedParams:
    return ResolvedParams(**{"seed": 5, "temperature": 1.0, **values})


def requests(count: int, resolved: ResolvedParams, first: int = 0) -> list[Request]:
    return [Request(first + i, [0], 10**6, resolved, None) for i in range(count)]


def draw_drafts(running: Sequence[Request], logits: Tensor, draw: Draw, length: int) -> list[Draft]:
    """Draft `length` tokens for each request from the table `logits`."""
    drafted: list[list[int]] = [[] for _ in running]
    laws = []
    for _ in range(length):
        last = [(r.prompt + r.ids + tokens)[-1] for r, tokens in zip(running, drafted, strict=True)]
        drawn = draw(logits[last], running, drafted)
        for tokens, token in zip(drafted, drawn.tokens, strict=True):
            tokens.append(token)
        laws.append(drawn.laws)
    guesses = [Guess("toy", 0, 0.5)] * length
    keep = bool(laws) and laws[0] is not None
    return [
        Draft(tokens, guesses, torch.stack([law[i] for law in laws]) if keep else None)
        for i, tokens in enumerate(drafted)
    ]


def target_logits(running: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> Tensor:
    """The rows that the target would give: after each request, and after each drafted token."""
    pairs = zip(running, drafts, strict=True)
    return logits[[token for r, d in pairs for token in [(r.prompt + r.ids)[-1], *d.tokens]]]


def simulate(
    target: Tensor,
    drafter: Tensor,
    draw: Draw,
    verify: Verifier,
    resolved: ResolvedParams,
    count: int,
    length: int,
    first: int = 0,
) -> tuple[Tensor, float]:
    """Return `count` sequences, int64 [count, LENGTH], and accepted tokens per draft."""
    everyone = requests(count, resolved, first)
    accepted = rounds = 0
    while running := [request for request in everyone if len(request.ids) < LENGTH]:
        drafts = draw_drafts(running, drafter, draw, length)
        chosen = verify(target_logits(running, drafts, target), running, drafts, resolved)
        for request, tokens in zip(running, chosen, strict=True):
            request.ids += tokens
            accepted += len(tokens) - 1
        rounds += len(running)
    return torch.tensor([request.ids[:LENGTH] for request in everyone]), accepted / rounds


def law(logits: Tensor, resolved: ResolvedParams) -> Tensor:
    """The distribution after temperature, top-k and top-p, by their definitions; [vocab]."""
    weights = [math.exp(x / resolved.temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: resolved.top_k or None]
    total, mass = sum(weights[i] for i in order), 0.0
    result = torch.zeros(len(weights), dtype=torch.float64)
    for i in order:
        if mass / total < resolved.top_p:
            result[i] = weights[i]
        mass += weights[i]
    return result / result.sum()


def exact(logits: Tensor, resolved: ResolvedParams) -> Tensor:
    """Probability of every sequence, float64 [vocab ** LENGTH], the first token major."""
    moves = torch.stack([law(row, resolved) for row in logits])
    result = []
    for tokens in itertools.product(range(len(logits)), repeat=LENGTH):
        probability = 1.0
        for before, after in itertools.pairwise((0, *tokens)):
            probability *= float(moves[before, after])
        result.append(probability)
    return torch.tensor(result, dtype=torch.float64)


def chi_square_score(samples: Tensor, probabilities: Tensor, vocab: int) -> float:
    """How many standard deviations chi-square is above its mean (Wilson and Hilferty's cube root).

    Cells that expect fewer than 5 are merged into one; a cell of probability 0 must be empty.
    """
    places = vocab ** torch.arange(LENGTH - 1, -1, -1)
    seen = torch.bincount((samples * places).sum(-1), minlength=len(probabilities)).double()
    if bool(seen[probabilities == 0].any()):
        return math.inf
    expected = probabilities * len(samples)
    rare = expected < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen, expected = seen[expected > 0], expected[expected > 0]
    degrees = len(seen) - 1
    statistic = float(((seen - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
