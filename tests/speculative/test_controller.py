from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from quantkit.runtime.verification import Draft, Guess
from quantkit.speculative.acceptance import Acceptance
from quantkit.speculative.controller import (
    LOOK_INTERVAL,
    LOSS,
    PROBE_INTERVAL,
    REST_AFTER,
    STAKE,
    Controller,
)
from quantkit.speculative.step_costs import StepCosts

Cost = Callable[[int, int], float]


def controller(cost: Cost, coarse: bool = False, batch: int = 1) -> Controller:
    made = Controller(StepCosts(cost), Acceptance(), coarse, timed=False)
    made.begin_step(batch)
    return made


def row_cost(share: float) -> Cost:
    """A step takes 1, and `share` more for each row beyond one a sequence."""
    return lambda batch, rows: 1.0 + share * (rows - batch)


def draft(*rates: float) -> Draft:
    """A draft whose tokens are accepted with these probabilities, each its own kind."""
    guesses = [Guess("s", f"{place}:{rate}", rate) for place, rate in enumerate(rates)]
    return Draft(list(range(len(rates))), guesses)


def lengths(drafts: Sequence[Draft]) -> list[int]:
    return [len(one) for one in drafts]


def test_free_rows_are_all_used_and_dear_ones_not_at_all() -> None:
    assert lengths(controller(row_cost(0.0)).trim([draft(0.2, 0.2, 0.2)])) == [3]
    assert lengths(controller(row_cost(1.0)).trim([draft(0.99, 0.99)])) == [0]


def test_a_token_is_kept_as_long_as_its_survival_exceeds_its_cost() -> None:
    # Survivals 0.8, 0.64, 0.512, 0.41, ...; the rate is 1 token a step, so the threshold is 0.45.
    assert lengths(controller(row_cost(0.45)).trim([draft(*[0.8] * 8)])) == [3]


def test_the_batch_shares_its_rows_by_survival() -> None:
    shared = controller(row_cost(0.3 / 3), batch=3)
    # The rate is 3 tokens a step: a row has to bring 0.3.
    kept = shared.trim([draft(0.9, 0.9, 0.9), draft(0.5, 0.5), draft(0.1, 0.99)])
    assert lengths(kept) == [3, 1, 0]


def test_a_step_in_the_costs_is_crossed_only_for_enough_tokens() -> None:
    def stairs(batch: int, rows: int) -> float:
        return 1.0 if rows <= 2 else 2.0

    assert lengths(controller(stairs).trim([draft(0.9, 0.5, 0.5)])) == [1]
    assert lengths(controller(stairs).trim([draft(*[1.0] * 9)])) == [9]


@pytest.mark.parametrize("seed", range(20))
def test_the_count_is_the_best_of_all(seed: int) -> None:
    generator = random.Random(seed)
    steps = [generator.random() ** 4 for _ in range(20)]
    costs = list(itertools.accumulate(steps, initial=1.0))
    chosen = controller(lambda batch, rows: costs[min(rows, 16)])
    table = StepCosts(lambda batch, rows: costs[min(rows, 16)])
    rates = [generator.uniform(0.5, 1) for _ in range(15)]
    survivals = list(itertools.accumulate(rates, lambda a, b: a * b))
    gains = [
        sum(survivals[:n]) - (table.seconds(1, 1 + n) / table.seconds(1, 1) - 1) for n in range(16)
    ]
    assert lengths(chosen.trim([draft(*rates)])) == [gains.index(max(gains))]


def test_the_rate_raises_the_bar() -> None:
    fast = controller(row_cost(0.1))
    one = draft(0.3)
    assert lengths(fast.trim([one])) == [1]
    for _ in range(200):  # a text that is copied: 6 tokens in a step of 1.5
        fast.begin_step(1)
        fast.observe_step(6, 6, 0.0, 1.0)
    assert fast.rate == pytest.approx(4.0, rel=0.01)
    assert lengths(fast.trim([one])) == [0]


def test_the_rate_is_never_below_that_of_plain_decoding() -> None:
    slow = controller(row_cost(0.4))
    for _ in range(200):  # drafts of 5 that are always refused
        slow.begin_step(1)
        slow.observe_step(1, 6, 0.0, 1.0)
    assert slow.rate == 1.0


def test_only_measured_rows_are_used_when_each_has_to_be_prepared() -> None:
    coarse = controller(row_cost(0.01), coarse=True)
    assert lengths(coarse.trim([draft(*[0.9] * 6)])) == [3]  # 4 rows; the next are 8
    assert lengths(coarse.trim([draft(0.9)])) == [1]


def test_a_probe_comes_once_in_a_while_and_only_then() -> None:
    probing = controller(row_cost(1.0))
    kept = []
    for _ in range(2 * PROBE_INTERVAL + 2):
        probing.begin_step(1)
        kept.append(sum(lengths(probing.trim([draft(0.5, 0.5)]))))
    assert kept.count(1) == sum(kept) == 2


def test_a_probe_comes_however_short_the_texts_are() -> None:
    probing = controller(row_cost(1.0))
    kept = []
    for step in range(PROBE_INTERVAL + 1):
        if step % 10 == 0:
            probing.begin_texts()
        probing.begin_step(1)
        kept.append(sum(lengths(probing.trim([draft(0.5)]))))
    assert kept == [0] * PROBE_INTERVAL + [1]


def test_new_texts_are_looked_at_without_rest() -> None:
    idle = controller(row_cost(1.0), batch=2)
    for _ in range(REST_AFTER + 1):
        idle.begin_step(2)
        idle.trim([draft(0.5), draft(0.5)])
    assert idle.resting
    idle.begin_texts()
    assert not idle.resting


@pytest.mark.parametrize("batch", [1, 2])
def test_where_nothing_pays_in_a_batch_one_step_of_four_is_looked_at(batch: int) -> None:
    idle = controller(row_cost(1.0))
    drafts = [draft(0.5)] * batch
    looked = []
    for step in range(PROBE_INTERVAL):
        idle.begin_step(batch)
        if idle.resting:
            idle.rest()
        else:
            looked.append(step)
            assert sum(lengths(idle.trim(drafts))) == 0
    few = [*range(REST_AFTER), *range(REST_AFTER, PROBE_INTERVAL, LOOK_INTERVAL)]
    assert looked == (few if batch > 1 else [*range(PROBE_INTERVAL)])
    assert idle.probing
    assert not idle.resting
    assert sum(lengths(idle.trim(drafts))) == 1
    assert not idle.resting


def test_a_model_is_asked_while_its_next_token_is_worth_a_pass_and_a_row() -> None:
    judge = controller(row_cost(0.2))
    for _ in range(50):
        judge.acceptance.observe(draft(0.9, 0.9, 0.9), 2, 3)
    guesses = draft(0.9, 0.9, 0.9).guesses
    # A pass counts as a tenth of a step until one is measured; prospects are 1, 1 and 0.
    chances = [judge.chance(guess, place) for place, guess in enumerate(guesses)]
    assert judge.pays("s", 0, 1.0, 1)
    assert judge.pays("s", 1, chances[0], 1)
    assert not judge.pays("s", 2, chances[0] * chances[1], 1)


def test_a_pass_is_shared_by_the_drafts_in_it() -> None:
    judge = controller(row_cost(0.5))
    judge.observe_passes(2, 0.4)
    single = judge.pays("unknown", 0, 1.0, 1)
    assert judge.pays("unknown", 0, 1.0, 8) >= single


def test_a_pass_that_reads_what_was_missed_says_nothing_about_the_next() -> None:
    judge = Controller(StepCosts(row_cost(0.1)), Acceptance())
    judge.begin_step(1)
    judge.observe_passes(1, 50.0, steady=False)
    assert judge.pays("s", 0, 1.0, 1)
    judge.observe_passes(1, 50.0)
    assert not judge.pays("s", 0, 1.0, 1)


def test_prices_are_kept_for_a_step_and_follow_what_it_brought() -> None:
    judge = controller(row_cost(0.1))
    judge.begin_step(1)
    assert judge.pays("s", 1, 0.5, 1)
    for _ in range(200):  # 4 tokens per second: a row and a pass must bring 0.8
        judge.observe_step(6, 6, 0.0, 1.0)
    assert not judge.pays("s", 1, 0.5, 1)


def test_values_and_prospects_are_gains_in_tokens() -> None:
    judge = controller(row_cost(0.1))
    assert judge.value(draft(0.5, 0.5).guesses) == pytest.approx(0.5 - 0.1 + 0.25 - 0.1)
    assert judge.value(draft(0.05).guesses) == 0
    # A prospect of 0.6 each, a tenth of a step for a row and another for a pass.
    assert judge.prospect("s", 2, 1) == pytest.approx(0.6 - 0.2 + 0.36 - 0.2)
    assert judge.prospect("s", 0, 1) == 0


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_it_comes_close_to_the_best_fixed_length_and_never_below_plain(
    rate: float, share: float
) -> None:
    """Tokens accepted at random; the controller has to find the length out by itself."""
    generator = random.Random(1)
    adaptive = controller(row_cost(share))
    tokens = seconds = 0.0
    for step in range(1500):
        adaptive.begin_step(1)
        one = Draft([0] * 15, [Guess("s", 0, 0.5)] * 15)
        (kept,) = adaptive.trim([one])
        accepted = next((n for n in range(len(kept)) if generator.random() > rate), len(kept))
        adaptive.acceptance.observe(kept, accepted, min(accepted + 1, len(kept)))
        adaptive.observe_step(accepted + 1, 1 + len(kept), 0.0, 1.0)
        if step >= 300:
            tokens += accepted + 1
            seconds += 1 + share * len(kept)
    best = max((1 - rate ** (n + 1)) / (1 - rate) / (1 + share * n) for n in range(16))
    # The noise of 1200 steps is about 2 %.
    assert tokens / seconds > 0.94 * best
    assert tokens / seconds > 0.97


def test_what_uncertain_drafts_lose_on_a_text_is_bounded_whatever_is_expected() -> None:
    steps, each = 400, 0.8  # four rows of a draft
    judge = controller(row_cost(0.2))
    judge.begin_texts()
    seconds, drafted = 0.0, []
    for step in range(steps):
        judge.begin_step(1)
        (kept,) = judge.trim([draft(0.55, 0.95, 0.95, 0.95)])  # all refused, nothing is learned
        if kept.tokens:
            drafted.append(step)
        seconds += judge.costs.seconds(1, 1 + len(kept))
        judge.observe_step(1, 1 + len(kept), 0.0, 0.0)
    # What it may lose, and the draft that goes beyond it.
    assert seconds <= steps + STAKE + LOSS * steps + each
    assert drafted[-1] > 200  # it goes on trying, now and then
    assert len(drafted) == pytest.approx((STAKE + LOSS * steps) / each, abs=2)
    assert lengths(judge.trim([draft(*[0.99] * 4)])) == [4]  # nearly certain
    judge.begin_texts()
    assert lengths(judge.trim([draft(0.55, 0.95, 0.95, 0.95)])) == [4]


def test_who_has_won_may_lose_again() -> None:
    judge = controller(row_cost(0.2))
    judge.begin_texts()
    for _ in range(10):
        judge.begin_step(1)
        judge.observe_step(5, 5, 0.0, 0.0)  # four tokens more, for 0.8 steps
    for _ in range(30):
        judge.begin_step(1)
        assert judge.affordable
        judge.observe_step(1, 5, 0.0, 0.0)
    for _ in range(30):
        judge.observe_step(1, 5, 0.0, 0.0)
    assert not judge.affordable
    assert not judge.pays("s", 1, 0.5, 1)
