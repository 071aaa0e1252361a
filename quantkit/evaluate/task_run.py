"""One model through all tasks: the harness runs, and what it found is checked to be measured.

The harness's own output is kept off stdout, and off stderr too unless that is a terminal.
"""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from quantkit.errors import QuantKitError
from quantkit.evaluate.tasks import HARNESS_SEED, Tasks

BOOTSTRAP = 1000
"""Resamples for the standard error of what is no mean."""

SampleKey = tuple[str, int]
"""A task and the number of a question in it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One metric of one task, or of a group of tasks.

    `values` has every question's own number where the metric is their mean.
    """

    value: float
    standard_error: float | None
    values: Mapping[SampleKey, float] | None


@dataclass(frozen=True, slots=True)
class Run:
    """Everything one model scored, by (task or group, metric, filter)."""

    outcomes: Mapping[tuple[str, str, str], Outcome]
    questions: Mapping[str, tuple[int, int]]  # task or group -> asked, out of
    groups: frozenset[str]
    num_fewshot: Mapping[str, int]
    higher_is_better: Mapping[tuple[str, str], bool | None]


def run_tasks(
    lm: Any,
    label: str,
    tasks: Tasks,
    limit: int | None = None,
    chat: bool = False,
    seed: int | None = None,
) -> Run:
    """Put the tasks to a model; `label` names it in messages.

    Raises QuantKitError if anything failed on the way, or if a result is not a finite number.
    """
    random.seed(0 if seed is None else seed)
    np.random.seed(HARNESS_SEED if seed is None else seed)
    try:
        with quiet_harness():
            from lm_eval.evaluator import evaluate

            found = evaluate(
                lm,
                {"tasks": dict(tasks.tasks), "groups": dict(tasks.groups)},
                limit=limit,
                bootstrap_iters=BOOTSTRAP,
                apply_chat_template=chat,
                fewshot_as_multiturn=True,
            )
    except (QuantKitError, MemoryError):
        raise
    except Exception as error:  # task files, their code and servers may raise anything
        reason = str(error).strip().partition("\n")[0]
        names = ", ".join(tasks.names)
        raise QuantKitError(
            f"{names} failed on {label}: {type(error).__name__}: {reason}; --debug shows where"
        ) from error
    return read_results(found, label)


def read_results(found: Mapping[str, Any], label: str) -> Run:
    """Take the harness's results apart; raises QuantKitError where a number is missing."""
    samples = found["samples"]
    for task, answered in samples.items():
        _check_answers(task, answered, label)
    groups = found.get("group_subtasks", {})
    outcomes = {}
    for name, numbers in found["results"].items():
        members = _leaves(name, groups)
        for key, value in numbers.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = numbers.get(f"{metric}_stderr,{kind}")
            outcomes[name, metric, kind] = _outcome(
                (name, metric, kind), value, error, members, samples, label
            )
    for task in samples:
        if not any(name == task for name, _, _ in outcomes):
            raise QuantKitError(f"task {task} has no metric, so nothing was measured")
    questions = {name: (n["effective"], n["original"]) for name, n in found["n-samples"].items()}
    for name in groups:
        asked = [questions[leaf] for leaf in _leaves(name, groups)]
        questions[name] = (sum(n for n, _ in asked), sum(n for _, n in asked))
    return Run(
        outcomes,
        questions,
        frozenset(groups),
        found["n-shot"],
        {
            (name, metric): better
            for name, metrics in found["higher_is_better"].items()
            for metric, better in metrics.items()
        },
    )


def _outcome(
    key: tuple[str, str, str],
    value: Any,
    error: Any,
    members: Sequence[str],
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    label: str,
) -> Outcome:
    name, metric, kind = key
    if not isinstance(value, Real) or not np.isfinite(float(value)):
        raise QuantKitError(f"{metric} of {name} on {label} is {value!r}, which is no number")
    known = isinstance(error, Real) and bool(np.isfinite(float(error)))
    values = _values(metric, kind, members, samples)
    if values is not None and not np.isclose(np.mean(list(values.values())), float(value)):
        values = None  # not a mean: questions cannot be compared one by one
    return Outcome(float(value), float(error) if known else None, values)


def _values(
    metric: str,
    kind: str,
    members: Sequence[str],
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[SampleKey, float] | None:
    """Return every question's own number, or None where one has none or something else."""
    values: dict[SampleKey, float] = {}
    for task in members:
        for sample in samples.get(task, ()):
            if sample["filter"] == kind:
                value = sample.get(metric)
                if not isinstance(value, (Real, np.bool_)):
                    return None
                values[task, sample["doc_id"]] = float(value)
    return values or None


def _leaves(name: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tasks of a group, or the task itself."""
    if name not in groups:
        return [name]
    return [leaf for child in groups[name] for leaf in _leaves(child, groups)]


def _check_answers(task: str, samples: Sequence[Mapping[str, Any]], label: str) -> None:
    """Refuse answers that are no numbers: the likeliest of several NaN would be the first."""
    for sample in samples:
        for number in _numbers(sample["resps"]):
            if not np.isfinite(number):
                raise QuantKitError(
                    f"{label} gave a likelihood of {number} for question {sample['doc_id']} of "
                    f"{task}; the model is damaged, or this dtype too narrow"
                )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
    elif not isinstance(value, bool) and isinstance(value, Real):
        yield float(value)


class _Silence(io.TextIOBase):
    """Takes any text; unlike a closed file it may be kept by a logger."""

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Let the harness load and run without its logs, bars (unless on a terminal) and processes."""
    terminal = sys.stderr.isatty()
    logger = logging.getLogger("lm_eval")
    level, forks = logger.level, os.environ.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.CRITICAL)
    os.environ["DISABLE_MULTIPROC"] = "1"  # resampling in forks of a process that runs torch
    try:
        with (
            redirect_stdout(sys.stderr if terminal else _Silence()),
            redirect_stderr(sys.stderr if terminal else _Silence()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if forks is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = forks
