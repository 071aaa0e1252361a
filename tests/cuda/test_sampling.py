"""Choosing tokens on CUDA, run by the emulator, against torch.argmax and `runtime.noise`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.sampling_ops import gumbel
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


@pytest.fixture(scope="module")
def compiled() -> Library:
    return emulator.compile(SOURCE)


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
