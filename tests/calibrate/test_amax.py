"""Observers reduce the first and the last dimension, whatever comes in."""

from __future__ import annotations

import pytest
import torch

from quantkit.calibrate.amax import AmaxObserver, canonical_input, canonical_kv


def test_an_observer_starts_without_amax() -> None:
    observer = AmaxObserver()
    assert observer.amax is None
    assert observer.num_observations == 0


def test_amax_is_the_largest_magnitude_of_all_batches() -> None:
    observer = AmaxObserver()
    batches = [torch.randn(n, 3, 5) for n in (4, 1, 7)]
    for batch in batches:
        observer.update(batch)
    assert torch.equal(observer.amax, torch.cat(batches).abs().amax(dim=(0, 2)))
    assert observer.num_observations == 12


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_order_of_batches_does_not_matter(order: tuple[int, ...]) -> None:
    batches = torch.randn(3, 4, 1, 8)
    observer = AmaxObserver()
    for number in order:
        observer.update(batches[number])
    assert observer.amax == batches.abs().max()


def test_a_batch_without_observations_changes_nothing() -> None:
    observer = AmaxObserver()
    observer.update(torch.zeros(0, 1, 8))
    assert observer.amax is None
    observer.update(torch.ones(2, 1, 8))
    observer.update(torch.zeros(0, 1, 8))
    assert observer.amax == 1
    assert observer.num_observations == 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    observer = AmaxObserver()
    observer.update(torch.tensor([[[bad, 1.0]]]))
    observer.update(torch.ones(1, 1, 2))
    assert not observer.amax.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_amax_is_exact_float32_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(6, 1, 9).to(dtype)
    observer = AmaxObserver()
    observer.update(x)
    assert observer.amax.dtype == torch.float32
    assert observer.amax == x.float().abs().max()


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (1, 2, 5, 8)])
def test_an_input_has_one_scale_and_one_observation_per_token(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    canonical = canonical_input(x)
    assert canonical.shape == (x.numel() // 8, 1, 8)
    assert torch.equal(canonical.flatten(), x.flatten())


def test_keys_by_head_keep_heads_apart() -> None:
    states = torch.randn(2, 3, 5, 4)  # batch, heads, tokens, head_dim
    observer = AmaxObserver()
    observer.update(canonical_kv(states, per_head=True))
    assert torch.equal(observer.amax, states.abs().amax(dim=(0, 2, 3)))
    assert observer.num_observations == 10


def test_keys_with_one_scale_take_all_heads_together() -> None:
    states = torch.randn(2, 3, 5, 4)
    observer = AmaxObserver()
    observer.update(canonical_kv(states, per_head=False))
    assert observer.amax.shape == (1,)
    assert observer.amax == states.abs().max()
    assert observer.num_observations == 10
