from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from quantkit.errors import QuantKitError
from quantkit.evaluate.report import make_task_table
from quantkit.evaluate.task_result import (
    Change,
    TaskResult,
    TaskScore,
    TaskSetting,
    task_scores,
)
from quantkit.evaluate.task_run import Outcome, Run, read_results

SETTING = TaskSetting("c", "r", ["t"], None, False, "quantkit, float32", "transformers", 0)


def outcome(*values: float) -> Outcome:
    return Outcome(float(np.mean(values)), 0.1, {("t", n): v for n, v in enumerate(values)})


def run(*values: float, better: bool | None = True) -> Run:
    return Run(
        {("t", "acc", "none"): outcome(*values)},
        {"t": (len(values), 9)},
        frozenset(),
        {"t": 5},
        {("t", "acc"): better},
    )


def result(before: tuple[float, ...], after: tuple[float, ...], **options: Any) -> TaskResult:
    max_drop = options.pop("max_drop", None)
    scores = task_scores(run(*after, **options), run(*before, **options))
    return TaskResult(SETTING, scores, frozenset({"t"}), max_drop)


def test_a_difference_is_paired_by_question() -> None:
    before, after = (1.0, 1.0, 0.0, 1.0), (1.0, 0.0, 1.0, 0.0)
    change = Change.between(outcome(*before), outcome(*after))
    assert change.difference == -0.25
    assert change.standard_error == pytest.approx(np.std([0, -1, 1, -1], ddof=1) / 2)
    assert (change.lost, change.won) == (2, 1)
    # The order in which questions were answered does not matter.
    shuffled = Outcome(0.5, 0.1, {("t", n): after[n] for n in (2, 0, 3, 1)})
    assert Change.between(outcome(*before), shuffled) == change


def test_equal_answers_are_a_certain_zero() -> None:
    same = outcome(1.0, 0.0, 1.0)
    assert Change.between(same, same) == Change(0.0, 0.0, 0, 0)


def test_numbers_other_than_right_and_wrong_have_no_counts() -> None:
    change = Change.between(outcome(0.2, 0.9), outcome(0.3, 0.7))
    assert (change.lost, change.won) == (None, None)
    assert change.standard_error == pytest.approx(np.std([0.1, -0.2], ddof=1) / math.sqrt(2))


def test_what_is_no_mean_has_a_difference_without_error() -> None:
    change = Change.between(Outcome(9.0, None, None), Outcome(10.0, None, None))
    assert change == Change(1.0, None, None, None)
    single = Change.between(outcome(1.0), outcome(0.0))
    assert (single.standard_error, single.lost) == (None, 1)


def test_other_questions_cannot_be_compared() -> None:
    with pytest.raises(QuantKitError, match="same questions"):
        Change.between(outcome(1.0, 0.0), outcome(1.0))


@pytest.mark.parametrize(
    ("better", "before", "after", "fails"),
    [
        (True, (1.0, 1.0), (1.0, 0.0), True),
        (True, (1.0, 0.0), (1.0, 1.0), False),
        (False, (1.0, 0.0), (1.0, 1.0), True),
        (None, (1.0, 0.0), (1.0, 1.0), True),
    ],
)
def test_the_gate_knows_which_way_is_worse(
    better: bool | None, before: tuple[float, ...], after: tuple[float, ...], fails: bool
) -> None:
    assert bool(result(before, after, better=better, max_drop=0.4).violations) == fails
    assert result(before, after, better=better, max_drop=0.5).violations == []
    assert result(before, after, better=better).violations == []


def test_the_gate_says_what_fell() -> None:
    (line,) = result((1.0, 1.0), (1.0, 0.0), max_drop=0.1).violations
    assert line == "acc of t is 0.5000, 0.5000 worse than the original's 1.0000; --max-drop is 0.1"
    ungated = TaskResult(SETTING, result((1.0,), (0.0,)).scores, frozenset({"other"}), 0.1)
    assert ungated.violations == []


def test_json_and_table_have_every_number() -> None:
    found = result((1.0, 1.0, 0.0), (1.0, 0.0, 1.0), max_drop=0.1)
    value = json.loads(json.dumps(found.to_json(), allow_nan=False))
    (score,) = value["scores"]
    assert (score["task"], score["metric"], score["questions"]) == ("t", "acc", 3)
    assert score["original"] == score["quantized"] == pytest.approx(2 / 3)
    assert (score["change"]["lost"], score["change"]["won"]) == (1, 1)
    assert (value["max_drop"], value["violations"]) == (0.1, [])
    cells = [next(iter(column.cells)) for column in make_task_table(found).columns]
    assert cells[:3] == ["t", "acc", "3 of 9"]
    assert cells[3] == cells[4] == "0.6667 ± 0.1000"
    assert cells[5:] == ["+0.0000 ± 0.5774", "1, 1"]


def test_without_an_original_there_is_no_difference() -> None:
    alone = TaskResult(SETTING, task_scores(run(1.0, 0.0), None), frozenset())
    assert [column.header for column in make_task_table(alone).columns] == [
        "task", "metric", "questions", "quantized",
    ]  # fmt: skip
    assert isinstance(alone.scores[0], TaskScore)
    assert alone.scores[0].change is None


HARNESS: dict[str, Any] = {
    "results": {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.5, "sample_len": 2}},
    "samples": {
        "t": [
            {"doc_id": n, "filter": "none", "acc": float(n), "resps": [[(-1.0, False)]]}
            for n in range(2)
        ]
    },
    "n-samples": {"t": {"original": 7, "effective": 2}},
    "n-shot": {"t": 0},
    "higher_is_better": {"t": {"acc": True}},
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**HARNESS, **changes}


def test_results_of_the_harness_are_taken_apart() -> None:
    found = read_results(HARNESS, "x")
    (key, one), *rest = found.outcomes.items()
    assert rest == []
    assert key == ("t", "acc", "none")
    assert (one.value, one.standard_error) == (0.5, 0.5)
    assert one.values == {("t", 0): 0.0, ("t", 1): 1.0}
    assert found.questions == {"t": (2, 7)}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (changed(results={"t": {"acc,none": math.nan}}), "acc of t on x is nan"),
        (changed(results={"t": {"acc,none": "N/A"}}), "acc of t on x is 'N/A'"),
        (changed(results={"t": {"alias": "t"}}), "t has no metric"),
        (
            changed(samples={"t": [{"doc_id": 4, "resps": [[(math.nan, True)]]}]}),
            "x gave a likelihood of nan for question 4 of t",
        ),
        (
            changed(samples={"t": [{"doc_id": 0, "resps": [[(-math.inf, True)]]}]}),
            "likelihood of -inf",
        ),
    ],
)
def test_what_was_not_measured_is_an_error(found: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantKitError, match=message):
        read_results(found, "x")


def test_a_metric_that_is_no_mean_has_no_paired_values() -> None:
    other = changed(results={"t": {"acc,none": 0.9, "acc_stderr,none": "N/A"}})
    (one,) = read_results(other, "x").outcomes.values()
    assert (one.standard_error, one.values) == (None, None)
