"""Second moments: against float64, on numbers of which every product and sum is exact."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import UnsupportedError
from quantkit.extension import EXTENSION_LOADED
from quantkit.moment_ops import gram

REJECTED = (UnsupportedError, RuntimeError)


def whole_numbers(tokens: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + columns)
    return torch.randint(-9, 10, (tokens, columns), generator=generator).bfloat16()


# Odd numbers of tokens, more than are summed in one run, columns that fill no vector or tile.
@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 48), (3, 5), (513, 100), (301, 47), (256, 96), (40, 577)], ids=str
)
def test_whole_numbers_are_summed_exactly(shape: tuple[int, int]) -> None:
    rows = whole_numbers(*shape)
    found = gram(rows)
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), rows.double().t() @ rows.double())


def test_sums_are_as_good_as_float32_allows_and_symmetric_to_the_bit() -> None:
    rows = torch.randn(3000, 130, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = rows.double()
    found = gram(rows)
    # Sums of a few hundred roundings of 2**-24 each, which rarely point one way.
    bound = 2**-20 * (wide.abs().t() @ wide.abs())
    assert bool(((found.double() - wide.t() @ wide).abs() <= bound).all())
    assert torch.equal(found, found.t())


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's own sums depend on it")
def test_the_number_of_threads_changes_nothing() -> None:
    rows = torch.randn(700, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gram(rows)
        torch.set_num_threads(3)
        assert torch.equal(gram(rows), one)
    finally:
        torch.set_num_threads(before)


def test_a_value_that_is_not_finite_spoils_its_row_and_column_only() -> None:
    rows = torch.ones(5, 60).bfloat16()
    rows[3, 50] = torch.nan
    spoilt = torch.zeros(60, 60, dtype=torch.bool)
    spoilt[50], spoilt[:, 50] = True, True
    assert torch.equal(gram(rows).isnan(), spoilt)


def test_nothing_to_sum_gives_zeros() -> None:
    assert torch.equal(gram(torch.empty(0, 3).bfloat16()), torch.zeros(3, 3))
    assert gram(torch.empty(3, 0).bfloat16()).shape == (0, 0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(REJECTED, match="gram: rows must be bfloat16, got float32"):
        torch.ops.quantkit.gram(torch.ones(2, 3))
    with pytest.raises(REJECTED, match=r"gram: rows must be .*\[tokens, K\]"):
        torch.ops.quantkit.gram(torch.ones(3).bfloat16())
    with pytest.raises(REJECTED, match="gram: rows must be contiguous"):
        torch.ops.quantkit.gram(torch.ones(2, 3).bfloat16().t())


def test_the_fake_kernel_agrees_with_real_ones() -> None:
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    rows = torch.randn(4, 6).bfloat16()
    torch.library.opcheck(torch.ops.quantkit.gram.default, (rows,), test_utils=checks)
