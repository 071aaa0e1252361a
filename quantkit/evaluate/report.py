"""Results as tables for people: original and quantized side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from quantkit.evaluate.result import Divergence, Measurement, Perplexity, Result
from quantkit.evaluate.task_result import TaskResult, TaskScore

KV_WORDS = {"none": "plain KV", "fp8": "FP8 KV"}


def make_table(result: Result) -> Table:
    """Return the numbers, a column for each model, with standard errors where there are any."""
    return _table(text_columns(result), text_rows(result), num_left=1)


def text_columns(result: Result) -> list[str]:
    """Return the names of the columns: one of labels, then one for each model."""
    original = [] if result.original is None else ["original"]
    return ["", *original, *(f"quantized, {KV_WORDS[each.kv]}" for each in result.measurements)]


def text_rows(result: Result) -> list[list[str]]:
    """Return the cells, row by row."""
    labels = _labels(result.original is not None)
    columns = [] if result.original is None else [_cells(result.original, None, len(labels))]
    columns += [_measured(measurement, len(labels)) for measurement in result.measurements]
    if any(each.saturation is not None for each in result.measurements):
        labels = [*labels, "values saturated"]
        cells = [
            "" if each.saturation is None else str(each.saturation) for each in result.measurements
        ]
        cells = cells if result.original is None else ["", *cells]
        columns = [[*column, cell] for column, cell in zip(columns, cells, strict=True)]
    return [list(row) for row in zip(labels, *columns, strict=True)]


def _labels(compared: bool) -> list[str]:
    divergence = [
        "perplexity ratio",
        "mean KL",
        "median KL",
        "99 % KL",
        "99.9 % KL",
        "same top token",
    ]
    return ["perplexity", *divergence] if compared else ["perplexity"]


def _measured(measurement: Measurement, length: int) -> list[str]:
    return _cells(measurement.perplexity, measurement.divergence, length)


def _cells(perplexity: Perplexity, divergence: Divergence | None, length: int) -> list[str]:
    cells = [_number(perplexity.perplexity, perplexity.perplexity_standard_error, 3)]
    if divergence is not None:
        cells += [
            _number(divergence.ppl_ratio, divergence.ppl_ratio_standard_error, 4),
            _number(divergence.mean_kl, divergence.mean_kl_standard_error, 5),
            f"{divergence.median_kl:.5f}",
            f"{divergence.p99_kl:.4f}",
            f"{divergence.p999_kl:.4f}",
            f"{divergence.top1_agreement:.2%}",
        ]
    return cells + [""] * (length - len(cells))


def _number(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def make_task_table(result: TaskResult) -> Table:
    """Return the scores of tasks, a row for each metric, with standard errors where there are any.

    Where both models were asked, also the difference with its own (paired) error, and how many
    questions the quantized model lost and won.
    """
    compared = any(score.change is not None for score in result.scores)
    rows = [task_cells(score, compared) for score in result.scores]
    return _table(task_columns(compared), rows, num_left=2)


def task_columns(compared: bool) -> list[str]:
    """Return the names of the columns, with those of the original if it was `compared`."""
    if not compared:
        return ["task", "metric", "questions", "quantized"]
    scores = ["original", "quantized", "difference", "questions lost, won"]
    return ["task", "metric", "questions", *scores]


def task_cells(score: TaskScore, compared: bool) -> list[str]:
    """Return one row of the table of tasks."""
    metric = score.metric if score.filter == "none" else f"{score.metric}, {score.filter}"
    asked = f"{score.questions:,}"
    if score.questions < score.available:
        asked += f" of {score.available:,}"
    cells = [score.task, metric, asked]
    if compared and score.original is not None:
        cells.append(_number(score.original, score.original_standard_error, 4))
    cells.append(_number(score.quantized, score.quantized_standard_error, 4))
    if compared and score.change is not None:
        cells.append(_signed(score.change.difference, score.change.standard_error))
        has_counts = score.change.lost is not None
        cells.append(f"{score.change.lost}, {score.change.won}" if has_counts else "")
    return cells


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> Table:
    table = Table(title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < num_left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _signed(value: float, error: float | None) -> str:
    return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")
