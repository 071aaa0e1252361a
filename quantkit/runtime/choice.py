"""Choosing one token a row: the largest score, or the largest after adding Gumbel noise.

Adding the noise of `noise` to log-probabilities and taking the argmax is an exact draw (the
Gumbel-max trick).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quantkit.runtime.sending import send_numbers
from quantkit.sampling_ops import argmax_rows, sample_gumbel


def argmax(scores: Tensor) -> Tensor:
    """Return the first largest column of every row; the place of a NaN if there is one.

    Shapes: [rows, vocab] -> int64 [rows].
    """
    return argmax_rows(scores.contiguous())


def gumbel_argmax(scores: Tensor, keys: Sequence[int]) -> Tensor:
    """Return argmax(scores + noise) per row, the noise being that of the row's key.

    Shapes: scores float32 [rows, vocab], -inf where a token is excluded; one key a row -> int64
    [rows].
    """
    return sample_gumbel(scores.contiguous(), send_numbers(keys, scores.device))
