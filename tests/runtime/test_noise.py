from __future__ import annotations

import math

import pytest
import torch

from quantkit.runtime.noise import noise_key, uniform
from quantkit.sampling_ops import gumbel

MASK = (1 << 64) - 1


def noise_keys(seed: int, places: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([noise_key(seed, sequence, position) for sequence, position in places])


def splitmix64(state: int) -> int:
    """The published generator in plain integers: one output for one state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_noise_is_the_splitmix64_stream_of_the_key() -> None:
    key = noise_key(seed=5, sequence=2, position=11)
    noise = gumbel(torch.tensor([key]), torch.arange(100))[0]
    for token in range(100):
        bits = splitmix64((key + token * 0x9E3779B97F4A7C15) & MASK)
        uniform = ((bits >> 12) + 0.5) * 2.0**-52
        assert math.isclose(float(noise[token]), -math.log(-math.log(uniform)), rel_tol=1e-12)


def test_the_key_chains_splitmix64_over_seed_sequence_and_position() -> None:
    expected = splitmix64(splitmix64(splitmix64(7) ^ 3) ^ 12)
    assert noise_key(7, 3, 12) & MASK == expected
    assert noise_key(7 + 2**64, 3, 12) == noise_key(7, 3, 12)
    assert (
        len({noise_key(s, q, p) for s in range(-5, 5) for q in range(9) for p in range(9)}) == 810
    )


def test_noise_does_not_depend_on_what_else_is_computed() -> None:
    places = [(0, 4), (1, 4), (2, 9)]
    keys = noise_keys(3, places)
    together = gumbel(keys, torch.arange(1000))
    for row in range(3):
        assert torch.equal(together[row], gumbel(keys[row : row + 1], torch.arange(1000))[0])
    some = torch.tensor([5, 999, 17])
    assert torch.equal(together[:, some], gumbel(keys, some))


def test_noise_is_finite_and_gumbel_distributed() -> None:
    places = [(sequence, position) for sequence in range(20) for position in range(20)]
    noise = gumbel(noise_keys(1, places), torch.arange(500)).sort(-1).values
    assert bool(noise.isfinite().all())
    flat = noise.flatten()
    # 200 000 draws: standard errors are 0.0029 (mean) and 0.0094 (variance); five of each.
    assert abs(float(flat.mean()) - 0.5772) < 0.0145
    assert abs(float(flat.var()) - math.pi**2 / 6) < 0.047


def test_neighbouring_seeds_sequences_positions_and_tokens_are_uncorrelated() -> None:
    tokens = torch.arange(50_000)
    base = noise_key(1, 0, 0)
    for other in (noise_key(2, 0, 0), noise_key(1, 1, 0), noise_key(1, 0, 1)):
        pair = gumbel(torch.tensor([base, other]), tokens)
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(50_000)
    row = gumbel(torch.tensor([base]), tokens)[0]
    shifted = torch.stack([row[:-1], row[1:]])
    assert abs(float(torch.corrcoef(shifted)[0, 1])) < 5 / math.sqrt(50_000)


def test_uniforms_are_the_noise_of_token_0_and_purposes_differ() -> None:
    keys = [noise_key(1, 0, position, purpose) for position in range(200) for purpose in range(5)]
    numbers = [uniform(key) for key in keys]
    noise = gumbel(torch.tensor(keys), torch.tensor([0]))[:, 0]
    assert noise.tolist() == pytest.approx([-math.log(-math.log(u)) for u in numbers])
    assert len(set(keys)) == 1000
    # The mean of 1000 uniforms has a standard error of 0.0091.
    assert abs(sum(numbers) / 1000 - 0.5) < 0.04
