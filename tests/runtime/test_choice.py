from __future__ import annotations

import math

import pytest
import torch

from quantkit.runtime.choice import NEAR, argmax, gumbel_argmax
from quantkit.runtime.noise import noise_key
from quantkit.sampling_ops import gumbel

KEYS = [noise_key(1, sequence, 0) for sequence in range(300)]


def weights(rows: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator) * scale
    return scores - scores.amax(-1, keepdim=True)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 20.0, 1e30])
@pytest.mark.parametrize("vocab", [1, 7, 3000])
def test_the_choice_is_the_argmax_with_all_noise(vocab: int, scale: float) -> None:
    scores = weights(len(KEYS), vocab, scale)
    expected = (gumbel(torch.tensor(KEYS), torch.arange(vocab)) + scores).argmax(-1)
    assert torch.equal(gumbel_argmax(scores, KEYS), expected)


def test_tokens_far_below_the_likeliest_win_as_often_as_they_should() -> None:
    # One token near, and very many just beyond NEAR that have a third of the mass together.
    far = 150_000
    scores = torch.full((len(KEYS), far + 1), -NEAR - 0.001)
    scores[:, 7] = 0.0
    share = far * math.exp(-NEAR - 0.001) / (1 + far * math.exp(-NEAR - 0.001))
    chosen = gumbel_argmax(scores, KEYS)
    expected = (gumbel(torch.tensor(KEYS[:20]), torch.arange(far + 1)) + scores[:20]).argmax(-1)
    assert torch.equal(chosen[:20], expected)
    wins = float((chosen != 7).float().mean())
    assert abs(wins - share) < 4 * math.sqrt(share * (1 - share) / len(KEYS))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_excluded_tokens_are_never_chosen(scale: float) -> None:
    scores = weights(len(KEYS), 400, scale)
    scores[:, 1::2] = -math.inf
    scores -= scores.amax(-1, keepdim=True)
    chosen = gumbel_argmax(scores, KEYS)
    assert bool((chosen % 2 == 0).all())
    expected = (gumbel(torch.tensor(KEYS), torch.arange(400)) + scores).argmax(-1)
    assert torch.equal(chosen, expected)


def test_argmax_is_the_first_of_equals_and_shows_nan() -> None:
    rows = torch.tensor([[0.0, 3.0, 3.0], [1.0, math.nan, 9.0], [-math.inf, -math.inf, -5.0]])
    assert argmax(rows).tolist() == [1, 1, 2]
