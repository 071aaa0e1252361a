"""Rejection sampling: keep drafts by the ratio of target and draft law, so that the law is exact.

Standard verification is that of Leviathan et al. (2211.17192) and Chen et al. (2302.01318), block
verification that of Sun et al. (2403.10444), which keeps at least as many tokens on average. Both
keep more than the coupled choice of `verification` does, and in exchange the output depends on the
drafts: only its distribution does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from quantkit.runtime.choice import gumbel_argmax
from quantkit.runtime.noise import noise_key, uniform
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import log_weights
from quantkit.runtime.verification import Draft, Verifier, row_starts, verify_coupled


class Purpose(IntEnum):
    """What noise is for; the three must be independent of one another."""

    ACCEPT = 1
    RESAMPLE = 2
    DRAFT = 3


Accept = Callable[[Tensor, Sequence[int], Tensor, Sequence[float]], tuple[int, Tensor]]
"""(target [n + 1, vocab], tokens [n], laws [n, vocab], uniforms [n]) -> how many tokens are kept,
and the weights [vocab] by which the next one is drawn. `laws` are what the tokens were drawn by."""


def accept_standard(
    target: Tensor, tokens: Sequence[int], laws: Tensor, uniforms: Sequence[float]
) -> tuple[int, Tensor]:
    """Keep token x of row i with probability min(1, p_i(x) / q_i(x)), up to the first refused.

    In its place the next is drawn by max(p_i - q_i, 0), after the last by p. See `Accept`.
    """
    for row, (p, q) in enumerate(_probabilities(target, tokens, laws)):
        if uniforms[row] * q >= p:
            return row, _residual(target[row], laws[row])
    return len(tokens), target[len(tokens)]


def accept_block(
    target: Tensor, tokens: Sequence[int], laws: Tensor, uniforms: Sequence[float]
) -> tuple[int, Tensor]:
    """Keep the longest prefix that passes a test of its own; see `Accept`.

    With w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)) and m_i = sum max(w_i p - q, 0) over the law
    after i tokens, a prefix of i tokens passes with probability m_i / (m_i + 1 - w_i), the whole
    draft with w_n. The next token is drawn by max(w_i p - q, 0), after the whole draft by p.
    """
    kept = [1.0]
    for p, q in _probabilities(target, tokens, laws):
        kept.append(min(1.0, kept[-1] * p / q) if q > 0 else 0.0)
    count = len(tokens)
    scaled = target[:count] * target.new_tensor(kept[:count])[:, None]
    masses = (scaled - laws).clamp_(min=0).sum(-1).tolist()
    for length in range(count, 0, -1):
        if length == count:
            passes = kept[length]
        else:
            whole = masses[length] + 1 - kept[length]
            passes = masses[length] / whole if whole > 0 else 1.0
        if uniforms[length - 1] <= passes:
            return length, _after_block(target, laws, kept, length)
    return 0, _after_block(target, laws, kept, 0)


ACCEPTS: dict[str, Accept] = {"rejection": accept_standard, "block": accept_block}
"""Verification by name."""


def rejection_verifier(accept: Accept) -> Verifier:
    """Return the Verifier that keeps drafts by `accept`; greedy decoding has nothing to draw."""

    def verify(
        logits: Tensor,
        requests: Sequence[Request],
        drafts: Sequence[Draft],
        params: ResolvedParams,
    ) -> list[list[int]]:
        if params.temperature == 0:
            return verify_coupled(logits, requests, drafts, params)
        return [
            _verify_one(logits[start : start + len(draft) + 1], request, draft, params, accept)
            for request, draft, start in zip(requests, drafts, row_starts(drafts), strict=True)
        ]

    return verify


def round_key(params: ResolvedParams, request: Request, index: int, purpose: Purpose) -> int:
    """Return the noise key for token `index` of a round of drafting.

    A position is visited by several rounds if drafts are refused before it, and what an earlier
    round made of it must not be known to a later one. No two rounds start at the same length.
    """
    start = request.length
    return noise_key(params.seed, request.sequence, start + index, start, purpose)


def _verify_one(
    logits: Tensor, request: Request, draft: Draft, params: ResolvedParams, accept: Accept
) -> list[int]:
    """Judge the draft of one request; logits [len(draft) + 1, vocab]."""
    tokens = list(draft.tokens)
    prefixes = [request.prefix(tokens[:count]) for count in range(len(tokens) + 1)]
    target = log_weights(logits, prefixes, params).double().softmax(-1)
    laws = _one_hot(tokens, target) if draft.laws is None else draft.laws.double()
    uniforms = [
        uniform(round_key(params, request, index, Purpose.ACCEPT)) for index in range(len(tokens))
    ]
    count, weights = accept(target, tokens, laws, uniforms)
    scores = weights.log()[None]
    key = round_key(params, request, count, Purpose.RESAMPLE)
    chosen = gumbel_argmax((scores - scores.max()).float(), [key])
    return [*tokens[:count], int(chosen)]


def _probabilities(
    target: Tensor, tokens: Sequence[int], laws: Tensor
) -> list[tuple[float, float]]:
    """Return p and q of every drafted token."""
    columns = torch.tensor(tokens, dtype=torch.int64, device=target.device)[:, None]
    p = target[: len(tokens)].gather(-1, columns)[:, 0].tolist()
    q = laws.gather(-1, columns)[:, 0].tolist()
    return list(zip(p, q, strict=True))


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Return max(p - q, 0), or p where rounding leaves nothing of it. Shapes: [vocab]."""
    rest = (p - q).clamp_(min=0)
    return rest if bool(rest.any()) else p


def _after_block(target: Tensor, laws: Tensor, kept: Sequence[float], length: int) -> Tensor:
    """Return the weights of the token after `length` tokens of a block."""
    if length == len(laws):
        return target[length]
    return _residual(target[length] * kept[length], laws[length])


def _one_hot(tokens: Sequence[int], like: Tensor) -> Tensor:
    """Return the laws of tokens that were not drawn: certainty. Shapes: [n] -> [n, vocab]."""
    laws = like.new_zeros(len(tokens), like.shape[-1])
    for row, token in enumerate(tokens):
        laws[row, token] = 1
    return laws
