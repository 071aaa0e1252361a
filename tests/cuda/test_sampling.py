"""Choosing tokens on CUDA, run by the emulator, against torch.argmax and `runtime.noise`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.sampling_ops import gumbel, nucleus_bound
from tests.cuda import emulator
from tests.cuda.emulator import Library, Order

SOURCE = r"""
#include "sampling.cuh"

using namespace quantkit::cuda;

__global__ void noise(const int64_t* keys, const int64_t* tokens, double* out, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = gumbel_noise(keys[i], tokens[i]);
}

extern "C" void noise_(const int64_t* keys, const int64_t* tokens, double* out, int64_t count) {
  emulator::launch((count + 255) / 256, 256, 0, noise, keys, tokens, out, count);
}

extern "C" void choose(const float* scores, const int64_t* keys, Choice* choices, int64_t* tokens,
                       int64_t rows, int64_t columns) {
  const unsigned parts = choice_parts(columns);
  emulator::launch(rows * parts, kChoiceThreads, 0,
                   keys == nullptr ? choose_in_parts<false> : choose_in_parts<true>, scores, keys,
                   choices, columns, parts);
  emulator::launch(rows, kWarp, 0, choose_of_parts, choices, tokens, parts);
}
"""

PART = 32 * 256
NUCLEUS = r"""
extern "C" void bounds(const float* probabilities, float* out, int64_t rows, int64_t columns,
                       double top_p) {
  emulator::launch(rows, kNucleusThreads, 0, find_nucleus, probabilities, out, columns,
                   static_cast<uint64_t>(std::ceil(std::ldexp(top_p, kMassBits))));
}
"""


@pytest.fixture(scope="module")
def compiled() -> Library:
    return emulator.compile(SOURCE + NUCLEUS)


@pytest.fixture
def library(compiled: Library, order: Order) -> Library:
    compiled.order = order
    return compiled


def choose(library: Library, scores: Tensor, keys: Tensor | None = None) -> Tensor:
    rows, columns = scores.shape
    tokens = torch.full((rows,), -7)
    choices = torch.zeros(rows * -(-columns // PART), 2, dtype=torch.int64)
    library.choose(scores, keys, choices, tokens, rows, columns)
    return tokens


def random_keys(count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,))


def test_noise(compiled: Library) -> None:
    keys, tokens = random_keys(2000), torch.randint(0, 2**31, (2000,))
    noise = torch.zeros(2000, dtype=torch.float64)
    compiled.noise_(keys, tokens, noise, 2000)
    expected = torch.stack([gumbel(keys[i : i + 1], tokens[i : i + 1])[0, 0] for i in range(2000)])
    torch.testing.assert_close(noise, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("columns", [1, 31, 256, 1000, PART, PART + 1, 49152])
def test_choices(library: Library, columns: int) -> None:
    scores, keys = torch.randn(3, columns) * 3, random_keys(3)
    assert torch.equal(choose(library, scores), scores.argmax(-1))
    noisy = gumbel(keys, torch.arange(columns)) + scores
    assert torch.equal(choose(library, scores, keys), noisy.argmax(-1))


def test_equal_scores_go_to_the_lowest_token(library: Library) -> None:
    scores = torch.zeros(3, 3 * PART)
    scores[1, 5000:] = 1
    scores[2, [700, 20000]] = 2
    assert choose(library, scores).tolist() == [0, 5000, 700]


def test_excluded_tokens_and_nan(library: Library) -> None:
    scores = torch.full((4, PART + 100), -torch.inf)
    scores[0, PART + 50] = -1e30  # far below what noise bridges, but not excluded
    scores[2, [30, PART + 7]] = torch.nan
    scores[3, 40], scores[3, 41] = torch.inf, torch.nan
    keys = random_keys(4)
    for given in (None, keys):
        assert choose(library, scores, given).tolist() == [PART + 50, 0, 30, 41]


def bounds(library: Library, probabilities: Tensor, top_p: float) -> Tensor:
    found = torch.full((len(probabilities), 1), torch.nan)
    library.bounds(probabilities, found, *probabilities.shape, np.float64(top_p))
    return found


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return which tokens are in it: likelier ones have not reached the mass."""
    kept = torch.zeros(probabilities.shape, dtype=torch.bool)
    for row, inside in zip(probabilities.double(), kept, strict=True):
        for value in row.unique():
            inside[row == value] = bool(row[row > value].sum() < top_p)
    return kept


@pytest.mark.parametrize("columns", [1, 5, 2000])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.999999])
def test_the_nucleus_is_what_reaches_the_mass(
    compiled: Library, columns: int, top_p: float
) -> None:
    """Peaked rows and flat ones, with excluded tokens."""
    spread = torch.tensor([[0.0], [2.0], [40.0]])
    scores = torch.randn(3, columns) * spread
    scores[1:, : columns // 3] = -torch.inf
    probabilities = scores.softmax(-1)
    kept = probabilities >= bounds(compiled, probabilities, top_p)
    # Where all masses together do not reach it, every token is needed.
    assert torch.equal(kept, nucleus(probabilities, top_p))


def test_the_nucleus_of_equal_probabilities_is_all_of_them(library: Library) -> None:
    probabilities = torch.full((2, 8), 0.125)
    probabilities[1] = torch.tensor([0.25, 0.25, 0.25, 0.125, 0.125, 0, 0, 0])
    assert bounds(library, probabilities, 0.5).tolist() == [[0.125], [0.25]]
    assert bounds(library, probabilities, 0.75).tolist() == [[0.125], [0.25]]
    assert bounds(library, probabilities, 0.76).tolist() == [[0.125], [0.125]]


@pytest.mark.parametrize("columns", [4096, 4097])
def test_more_candidates_than_a_block_keeps(compiled: Library, columns: int) -> None:
    """All in one place, so that the row is read until few are left."""
    probabilities = torch.full((1, columns), 1 / columns)
    probabilities[0, :3] *= torch.tensor([1 + 2.0**-20, 1 + 2.0**-21, 1 - 2.0**-20])
    for top_p in (2.5 / columns, 0.5, 1 - 0.5 / columns):
        kept = probabilities >= bounds(compiled, probabilities, top_p)
        assert torch.equal(kept, nucleus(probabilities, top_p))


def test_the_bound_is_that_of_the_reference_kernel(compiled: Library) -> None:
    probabilities = (torch.randn(3, 2000) * 3).softmax(-1)
    for top_p in (0.3, 0.95):
        expected = nucleus_bound(probabilities, top_p)
        assert torch.equal(bounds(compiled, probabilities, top_p), expected)


def test_numbers_that_are_none_do_no_harm(compiled: Library) -> None:
    """A row of NaN is refused elsewhere; here it must not reach beyond its memory."""
    assert bounds(compiled, torch.full((1, 300), torch.nan), 0.9).tolist() == [[0.0]]
