from __future__ import annotations

import pytest

from quantkit.ops import FEW_ROWS
from quantkit.speculative.step_costs import MOST_ROWS, ROUNDS, WIDTHS, StepCosts, measure_step
from tests.runtime.fake_engine import FakeEngine


def line(batch: int, rows: int) -> float:
    return 10.0 + batch + 0.5 * rows


def test_between_measured_rows_costs_are_interpolated_and_beyond_extended() -> None:
    costs = StepCosts(line)
    for rows in (1, 5, 16, 100):
        assert costs.seconds(1, rows) == pytest.approx(line(1, rows))
    assert costs.seconds(4, 9) == pytest.approx(line(4, 9))


def test_a_batch_uses_the_table_of_the_power_of_two_within() -> None:
    measured: list[int] = []

    def note(batch: int, rows: int) -> float:
        measured.append(batch)
        return line(batch, rows)

    costs = StepCosts(note)
    costs.seconds(6, 7)
    costs.seconds(5, 30)
    costs.seconds(4, 4)
    assert set(measured) == {4}
    before = len(measured)
    costs.prepare(8)
    assert set(measured[before:]) == {8}


def test_costs_never_fall_with_more_rows() -> None:
    costs = StepCosts(lambda batch, rows: 1.0 if rows != 2 else 5.0)
    assert costs.seconds(1, 16) == 5.0


def test_a_spell_of_other_work_does_not_make_some_rows_dear() -> None:
    calls: list[int] = []

    def measure(batch: int, rows: int) -> float:
        calls.append(rows)
        # Something else runs during the first round's later half and the second's first.
        return line(batch, rows) * (3 if 4 <= len(calls) <= 12 else 1)

    costs = StepCosts(measure)
    for rows in (1, 2, 4, 8, 16):
        assert costs.seconds(1, rows) == pytest.approx(line(1, rows))
    assert calls == ROUNDS * costs.measured_rows(1)


def test_a_step_in_the_costs_is_measured_on_both_sides() -> None:
    costs = StepCosts(lambda batch, rows: 1.0 if rows <= FEW_ROWS else 2.0)
    for batch in (2, 8):
        assert costs.seconds(batch, FEW_ROWS) == 1.0
        assert costs.seconds(batch, FEW_ROWS + 1) == 2.0
    assert max(costs.measured_rows(8)) <= MOST_ROWS
    assert len(costs.measured_rows(64)) >= 2
    assert costs.measured_rows(1) == sorted(WIDTHS)


def test_real_steps_correct_the_level_and_outliers_hardly() -> None:
    costs = StepCosts(line)
    for _ in range(100):
        costs.observe(2, 6, 3 * line(2, 6))
    assert costs.seconds(2, 2) == pytest.approx(3 * line(2, 2), rel=1e-3)
    assert costs.seconds(1, 1) == line(1, 1)
    costs.observe(2, 6, 1000 * line(2, 6))
    assert costs.seconds(2, 2) < 3.5 * line(2, 2)


def test_rows_are_dealt_out_to_the_sequences_and_rolled_back() -> None:
    engine = FakeEngine(max_context=8)
    assert measure_step(engine, 3, 7) > 0
    assert engine.calls[0] == ([0, 1, 2], [1, 1, 1])
    assert set(map(str, engine.calls[1:])) == {str(([0, 1, 2], [3, 2, 2]))}
    assert measure_step(engine, 1, 50) > 0  # beyond the context: as many as fit
    assert engine.calls[-1] == ([0], [7])


def test_nominal_costs_count_steps() -> None:
    costs = StepCosts.nominal()
    assert costs.seconds(1, 1) == costs.seconds(1, 9) == 1.0
    assert costs.seconds(4, 20) == 4.0
