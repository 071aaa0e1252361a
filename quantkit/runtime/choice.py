"""Choosing one token a row: the largest score, or the largest after adding Gumbel noise.

Adding the noise of `noise` to log-probabilities and taking the argmax is an exact draw (the
Gumbel-max trick). On a CPU the same token is found without computing most of the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.runtime.noise import (
    Bits,
    bits_below,
    gumbel_of_bits,
    noise_bits,
    token_offsets,
)
from quantkit.sampling_ops import argmax_rows, sample_gumbel

NEAR = 12.0
"""Tokens this close to the likeliest (in nats) get their noise first; few others can then win."""


def argmax(scores: Tensor) -> Tensor:
    """Return the first largest column of every row; the place of a NaN if there is one.

    Shapes: [rows, vocab] -> int64 [rows].
    """
    if scores.device.type == "cpu":  # torch's own takes ten times as long as numpy's
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return argmax_rows(scores.contiguous())


def gumbel_argmax(scores: Tensor, keys: Sequence[int]) -> Tensor:
    """Return argmax(scores + noise) per row, the noise being that of the row's key.

    Shapes: scores float32 [rows, vocab], at most 0 with a 0 in every row, -inf where a token is
    excluded; one key a row -> int64 [rows].
    """
    if scores.device.type == "cpu":
        rows = zip(scores.numpy(), keys, strict=True)
        return torch.tensor([_noisy_argmax(row, key) for row, key in rows], dtype=torch.int64)
    return sample_gumbel(scores.contiguous(), torch.tensor(list(keys), device=scores.device))


def _noisy_argmax(row: NDArray[np.float32], key: int) -> int:
    """Return argmax(row + noise), row [vocab].

    The noise of likely tokens gives a value to beat. An unlikely token beats it only with noise so
    large that its bits show it, before two logarithms are taken.
    """
    offsets = _vocabulary_offsets(len(row))
    near = np.flatnonzero(row > -NEAR)
    best, value = _best(row, near, noise_bits(key, offsets[near]))
    allowed = np.count_nonzero(row > -np.inf)
    if allowed == len(near):
        return best
    others = slice(None) if allowed == len(row) else np.flatnonzero(row > -np.inf)
    ids, bits = _all_ids(len(row))[others], noise_bits(key, offsets[others])
    possible = bits >= np.uint64(bits_below(value + NEAR))
    far = possible & (row[others] <= -NEAR)
    if far.any():
        rival, rival_value = _best(row, ids[far], bits[far])
        if (rival_value, -rival) > (value, -best):
            return rival
    return best


def _best(row: NDArray[np.float32], token_ids: NDArray[np.intp], bits: Bits) -> tuple[int, float]:
    """Return the token with the largest noisy score, the first of equals, and that score."""
    scores = gumbel_of_bits(bits) + row[token_ids]
    place = int(scores.argmax())
    return int(token_ids[place]), float(scores[place])


@lru_cache(maxsize=4)
def _all_ids(size: int) -> NDArray[np.intp]:
    return np.arange(size)


@lru_cache(maxsize=4)
def _vocabulary_offsets(size: int) -> Bits:
    return token_offsets(_all_ids(size))
