"""The charts of the report, one function each: from results to an <svg> element.

A chart whose facts were not measured is None. Needs the extra `report`.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from quantkit.evaluate.distribution import Distribution, tail
from quantkit.evaluate.report import KV_WORDS
from quantkit.evaluate.result import Measurement, Result
from quantkit.evaluate.task_result import TaskResult, TaskScore
from quantkit.inspection.drawing import (
    INK,
    MARKERS,
    MUTED,
    SERIES,
    Chart,
    Look,
    looks,
    scale_by_powers,
)

MAX_SCORES = 40
"""Rows of the chart of tasks; the table has all."""

Compared = Sequence[tuple[Measurement, Distribution, Look]]


def kl_distribution(result: Result) -> str | None:
    """Draw how many tokens have how much KL, and which share has more."""
    found = _compared(result)
    if not found:
        return None
    with Chart("kl", 2.9) as chart:
        left, right = chart.axes(1, 2)
        for measurement, distribution, look in found:
            label = KV_WORDS[measurement.kv]
            shares = [100 * n / sum(distribution.counts) for n in distribution.counts]
            left.stairs(shares, distribution.edges, color=look.color, linewidth=1.3, label=label)
            kl, above = tail(distribution)
            right.plot(kl, above, color=look.color)
            _mark_quantiles(right, measurement, look)
        low, high = _span([distribution for _, distribution, _ in found])
        for axes in (left, right):
            scale_by_powers(axes, "x", steps=(1,))
            axes.set_xlim(low, high)
            axes.set_xlabel("KL of a token, nats")
        scale_by_powers(right, steps=(1,))
        left.set_ylabel("tokens, % in an eighth of a decade")
        right.set_ylabel("share of tokens with more")
        chart.legend(left)
        return chart.svg()


def _mark_quantiles(axes: Axes, measurement: Measurement, look: Look) -> None:
    found = measurement.divergence
    if found is None:
        return
    places = {"median": (found.median_kl, 0.5), "99 %": (found.p99_kl, 0.01)}
    places["99.9 %"] = (found.p999_kl, 0.001)
    for name, (kl, share) in places.items():
        axes.plot([kl], [share], look.marker, color=look.color, markersize=5)
        if look.marker == MARKERS[0]:  # once is enough
            axes.annotate(
                name, (kl, share), xytext=(-5, -2), textcoords="offset points", ha="right", va="top"
            )


def _span(found: Sequence[Distribution]) -> tuple[float, float]:
    """Return the range of KL that holds all tokens but one in a thousand at the lower end."""
    lows, highs = [], []
    for distribution in found:
        total, seen = sum(distribution.counts), 0
        used = [i for i, count in enumerate(distribution.counts) if count]
        for i, count in enumerate(distribution.counts):
            seen += count
            if seen > total / 1000:
                lows.append(distribution.edges[i])
                break
        highs.append(distribution.edges[used[-1] + 1])
    return min(lows), max(highs)


def kl_by_position(result: Result) -> str | None:
    """Draw the mean KL over how many tokens a prediction had before it."""
    found = _compared(result)
    if not found or len(found[0][1].by_position) < 2:
        return None
    with Chart("position", 2.5) as chart:
        (axes,) = chart.axes()
        for measurement, distribution, look in found:
            bins = distribution.by_position
            axes.errorbar(
                range(len(bins)),
                [each.mean_kl for each in bins],
                yerr=[each.standard_error or 0.0 for each in bins],
                color=look.color,
                marker=look.marker,
                capsize=2,
                label=KV_WORDS[measurement.kv],
            )
        bins = found[0][1].by_position
        axes.set_xticks(range(len(bins)), [_range(each.first, each.last) for each in bins])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens before the predicted one, in its window")
        axes.set_ylabel("mean KL, nats")
        chart.legend(axes)
        return chart.svg()


def task_scores(result: TaskResult) -> str | None:
    """Draw the scores of both models, and their differences, with standard errors.

    Only shares, which have one scale: a perplexity stands in the table.
    """
    scores = [score for score in result.scores if _is_share(score)][:MAX_SCORES]
    if not scores:
        return None
    with Chart("tasks", 0.9 + 0.34 * len(scores)) as chart:
        left, right = chart.axes(1, 2, sharey=True)
        rows = list(range(len(scores)))
        for name, color, marker, shift, values, errors in (
            ("original", MUTED, MARKERS[0], -0.15, _originals(scores), _original_errors(scores)),
            ("quantized", SERIES[0], MARKERS[1], 0.15, _quantized(scores), _errors(scores)),
        ):
            left.errorbar(
                values,
                [row + shift for row in rows],
                xerr=errors,
                fmt=marker,
                color=color,
                capsize=2,
                label=name,
            )
        changes = [score.change for score in scores if score.change is not None]
        right.errorbar(
            [change.difference for change in changes],
            rows,
            xerr=[change.standard_error or 0.0 for change in changes],
            fmt=MARKERS[1],
            color=SERIES[0],
            capsize=2,
        )
        right.axvline(0, color=INK, linewidth=0.8)
        left.set_yticks(rows, [f"{score.task}, {score.metric}" for score in scores])
        left.set_ylim(len(rows) - 0.5, -0.5)
        left.set_xlabel("score ± standard error")
        right.set_xlabel("quantized less original ± standard error, paired")
        chart.legend(left)
        return chart.svg()


def _is_share(score: TaskScore) -> bool:
    return score.original is not None and max(score.original, score.quantized) <= 1


def _originals(scores: Sequence[TaskScore]) -> list[float]:
    return [score.original or 0.0 for score in scores]


def _original_errors(scores: Sequence[TaskScore]) -> list[float]:
    return [score.original_standard_error or 0.0 for score in scores]


def _quantized(scores: Sequence[TaskScore]) -> list[float]:
    return [score.quantized for score in scores]


def _errors(scores: Sequence[TaskScore]) -> list[float]:
    return [score.quantized_standard_error or 0.0 for score in scores]


def _compared(result: Result) -> Compared:
    style = looks([found.kv for found in result.measurements])
    return [
        (found, found.distribution, style[found.kv])
        for found in result.measurements
        if found.distribution is not None
    ]


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
