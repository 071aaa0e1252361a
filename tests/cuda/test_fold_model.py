"""A model in numpy of how attention's partial results over chunks of keys become one.

The kernel itself runs on the emulator (test_attention.py); this is its algebra, alone: a chunk
leaves its largest score r, the sum t of 2^(score - r), and the sum o of 2^(score - r) * value; two
chunks fold to R = max(r, r'), t 2^(r - R) + t' 2^(r' - R), and o alike; the result is o / t.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Partial = tuple[np.float32, np.float32, Float32]
UNIT = 2.0**-24  # of float32
NO_SCORE = np.float32(-3.0e38)  # finite, so that no difference is NaN


def chunk(scores: Float32, values: Float32) -> Partial:
    """Return r, t and o of one chunk. Shapes: scores [keys], values [keys, dim]."""
    reference = scores.max()
    weights = np.exp2(scores - reference)
    return reference, weights.sum(dtype=np.float32), (weights[:, None] * values).sum(axis=0)


def fold(left: Partial, right: Partial) -> Partial:
    """Return both together; the order counts for roundings alone."""
    reference = max(left[0], right[0])
    before, after = np.exp2(left[0] - reference), np.exp2(right[0] - reference)
    total = np.float32(left[1] * before + right[1] * after)
    return reference, total, left[2] * before + right[2] * after


def split(scores: Float32, values: Float32, size: int) -> Float32:
    """Attend in chunks of `size` keys, folded in ascending order."""
    folded: Partial = (NO_SCORE, np.float32(0), np.zeros(values.shape[1], dtype=np.float32))
    for at in range(0, len(scores), size):
        folded = fold(folded, chunk(scores[at : at + size], values[at : at + size]))
    result: Float32 = folded[2] / folded[1]
    return result


def exact(scores: Float32, values: Float32) -> NDArray[np.float64]:
    weights = np.exp2(scores.astype(np.float64) - scores.max())
    result: NDArray[np.float64] = weights @ values.astype(np.float64) / weights.sum()
    return result


@given(
    st.integers(1, 70),
    st.integers(1, 20),
    st.sampled_from([0.1, 3.0, 60.0, 1e4]),
    st.integers(0, 2**32 - 1),
)
def test_chunks_give_what_all_keys_together_give(
    keys: int, size: int, spread: float, seed: int
) -> None:
    made = np.random.default_rng(seed)
    scores = (made.standard_normal(keys) * spread).astype(np.float32)
    values = made.standard_normal((keys, 3)).astype(np.float32)
    error = np.abs(split(scores, values, size) - exact(scores, values))
    # Roundings: a sum of n weights, its factors and their difference in the exponent (whose own
    # rounding is a relative error of the weight: UNIT * |score|), a fold a chunk, the division.
    steps = 2 * keys + 4 * (keys // size + 1) + 8 + 2 * np.abs(scores).max()
    weights = np.exp2(scores.astype(np.float64) - scores.max())
    size_of = weights @ np.abs(values) / weights.sum()
    assert (error <= steps * UNIT * size_of).all()


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_score_may_come_first_or_last(order: int) -> None:
    """Where every later chunk is nothing beside the first, and the other way round."""
    scores = np.linspace(200, -200, 40, dtype=np.float32)[::order]
    values = np.arange(120, dtype=np.float32).reshape(40, 3)
    best = values[scores.argmax()]
    np.testing.assert_allclose(split(scores, values, 7), exact(scores, values), rtol=1e-5)
    np.testing.assert_allclose(split(scores, values, 7), best, atol=0.1 + 3 * 2.0**-10)


def test_a_chunk_folded_into_nothing_keeps_its_bits() -> None:
    """A row of one chunk has the same bits with and without the folding kernel."""
    made = np.random.default_rng(0)
    scores, values = made.standard_normal(9), made.standard_normal((9, 3))
    alone = chunk(scores.astype(np.float32), values.astype(np.float32))
    nothing: Partial = (NO_SCORE, np.float32(0), np.zeros(3, dtype=np.float32))
    reference, total, out = fold(nothing, alone)
    assert (reference, total) == alone[:2]
    assert (out == alone[2]).all()
