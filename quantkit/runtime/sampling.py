"""From logits to tokens: processors, filters, and the choice.

The order is fixed, as in vLLM: repetition, frequency and presence penalty, logit bias,
min_new_tokens; then, unless greedy, temperature, min-p, top-k, top-p. The token is
`argmax(log p + gumbel(seed, sequence, position, token id))`, which is an exact draw from p (the
Gumbel-max trick) and a pure function of the row: rows never influence each other, and verifying a
draft at some position chooses what plain decoding chooses there. Greedy uses no noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import GenerationError
from quantkit.runtime.choice import argmax, gumbel_argmax
from quantkit.runtime.noise import noise_key
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.sending import send_numbers
from quantkit.sampling_ops import nucleus_bound

MIN_TEMPERATURE = 1e-30
"""A smaller one would not be a normal float32; this one is greedy already, up to exact ties."""


NO_TOKEN = -1
"""In place of a token where a row of logits is not finite, or nothing is allowed."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What precedes one row of logits: which sequence, its prompt, and its new tokens so far."""

    sequence: int
    prompt: Sequence[int]
    generated: Sequence[int]

    @property
    def position(self) -> int:
        """Absolute position of the token to be chosen."""
        return len(self.prompt) + len(self.generated)


def sample(logits: Tensor, prefixes: Sequence[Prefix], params: ResolvedParams) -> Tensor:
    """Choose the next token of every row.

    Shapes: logits float32 [rows, vocab], one Prefix a row -> int64 [rows], on the CPU: of a GPU
    nothing but this answer is waited for. `logits` is not changed.
    Raises GenerationError where a row is not finite or every token is forbidden.
    """
    if logits.device.type != "cpu":
        chosen = choose(logits, prefixes, params).cpu()
        _require((chosen != NO_TOKEN).tolist(), logits, prefixes)
        return chosen
    if params.temperature == 0:
        likeliest, _ = _peaks(process(logits, prefixes, params), logits, prefixes)
        return likeliest
    keys = [noise_key(params.seed, prefix.sequence, prefix.position) for prefix in prefixes]
    return gumbel_argmax(log_weights(logits, prefixes, params), keys)


def choose(logits: Tensor, prefixes: Sequence[Prefix], params: ResolvedParams) -> Tensor:
    """Do what `sample` does on the device of the logits, and wait for nothing there.

    NO_TOKEN stands in rows that `sample` raises for.
    """
    scores = process(logits, prefixes, params)
    chosen = argmax(scores)
    peak = scores.gather(-1, chosen[:, None])
    if params.temperature > 0:
        keys = [noise_key(params.seed, prefix.sequence, prefix.position) for prefix in prefixes]
        chosen = gumbel_argmax(_weights(scores, peak, params), keys)
    return chosen.masked_fill(~peak[:, 0].isfinite(), NO_TOKEN)


def log_weights(logits: Tensor, prefixes: Sequence[Prefix], params: ResolvedParams) -> Tensor:
    """Return what tokens are drawn by at a temperature above 0: log p + a constant of the row.

    Shapes: float32 [rows, vocab] -> the same; 0 for the likeliest token, -inf for excluded ones.
    Raises GenerationError where a row is not finite or every token is forbidden.
    """
    scores = process(logits, prefixes, params)
    _, peak = _peaks(scores, logits, prefixes)
    return _weights(scores, peak, params)


def _weights(scores: Tensor, peak: Tensor, params: ResolvedParams) -> Tensor:
    """Return `log_weights` of processed scores whose largest are `peak`, [rows, 1]."""
    return keep_likely((scores - peak) / max(params.temperature, MIN_TEMPERATURE), params)


def _peaks(scores: Tensor, logits: Tensor, prefixes: Sequence[Prefix]) -> tuple[Tensor, Tensor]:
    """Return the argmax of every row, int64 [rows], and its score, [rows, 1], which is finite."""
    likeliest = argmax(scores)
    peak = scores.gather(-1, likeliest[:, None])
    _require([math.isfinite(value) for value in peak[:, 0].tolist()], logits, prefixes)
    return likeliest, peak


def is_processed(prefixes: Sequence[Prefix], params: ResolvedParams) -> bool:
    """Return whether `process` changes anything after these prefixes."""
    short = any(len(prefix.generated) < params.min_new_tokens for prefix in prefixes)
    return short or _penalizes(params) or bool(params.logit_bias)


def is_plain(params: ResolvedParams) -> bool:
    """Return whether nothing but the temperature stands between logits and tokens."""
    if _penalizes(params) or params.logit_bias or params.min_new_tokens > 0:
        return False
    filters = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
    return params.temperature == 0 or not filters


def _penalizes(params: ResolvedParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def process(logits: Tensor, prefixes: Sequence[Prefix], params: ResolvedParams) -> Tensor:
    """Apply what depends on the prefix and what the caller biases; the argmax may change.

    Shapes: float32 [rows, vocab] -> the same; the input itself when nothing applies.
    """
    if not is_processed(prefixes, params):
        return logits
    scores = logits.clone()
    if _penalizes(params):
        for row, prefix in zip(scores, prefixes, strict=True):
            _penalize(row, prefix, params)
    for token_id, bias in params.logit_bias.items():
        scores[:, token_id] += bias
    for row, prefix in zip(scores, prefixes, strict=True):
        if len(prefix.generated) < params.min_new_tokens:
            row[send_numbers(sorted(params.ending_ids), row.device)] = -math.inf
    return scores


def _penalize(row: Tensor, prefix: Prefix, params: ResolvedParams) -> None:
    """Penalize in place the tokens that one row's own prefix holds; row is [vocab].

    Repetition, over prompt and new tokens: x / penalty if x > 0 else x * penalty (Keskar et al.,
    2019). Frequency and presence, over new tokens: x - frequency * count - presence (OpenAI).
    """
    if params.repetition_penalty != 1:
        seen = send_numbers(sorted({*prefix.prompt, *prefix.generated}), row.device)
        score, penalty = row[seen], params.repetition_penalty
        row[seen] = torch.where(score < 0, score * penalty, score / penalty)
    if prefix.generated and (params.frequency_penalty or params.presence_penalty):
        repeats = Counter(prefix.generated)
        ids, counts = (
            send_numbers(numbers, row.device) for numbers in (repeats.keys(), repeats.values())
        )
        row[ids] -= params.frequency_penalty * counts + params.presence_penalty


def keep_likely(scores: Tensor, params: ResolvedParams) -> Tensor:
    """Set to -inf what min-p, then top-k, then top-p exclude; ties with a kept token are kept.

    Shapes: float32 [rows, vocab], unnormalized log-probabilities -> the same. At least the
    likeliest token of every row stays.
    """
    vocab = scores.shape[-1]
    if params.min_p > 0:
        bound = scores.amax(dim=-1, keepdim=True) + math.log(params.min_p)
        scores = scores.masked_fill(scores < bound, -math.inf)
    if 0 < params.top_k < vocab:
        bound = scores.topk(params.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < bound, -math.inf)
    if params.top_p < 1:
        probabilities = scores.softmax(dim=-1)
        bound = nucleus_bound(probabilities, params.top_p)
        scores = scores.masked_fill(probabilities < bound, -math.inf)
    return scores


def log_probabilities(logits: Tensor, chosen: Sequence[int], count: int) -> list[dict[int, float]]:
    """Return per row {token id: log p}: the chosen token first, then the `count` likeliest.

    p is the model's own distribution, softmax of the raw logits before any processor and before
    the temperature, as in vLLM. Shapes: logits float32 [rows, vocab], chosen [rows].
    """
    logs = logits.log_softmax(dim=-1)
    places = send_numbers(chosen, logits.device)[:, None]
    largest = logs.topk(min(count, logits.shape[-1]))
    own = logs.gather(-1, places)[:, 0].tolist()
    likeliest = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
    return [
        {token_id: value, **dict(zip(ids, values, strict=True))}
        for token_id, value, (ids, values) in zip(chosen, own, likeliest, strict=True)
    ]


def _require(finite: Sequence[bool], logits: Tensor, prefixes: Sequence[Prefix]) -> None:
    """Raise GenerationError unless the largest score of every row is finite."""
    if all(finite):
        return
    index = finite.index(False)
    place = f"sequence {prefixes[index].sequence}, position {prefixes[index].position}"
    if bool(logits[index].isnan().any()) or bool((logits[index] == math.inf).any()):
        raise GenerationError(f"the model's logits are not finite at {place}")
    raise GenerationError(f"no token is allowed at {place}; loosen logit_bias or min_new_tokens")
