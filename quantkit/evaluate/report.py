"""Results as tables for people: original and quantized side by side."""

from __future__ import annotations

from rich.table import Table

from quantkit.evaluate.result import Divergence, Measurement, Perplexity, Result
from quantkit.evaluate.task_result import TaskResult, TaskScore

KV_WORDS = {"none": "plain KV", "fp8": "FP8 KV"}


def make_table(result: Result) -> Table:
    """Return the numbers, a column for each model, with standard errors where there are any."""
    table = Table(title_justify="left")
    table.add_column("")
    columns: list[list[str]] = []
    labels = _labels(result.original is not None)
    if result.original is not None:
        table.add_column("original", justify="right")
        columns.append(_cells(result.original, None, len(labels)))
    for measurement in result.measurements:
        table.add_column(f"quantized, {KV_WORDS[measurement.kv]}", justify="right")
        columns.append(_measured(measurement, len(labels)))
    for label, *cells in zip(labels, *columns, strict=True):
        table.add_row(label, *cells)
    return table


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
    table = Table(title_justify="left")
    table.add_column("task")
    table.add_column("metric")
    for name in ("questions", *(("original",) if compared else ()), "quantized"):
        table.add_column(name, justify="right")
    if compared:
        table.add_column("difference", justify="right")
        table.add_column("questions lost, won", justify="right")
    for score in result.scores:
        table.add_row(*task_cells(score, compared))
    return table


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


def _signed(value: float, error: float | None) -> str:
    return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")
