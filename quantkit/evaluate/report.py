"""A Result as a table for people: original and quantized side by side."""

from __future__ import annotations

from rich.table import Table

from quantkit.evaluate.result import Divergence, Measurement, Perplexity, Result

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
