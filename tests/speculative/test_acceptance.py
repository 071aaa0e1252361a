from __future__ import annotations

import random

import pytest

from quantkit.runtime.verification import Draft, Guess
from quantkit.speculative.acceptance import FIRST_PROSPECT, PLACES, Acceptance

SURE, UNSURE = Guess("s", "sure", 0.8), Guess("s", "unsure", 0.3)


def test_before_any_count_the_prior_holds() -> None:
    acceptance = Acceptance()
    assert acceptance.rate(SURE, 0) == 0.8
    assert acceptance.prospect("s", 2) == FIRST_PROSPECT
    assert acceptance.survivals([SURE, UNSURE]) == pytest.approx([0.8, 0.24])


def test_counts_take_over_and_kinds_are_apart() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(Draft([1, 2], [SURE, UNSURE]), 1, 2)
    assert acceptance.rate(SURE, 0) > 0.98
    assert acceptance.rate(UNSURE, 1) < 0.02
    assert acceptance.rate(Guess("t", "sure", 0.5), 0) == 0.5  # another source
    assert acceptance.prospect("s", 0) > 0.98
    assert acceptance.prospect("s", 1) < 0.05


def test_only_judged_tokens_are_counted() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.observe(Draft([1, 2, 3], [SURE, SURE, SURE]), 0, 1)
        acceptance.observe(Draft([1, 2, 3], [UNSURE, UNSURE, UNSURE]), 2, 2)
    assert acceptance.rate(SURE, 0) < 0.1
    assert acceptance.rate(UNSURE, 1) > 0.9
    assert acceptance._counts["s", "unsure"] == (100, 100)  # the sequence ended before the third


def test_a_place_never_reached_is_taken_for_the_others() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(Draft([1], [UNSURE]), 1, 1)
    assert acceptance.rate(UNSURE, 5) > 0.95
    assert acceptance.prospect("s", 5) > 0.95
    for _ in range(100):
        acceptance.observe(Draft([1, 2], [UNSURE, UNSURE]), 1, 2)
    assert acceptance.rate(UNSURE, 1) < 0.1
    assert 0.5 < acceptance.rate(UNSURE, 5) < 0.8


def test_far_places_are_counted_together() -> None:
    acceptance = Acceptance()
    tokens = list(range(PLACES + 5))
    acceptance.observe(Draft(tokens, [UNSURE] * len(tokens)), len(tokens), len(tokens))
    assert acceptance.rate(UNSURE, PLACES) == acceptance.rate(UNSURE, PLACES + 9) > 0.3


def test_estimates_are_calibrated_and_follow_a_change() -> None:
    acceptance, generator = Acceptance(), random.Random(0)
    for truth in (0.9, 0.2):
        for _ in range(1500):
            acceptance.observe(Draft([1], [SURE]), int(generator.random() < truth), 1)
        # At least 100 trials count: a standard error of at most 0.04.
        assert abs(acceptance.rate(SURE, 0) - truth) < 0.12


def test_a_source_that_promised_too_much_is_believed_less_in_all_kinds() -> None:
    boastful, modest = Acceptance(), Acceptance()
    for _ in range(5):
        boastful.observe(Draft([1], [SURE]), 0, 1)
        modest.observe(Draft([1], [UNSURE]), 1, 1)
    assert boastful.rate(UNSURE, 0) < 0.15
    assert modest.rate(SURE, 0) > 0.9
    assert modest.rate(Guess("s", "other", 0.2), 0) > 0.3


def test_the_texts_at_hand_count_more_than_all_before() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(Draft([1], [SURE]), 1, 1)
    acceptance.begin_texts()
    usual = acceptance.rate(SURE, 0)
    for _ in range(12):
        acceptance.observe(Draft([1], [SURE]), 0, 1)
    # 12 refused among 112, but the last 12.
    assert acceptance.rate(SURE, 0) < 0.5
    assert acceptance.prospect("s", 0) < 0.5
    assert acceptance.rate(Guess("t", "sure", 0.8), 0) == 0.8  # another source
    acceptance.begin_texts()
    assert 0.8 < acceptance.rate(SURE, 0) < usual
