from __future__ import annotations

import numpy as np
import pytest

from quantkit.evaluate.distribution import Distribution, PositionBin, tail

KL = np.array([-1e-12, 0.0, 1e-3, 1.1e-3, 0.5, 3.0, 1e9])
CONTEXT = np.array([1, 2, 3, 4, 7, 8, 9])


def test_every_token_is_in_one_bin() -> None:
    found = Distribution.of(KL, CONTEXT)
    assert sum(found.counts) == len(KL)
    assert len(found.edges) == len(found.counts) + 1
    assert found.edges[0] == pytest.approx(1e-8)
    assert found.edges[-1] == pytest.approx(1e2)
    assert (found.counts[0], found.counts[-1]) == (2, 1)
    place = next(i for i, edge in enumerate(found.edges) if edge > 0.5)
    assert found.counts[place - 1] == 1


def test_bins_of_positions_double_in_width() -> None:
    found = Distribution.of(KL, CONTEXT).by_position
    assert [(each.first, each.last, each.count) for each in found] == [
        (1, 1, 1), (2, 3, 2), (4, 7, 2), (8, 9, 2),
    ]  # fmt: skip
    assert found[0] == PositionBin(1, 1, 1, pytest.approx(-1e-12), None)
    assert found[2].mean_kl == pytest.approx((1.1e-3 + 0.5) / 2)
    assert found[2].standard_error == pytest.approx(np.std([1.1e-3, 0.5], ddof=1) / np.sqrt(2))
    total = sum(each.mean_kl * each.count for each in found)
    assert total == pytest.approx(KL.sum())


def test_the_tail_is_what_is_left() -> None:
    found = Distribution.of(np.array([0.01, 0.02, 0.4, 0.4]), np.ones(4, dtype=np.int64))
    kl, above = tail(found)
    assert above[0] == 1.0
    assert above == sorted(above, reverse=True)
    assert above[np.searchsorted(kl, 0.2)] == 0.5
    assert above[-1] == 0.5
    assert kl[-1] <= 0.4
