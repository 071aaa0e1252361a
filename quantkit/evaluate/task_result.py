"""What tasks found: both models side by side, the difference paired by question, the verdict.

Both models answered the same questions, so the standard error of the difference comes from the
questions' own differences; it is far smaller than that of either score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quantkit.errors import QuantKitError
from quantkit.evaluate.task_run import Outcome, Run, SampleKey


@dataclass(frozen=True, slots=True)
class Change:
    """Quantized less original.

    `lost` and `won` count questions that one answered right and the other wrong; None where a
    question has no right and wrong. `standard_error` is None where the metric is no mean.
    """

    difference: float
    standard_error: float | None
    lost: int | None
    won: int | None

    @classmethod
    def between(cls, original: Outcome, quantized: Outcome) -> Change:
        """Compare two outcomes of one metric."""
        difference = quantized.value - original.value
        pairs = _pairs(original.values, quantized.values)
        if pairs is None:
            return cls(difference, None, None, None)
        before, after = pairs
        changes = after - before
        error = None
        if len(changes) > 1:
            error = float(changes.std(ddof=1) / np.sqrt(len(changes)))
        lost = won = None
        if np.isin(pairs, (0.0, 1.0)).all():
            lost, won = int((changes < 0).sum()), int((changes > 0).sum())
        return cls(difference, error, lost, won)


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One metric of one task or group. Without an original there is no change."""

    task: str
    metric: str
    filter: str
    num_fewshot: int | None
    questions: int
    available: int
    higher_is_better: bool | None
    quantized: float
    quantized_standard_error: float | None
    original: float | None = None
    original_standard_error: float | None = None
    change: Change | None = None

    @property
    def drop(self) -> float:
        """By how much the quantized model is worse; where neither side is better, the distance."""
        difference = 0.0 if self.change is None else self.change.difference
        if self.higher_is_better is None:
            return abs(difference)
        return -difference if self.higher_is_better else difference


@dataclass(frozen=True, slots=True)
class TaskSetting:
    """What was measured, and how."""

    checkpoint: str
    reference: str | None
    tasks: list[str]
    limit: int | None
    chat_template: bool
    quantized_by: str
    original_by: str | None
    truncated: int | None  # prompts cut to the context; None: a server does not say

    def __str__(self) -> str:
        """Return the line that belongs beside the numbers."""
        sides = f"quantized: {self.quantized_by}"
        if self.original_by is not None:
            sides += f"; original: {self.original_by}"
        chat = "chat template applied" if self.chat_template else "no chat template"
        return f"{sides}; {chat}"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """All of it. `gated` are the names that a threshold looks at: what was asked for."""

    setting: TaskSetting
    scores: list[TaskScore]
    gated: frozenset[str]
    max_drop: float | None = None

    @property
    def violations(self) -> list[str]:
        """One line for each score that fell too far."""
        if self.max_drop is None:
            return []
        return [
            f"{score.metric} of {score.task} is {score.quantized:.4f}, {score.drop:.4f} worse than "
            f"the original's {score.original:.4f}; --max-drop is {self.max_drop:g}"
            for score in self.scores
            # Scores are means of decimals: 0.75 - 0.70 is a little more than 0.05.
            if score.task in self.gated and not score.drop <= self.max_drop + 1e-9
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything, JSON-ready."""
        return {
            **asdict(self.setting),
            "scores": [asdict(score) for score in self.scores],
            "max_drop": self.max_drop,
            "violations": self.violations,
        }


def task_scores(quantized: Run, original: Run | None) -> list[TaskScore]:
    """Put two runs of the same tasks side by side, groups before single tasks."""
    scores = [
        _score(key, outcome, quantized, original) for key, outcome in quantized.outcomes.items()
    ]
    return sorted(scores, key=lambda score: score.task not in quantized.groups)


def _score(
    key: tuple[str, str, str], outcome: Outcome, quantized: Run, original: Run | None
) -> TaskScore:
    task, metric, kind = key
    before = None
    if original is not None:
        if key not in original.outcomes:
            raise QuantKitError(f"the original has no {metric} of {task} to compare with")
        before = original.outcomes[key]
    return TaskScore(
        task,
        metric,
        kind,
        quantized.num_fewshot.get(task),
        *quantized.questions[task],
        quantized.higher_is_better.get((task, metric)),
        outcome.value,
        outcome.standard_error,
        None if before is None else before.value,
        None if before is None else before.standard_error,
        None if before is None else Change.between(before, outcome),
    )


def _pairs(
    before: Mapping[SampleKey, float] | None, after: Mapping[SampleKey, float] | None
) -> Any | None:
    """Return both models' numbers by question, float64 [2, questions]."""
    if before is None or after is None:
        return None
    if before.keys() != after.keys():
        raise QuantKitError("the two models did not answer the same questions")
    keys: Sequence[SampleKey] = list(before)
    return np.array([[before[key] for key in keys], [after[key] for key in keys]])
