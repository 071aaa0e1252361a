"""KV scales are chosen by the error of attention, and never to its harm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.calibrate.attention_probe import AttentionSample
from quantkit.calibrate.kv_search import (
    KvError,
    ScaleChoice,
    choose_scales,
    plain_scales,
    round_states,
)
from quantkit.numerics import E4M3, amax_to_scale
from tests import reference

HEADS, KV_HEADS, TOKENS, HEAD_DIM = 4, 2, 24, 8
SOFTMAX_SCALE = HEAD_DIM**-0.5


def attention_of(query: Tensor, window: int | None = None) -> AttentionSample:
    """Return a sample without keys and values, whose attention is causal, from these queries."""
    tokens = query.shape[1]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window is not None:
        mask = mask.triu(1 - window)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        group = query.shape[0] // keys.shape[0]
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=SOFTMAX_SCALE)

    return AttentionSample(torch.empty(0), torch.empty(0), attend)


def random_queries(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return 2 * torch.randn(HEADS, TOKENS, HEAD_DIM, generator=generator)


def random_sample(seed: int, kind: str = "normal", window: int | None = None) -> AttentionSample:
    """Return a sample of one sequence. Keys share a direction, as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, KV_HEADS, TOKENS, HEAD_DIM, generator=generator).unbind()
    keys = keys + 3 * torch.randn(KV_HEADS, 1, HEAD_DIM, generator=generator)
    if kind == "channels":
        keys[:, :, :2] += 200
    elif kind == "first token":
        keys[:, 0] *= 1e5
        values[:, 0] *= 1e4
    elif kind == "heads":
        keys[0] *= 1e4
        values[1] *= 1e-6
    return replace(attention_of(random_queries(seed), window), keys=keys, values=values)


def samples_of(kind: str, seed: int) -> list[AttentionSample]:
    return [random_sample(seed, kind), random_sample(seed + 100, kind)]


KINDS = ("normal", "channels", "first token", "heads")


def choose(measure: KvError) -> ScaleChoice:
    return choose_scales(measure, *measure.amaxes())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "head"])
def test_errors_are_those_of_attention_by_definition(per_head: bool, window: int | None) -> None:
    sample, queries = random_sample(3, "heads", window), random_queries(3)
    measure = KvError([sample], per_head)
    amaxes = measure.amaxes()
    scales = [amax_to_scale(amax, E4M3).double().numpy() for amax in amaxes]
    query, key, value = (
        x.transpose(0, 1).double().numpy() for x in (queries, sample.keys, sample.values)
    )
    by_head = reference.attention_errors(
        query, key, value, (scales[0], scales[1]), SOFTMAX_SCALE, window
    )
    expected = by_head.reshape(KV_HEADS, -1).sum(axis=1) if per_head else by_head.sum(keepdims=True)
    found = plain_scales(measure, *amaxes).error.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "head"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_is_never_worse_than_amax(kind: str, per_head: bool) -> None:
    for seed in range(6):
        measure = KvError(samples_of(kind, seed), per_head)
        choice = choose(measure)
        assert (choice.error <= choice.plain_error).all()
        keys, values = measure.states()
        again = measure(
            round_states(keys, choice.key_amax), round_states(values, choice.value_amax)
        )
        assert torch.equal(again, choice.error)
        assert torch.equal(choice.plain_error, plain_scales(measure, *measure.amaxes()).error)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_by_head_are_at_least_as_good_as_shared_ones(kind: str) -> None:
    for seed in range(6):
        samples = samples_of(kind, seed)
        shared, by_head = (choose(KvError(samples, per_head)) for per_head in (False, True))
        assert by_head.error.sum() <= shared.error.sum() * (1 + 1e-9)


def test_some_octave_fractions_are_better_than_amax() -> None:
    gains = []
    for seed in range(8):
        choice = choose(KvError(samples_of("normal", seed), per_head=False))
        gains.append(float(choice.error / choice.plain_error))
    assert np.mean(gains) < 0.95


def test_no_scale_saturates_without_need() -> None:
    for seed in range(8):
        for kind in ("normal", "channels"):
            measure = KvError(samples_of(kind, seed), per_head=False)
            choice = choose(measure)
            for chosen, amax in zip(
                (choice.key_amax, choice.value_amax), measure.amaxes(), strict=True
            ):
                assert amax <= chosen < 2 * amax


def first_token(attended: bool) -> AttentionSample:
    """Return a sample whose first key and value are massive, and seen by the queries or not."""
    sample = random_sample(1)
    keys, values = sample.keys.clone(), sample.values.clone()
    keys[:, :, 0], keys[:, 0, 0] = 0, 1e7
    values[:, 0] = 1e7
    query = random_queries(1)
    query[:, :, 0] = 1 if attended else -1  # a score in the millions
    query[:, 0, 0] = 0
    return replace(attention_of(query), keys=keys, values=values)


def test_a_massive_token_that_attention_avoids_does_not_set_the_scales() -> None:
    """Its key must only stay far away; at its own query it is all there is to see."""
    sample = first_token(attended=False)
    assert sample.attend is not None
    # The first query sees nothing but the massive value, which would be the whole error.
    full = sample.attend
    sample = replace(sample, attend=lambda keys, values: full(keys, values)[:, 1:])
    measure = KvError([sample], per_head=False)
    choice, amaxes = choose(measure), measure.amaxes()
    assert choice.error < 0.01 * choice.plain_error
    assert choice.key_amax < amaxes[0] / 100
    assert choice.value_amax < amaxes[1] / 100


def test_a_massive_token_that_attention_needs_keeps_its_scale() -> None:
    measure = KvError([first_token(attended=True)], per_head=False)
    choice, amaxes = choose(measure), measure.amaxes()
    assert choice.value_amax >= amaxes[1]


def test_values_that_the_sample_lacks_saturate_only_beyond_it() -> None:
    """Their price is unknown, so that none that is known may rise for it."""
    measure = KvError(samples_of("normal", 2), per_head=False)
    own = measure.amaxes()
    choice = choose_scales(measure, own[0] * 1e6, own[1] * 1e6)
    assert choice.error < 0.1 * choice.plain_error
    for chosen, amax in zip((choice.key_amax, choice.value_amax), own, strict=True):
        assert amax <= chosen < amax * 2**13  # within the range where E4M3 keeps its precision


@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "head"])
def test_ties_go_to_amax(per_head: bool) -> None:
    """Powers of two are exact at every power of two; zeros at any scale."""
    sample = random_sample(0)
    for keys, values in (
        (sample.keys.sign() * 448, sample.values.sign() * 7),
        (torch.zeros_like(sample.keys), torch.zeros_like(sample.values)),
    ):
        measure = KvError([replace(sample, keys=keys, values=values)], per_head)
        choice, amaxes = choose(measure), measure.amaxes()
        assert torch.equal(choice.key_amax, amaxes[0])
        assert torch.equal(choice.value_amax, amaxes[1])
        assert not choice.error.any()


def test_without_attention_keys_and_values_count_by_their_own_power() -> None:
    sample = replace(random_sample(0, "channels"), attend=None)
    measure = KvError([sample, random_sample(1, "channels")], per_head=False)
    assert not measure.of_output
    states = measure.states()
    rounded = [round_states(x, amax) for x, amax in zip(states, measure.amaxes(), strict=True)]
    expected = 0.0
    for exact, approximate in zip(states, rounded, strict=True):
        pairs = [(x.double(), y.double()) for x, y in zip(exact, approximate, strict=True)]
        noise = sum(float((x - y).square().sum()) for x, y in pairs)
        expected += noise / sum(float(x.square().sum()) for x, _ in pairs)
    assert measure(*rounded).item() == pytest.approx(expected, rel=1e-5)
    assert choose(measure).error <= choose(measure).plain_error
