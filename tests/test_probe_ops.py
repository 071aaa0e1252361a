"""Reading memory reads all of it: the sum is right at every edge, in any number of threads."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.probe_ops import read_memory


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 128 * 1024 - 1, 128 * 1024 + 9, 1_000_003])
def test_the_sum_is_that_of_all_words(count: int) -> None:
    words = torch.randint(-(2**62), 2**62, (count,))
    assert read_memory(words).tolist() == [int(words.sum())]


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch sums anything")
def test_other_dtypes_are_refused() -> None:
    with pytest.raises((UnsupportedError, RuntimeError), match="x must be int64, got float32"):
        read_memory(torch.zeros(3))
