"""Distributions: what verification lets through must be drawn exactly from the target's law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.sampling import log_weights
from quantkit.runtime.verification import Draft, Verifier, verify_coupled
from quantkit.speculative.drawing import Draw, draw_coupled, draw_independent
from quantkit.speculative.rejection import (
    ACCEPTS,
    Purpose,
    accept_block,
    accept_standard,
    rejection_verifier,
    round_key,
)
from tests.speculative import toy

Method = tuple[Callable[[ResolvedParams], Draw], Verifier]
METHODS: dict[str, Method] = {
    "coupled": (draw_coupled, verify_coupled),
    "rejection": (draw_independent, rejection_verifier(accept_standard)),
    "block": (draw_independent, rejection_verifier(accept_block)),
    "one-hot": (draw_coupled, rejection_verifier(accept_standard)),
    "one-hot-block": (draw_coupled, rejection_verifier(accept_block)),
}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
LIMIT = 6.0
"""Standard deviations of chi-square: one run in 10**9 would exceed it."""


def accept_and_resample_from_the_target(
    target: Tensor, tokens: Sequence[int], laws: Tensor, uniforms: Sequence[float]
) -> tuple[int, Tensor]:
    """Wrong: a refused token is replaced by one of p instead of max(p - q, 0)."""
    count, _ = accept_standard(target, tokens, laws, uniforms)
    return count, target[count]


def draw_reporting_the_untruncated_law(params: ResolvedParams) -> Draw:
    """Wrong: tokens are drawn from the two likeliest, and said to be drawn from all."""
    narrow = draw_independent(replace(params, top_k=2))

    def draw(logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]):  # type: ignore[no-untyped-def] # noqa: ANN202
        drawn = narrow(logits, requests, drafted)
        prefixes = [r.prefix(tokens) for r, tokens in zip(requests, drafted, strict=True)]
        laws = log_weights(logits, prefixes, params).double().softmax(-1)
        return replace(drawn, laws=laws)

    return draw


WRONG: dict[str, Method] = {
    "resampled from the target": (
        draw_independent,
        rejection_verifier(accept_and_resample_from_the_target),
    ),
    "law of another draw": (
        draw_reporting_the_untruncated_law,
        rejection_verifier(accept_standard),
    ),
}


def score(method: Method, count: int, length: int, resolved: ResolvedParams) -> float:
    target, drafter = toy.table(3, seed=1), toy.table(3, seed=2)
    draw, verify = method[0](resolved), method[1]
    samples, _ = toy.simulate(target, drafter, draw, verify, resolved, count, length)
    return toy.chi_square_score(samples, toy.exact(target, resolved), 3)


@EVERY_METHOD
@pytest.mark.parametrize("length", [1, 3])
def test_sequences_have_the_exact_distribution(method: str, length: int) -> None:
    assert abs(score(METHODS[method], 2500, length, toy.params())) < LIMIT


@pytest.mark.parametrize("mistake", WRONG)
def test_the_test_of_distributions_catches(mistake: str) -> None:
    assert score(WRONG[mistake], 5000, 3, toy.params()) > 2 * LIMIT


def test_coupled_sequences_are_those_of_plain_sampling() -> None:
    target, drafter = toy.table(8, seed=1), toy.table(8, seed=2)
    resolved = toy.params(temperature=0.8, top_k=6, frequency_penalty=0.3)
    draw = draw_coupled(resolved)
    plain, _ = toy.simulate(target, drafter, draw, verify_coupled, resolved, 500, 0)
    for length in (1, 4):
        drafted, accepted = toy.simulate(
            target, drafter, draw, verify_coupled, resolved, 500, length
        )
        assert torch.equal(drafted, plain)
        assert accepted > 0.2


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_b40_filters_apply_to_both_sides_and_the_law_is_the_targets(method: str) -> None:
    # Total variation of 6000 sequences has a noise of about 0.010 (a position), 0.025 (a pair).
    target, drafter = toy.table(8, seed=3), toy.table(8, seed=4)
    drafter[:, 5] = -math.inf  # a token that the target can take and the draft cannot
    resolved = toy.params(temperature=0.7, top_p=0.9, top_k=5)
    draw, verify = METHODS[method][0](resolved), METHODS[method][1]
    samples = torch.cat(
        [
            toy.simulate(target, drafter, draw, verify, resolved, 1500, length, 1500 * length)[0]
            for length in (1, 2, 3, 4)
        ]
    )
    moves = torch.stack([toy.law(row, resolved) for row in target])
    expected = moves[0]
    for position in range(toy.LENGTH):
        seen = torch.bincount(samples[:, position], minlength=8) / len(samples)
        assert float((seen - expected).abs().sum()) / 2 < 0.02
        expected = expected @ moves
    pairs = torch.bincount(samples[:, 0] * 8 + samples[:, 1], minlength=64) / len(samples)
    assert float((pairs - (moves[0][:, None] * moves).flatten()).abs().sum()) / 2 < 0.04


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_b40_a_draft_with_the_targets_law_is_always_accepted(method: str) -> None:
    target = toy.table(8, seed=3)
    resolved = toy.params(temperature=0.7, top_p=0.9)
    draw, verify = METHODS[method][0](resolved), METHODS[method][1]
    _, accepted = toy.simulate(target, target, draw, verify, resolved, 200, 4)
    assert accepted == 4


@EVERY_METHOD
def test_b40_disjoint_laws_accept_nothing_and_stay_exact(method: str) -> None:
    target, drafter = toy.table(6, seed=3), toy.table(6, seed=4)
    target[:, 3:], drafter[:, :3] = -math.inf, -math.inf
    resolved = toy.params()
    draw, verify = METHODS[method][0](resolved), METHODS[method][1]
    samples, accepted = toy.simulate(target, drafter, draw, verify, resolved, 1500, 2)
    assert accepted == 0
    assert abs(toy.chi_square_score(samples, toy.exact(target, resolved), 6)) < LIMIT


@EVERY_METHOD
def test_b40_greedy_uses_no_noise_and_a_seed_repeats(method: str) -> None:
    target, drafter = toy.table(8, seed=3), toy.table(8, seed=4)

    def run(**values: float) -> Tensor:
        resolved = toy.params(**values)
        draw, verify = METHODS[method][0](resolved), METHODS[method][1]
        return toy.simulate(target, drafter, draw, verify, resolved, 40, 3)[0]

    greedy = run(temperature=0)
    assert torch.equal(greedy, run(temperature=0, seed=99))
    following = target.argmax(-1)
    assert greedy[0].tolist() == [
        following[0],
        following[following[0]],
        following[following[following[0]]],
    ]
    assert torch.equal(run(seed=1), run(seed=1))
    assert not torch.equal(run(seed=1), run(seed=2))


def test_block_verification_accepts_at_least_as_much() -> None:
    target, drafter = toy.table(8, seed=3), toy.table(8, seed=4)
    resolved = toy.params()
    accepted = {
        name: toy.simulate(
            target,
            drafter,
            METHODS[name][0](resolved),
            METHODS[name][1],
            resolved,
            1000,
            4,
        )[1]
        for name in ("coupled", "rejection", "block")
    }
    # The standard error of a mean is 0.02.
    assert accepted["coupled"] < accepted["rejection"] < accepted["block"]


@pytest.mark.parametrize("accept", ACCEPTS.values())
def test_a_law_that_is_never_wrong_leaves_no_nan(accept: Callable[..., tuple[int, Tensor]]) -> None:
    certain = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    for tokens in ([1, 0], [1, 1], [0, 0]):
        for u in (1e-9, 0.5, 1 - 1e-9):
            count, weights = accept(certain, tokens, certain[:2], [u, u])
            assert bool(weights.isfinite().all())
            assert float(weights.sum()) > 0
            assert count == 2 or tokens != [1, 0]


def test_noise_of_a_round_is_its_own() -> None:
    resolved = toy.params()
    (request,) = toy.requests(1, resolved)
    keys = {
        round_key(resolved, request, index, purpose) for index in range(5) for purpose in Purpose
    }
    request.ids.append(1)
    keys |= {
        round_key(resolved, request, index, purpose) for index in range(5) for purpose in Purpose
    }
    assert len(keys) == 30


def test_an_empty_draft_is_a_plain_draw() -> None:
    resolved = toy.params(top_k=1)
    (request,) = toy.requests(1, resolved)
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    for accept in ACCEPTS.values():
        verify = rejection_verifier(accept)
        assert verify(logits, [request], [Draft()], resolved) == [[1]]
