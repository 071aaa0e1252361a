"""The charts of the page, one function each: from an Inspection to an <svg> element.

A chart whose facts a checkpoint does not have is None. Needs the extra `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, nan
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from quantkit.inspection.drawing import (
    INK,
    MARKERS,
    MUTED,
    SERIES,
    Chart,
    count_layers,
    looks,
    scale_by_powers,
)
from quantkit.inspection.groups import InputRow, group, inputs, known, layer_label, tier_label
from quantkit.inspection.inspection import Inspection
from quantkit.inspection.record import LayerRecord, ModuleRecord

MAX_PANELS = 23
"""Kinds of modules with a panel of their own; the page says how many have none."""
MAX_SERIES = 6
MIN_SPAN_DB = 6
OTHERS = "others"
BEFORE = "plain rounding"
AFTER = "with the tiers"
KEPT = "kept in the source's dtype (no error)"

Point = Callable[[ModuleRecord], float | None]


def error_by_depth(inspection: Inspection) -> str | None:
    """Draw output SQNR over layers before and after, a panel for each kind of module."""
    layers = _numbered(inspection)
    modules = [module for layer in layers for module in layer.modules]
    has_outputs = any(module.output_sqnr_db is not None for module in modules)
    has_layers = any(layer.output_sqnr_db is not None for layer in layers)
    if not has_layers and not any(m.weight_sqnr_db is not None for m in modules):
        return None
    kinds = list(group(modules, lambda module: module.kind))[:MAX_PANELS]
    rows = ceil((len(kinds) + has_layers) / 4)
    with Chart("depth", 0.5 + 1.75 * rows) as chart:
        panels = chart.axes(rows, 4, sharex=True, sharey=has_outputs)
        for axes in panels[len(kinds) + has_layers :]:
            axes.set_visible(False)
        if has_layers:
            _layer_panel(panels.pop(0), layers)
        for axes, kind in zip(panels, kinds, strict=False):
            _kind_panel(axes, layers, kind, has_outputs)
        if has_outputs:
            for axes in chart.figure.axes:
                axes.label_outer()
        chart.legend(panels[0], columns=3)
        return chart.svg()


def _layer_panel(axes: Axes, layers: Sequence[LayerRecord]) -> None:
    values = [_gap(layer.output_sqnr_db) for layer in layers]
    axes.plot(_numbers(layers), values, color=SERIES[0], marker=MARKERS[0], label=AFTER)
    axes.set_title("whole layer")
    axes.set_ylabel("output SQNR, dB")
    count_layers(axes, _numbers(layers))


def _kind_panel(axes: Axes, layers: Sequence[LayerRecord], kind: str, has_outputs: bool) -> None:
    def of_kind(value: Point) -> list[float]:
        found = [known(value(m) for m in layer.modules if m.kind == kind) for layer in layers]
        return [median(values) if values else nan for values in found]

    numbers = _numbers(layers)
    if has_outputs:
        before = of_kind(lambda module: module.plain_output_sqnr_db)
        after = of_kind(lambda module: module.output_sqnr_db)
        axes.plot(numbers, before, color=MUTED, linestyle=(0, (3, 2)), label=BEFORE)
        axes.plot(numbers, after, color=SERIES[0], marker=MARKERS[0], label=AFTER)
        kept = [
            number
            for number, layer in zip(numbers, layers, strict=True)
            if any(module.kind == kind and module.is_kept for module in layer.modules)
        ]
        floor = axes.get_xaxis_transform()  # nothing was rounded, so there is no error to show
        axes.plot(
            kept,
            [0.05] * len(kept),
            "X",
            color=SERIES[1],
            markersize=6,
            transform=floor,
            label=KEPT,
        )
    else:
        weights = of_kind(lambda module: module.weight_sqnr_db)
        axes.plot(numbers, weights, color=SERIES[2], marker=MARKERS[2], label="weight alone")
        _span(axes, weights)
    axes.set_title(kind)
    axes.set_ylabel("output SQNR, dB" if has_outputs else "weight SQNR, dB")
    count_layers(axes, numbers)


def _span(axes: Axes, values: Sequence[float]) -> None:
    """Show at least MIN_SPAN_DB, lest rounding noise look like a trend."""
    found = [value for value in values if value == value] or [0.0]
    middle, half = (max(found) + min(found)) / 2, (max(found) - min(found)) / 2
    half = max(1.1 * half, MIN_SPAN_DB / 2)
    axes.set_ylim(middle - half, middle + half)


def gain_by_kind(inspection: Inspection) -> str | None:
    """Draw every module's gain in dB, a row for each kind, marked by the tiers in force."""
    modules = [m for m in inspection.record.modules if m.gain_db is not None]
    if not modules:
        return None
    kinds = list(group(modules, lambda module: module.kind))
    labels = _limited([row.tiers for row in inspection.tiers if row.median_gain_db is not None])
    style = looks(labels)
    with Chart("gain", 0.9 + 0.3 * len(kinds)) as chart:
        (axes,) = chart.axes()
        for number, label in enumerate(labels):
            found = [m for m in modules if _series(tier_label(m), labels) == label]
            # Side by side in their row, so that no series hides another.
            shift = 0.6 * ((number + 0.5) / len(labels) - 0.5)
            rows = [kinds.index(module.kind) + shift for module in found]
            gains = known(module.gain_db for module in found)
            look = style[label]
            axes.plot(gains, rows, look.marker, color=look.color, alpha=0.75, label=label)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set_ylim(len(kinds) - 0.4, -0.6)
        axes.set_xlabel("gain in output SQNR over plain rounding, dB (right is better)")
        chart.legend(axes, columns=3)
        return chart.svg()


def input_ranges(inspection: Inspection) -> str | None:
    """Draw the inputs' range, and how far their largest channel stands out, over layers."""
    rows = [row for row in inputs(inspection.record) if row.layer.number is not None]
    if not rows:
        return None
    labels = _limited(list(group(rows, lambda row: row.modules)))
    style = looks(labels)
    numbers = _numbers(_numbered(inspection))
    with Chart("ranges", 2.9) as chart:
        left, right = chart.axes(1, 2)
        for label in labels:
            found = [row for row in rows if row.modules == label]
            color, marker = style[label].color, style[label].marker
            places = _numbers(row.layer for row in found)
            for axes, values in ((left, _amax(found)), (right, _ratios(found))):
                axes.plot(places, values, color=color, marker=marker, label=f"input of {label}")
        left.set_ylabel("largest |input|, log scale")
        right.set_ylabel("largest / median channel RMS, log scale")
        for axes in (left, right):
            scale_by_powers(axes)
            count_layers(axes, numbers)
        chart.legend(left)
        return chart.svg()


def bytes_by_kind(inspection: Inspection) -> str | None:
    """Draw bytes before and after for each kind of module, and for all else that is stored."""
    bars = [(row.kind, row.bytes_before, row.bytes_after) for row in inspection.kinds]
    rest = inspection.sizes.rest or ()
    large = [row for row in rest if row.bytes >= 1e6]
    bars += [(f"{row.name} ({row.dtype})", row.bytes, row.bytes) for row in large]
    small = sum(row.bytes for row in rest if row.bytes < 1e6)
    if small:
        bars.append(("norms, scales, the rest", small, small))
    if not inspection.kinds:
        return None
    with Chart("bytes", 0.8 + 0.36 * len(bars)) as chart:
        (axes,) = chart.axes()
        for row, (_, before, after) in enumerate(bars):
            first = row == 0
            _bar(axes, row - 0.19, before, MUTED, "source" if first else None)
            if after is not None:
                _bar(axes, row + 0.19, after, SERIES[0], "this checkpoint" if first else None)
        axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("size, MB (10^6 bytes)")
        chart.legend(axes)
        return chart.svg()


def _bar(axes: Axes, row: float, size: int, color: str, label: str | None) -> None:
    axes.barh(row, size / 1e6, height=0.34, color=color, label=label)
    text = f"{size / 1e6:,.1f}" if size >= 1e5 else f"{size / 1e6:.3f}"
    beside: Any = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (size / 1e6, row), fontsize=7, **beside)


def sensitivity_by_layer(inspection: Inspection) -> str | None:
    """Draw the predicted KL of plain rounding over layers, stacked by fused group."""
    rows = inspection.sensitivity
    if not rows:
        return None
    places = [layer_label(layer) for layer in inspection.record.layers]
    labels = _limited(list(group(rows, lambda row: row.modules)))
    style = looks(labels)
    with Chart("sensitivity", 2.8) as chart:
        (axes,) = chart.axes()
        bottom = [0.0] * len(places)
        for label in labels:
            for is_kept in (False, True):
                heights = [0.0] * len(places)
                for row in rows:
                    if _series(row.modules, labels) == label and row.is_kept == is_kept:
                        heights[places.index(row.layer)] += row.predicted_kl
                axes.bar(
                    range(len(places)),
                    heights,
                    bottom=bottom,
                    color=style[label].color,
                    hatch="////" if is_kept else None,
                    label=None if is_kept else label,
                )
                bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set_ylim(0, 1.06 * max(bottom) or 1)
        if any(row.is_kept for row in rows):
            axes.bar(0, 0, color="none", hatch="////", label="kept in the source's dtype")
        axes.grid(visible=False, axis="x")
        step = max(1, ceil(len(places) / 20))
        axes.set_xticks(range(0, len(places), step), places[::step])
        axes.set_xlabel("layer")
        axes.set_ylabel("predicted KL, nats a token")
        chart.legend(axes, columns=5)
        return chart.svg()


def kv_by_layer(inspection: Inspection) -> str | None:
    """Draw what an FP8 cache does to keys, values and attention's output, over layers."""
    layers = [layer for layer in _numbered(inspection) if layer.kv is not None]
    if not layers:
        return None
    series = {
        "keys": [_gap(layer.kv.key_error_db) for layer in layers if layer.kv],
        "values": [_gap(layer.kv.value_error_db) for layer in layers if layer.kv],
        "attention output": [_gap(layer.kv.output_error_db) for layer in layers if layer.kv],
    }
    numbers, style = _numbers(layers), looks(list(series))
    with Chart("kv", 2.7) as chart:
        (axes,) = chart.axes()
        for label, values in series.items():
            look = style[label]
            axes.plot(numbers, values, color=look.color, marker=look.marker, label=label)
        flagged = [
            (n, v)
            for n, v, layer in zip(numbers, series["keys"], layers, strict=True)
            if layer.kv and layer.kv.flagged
        ]
        if flagged:
            axes.plot(
                *zip(*flagged, strict=True),
                "o",
                color=INK,
                markersize=9,
                fillstyle="none",
                label="flagged: keys that FP8 does not hold well",
            )
        axes.set_ylabel("SQNR, dB (higher is better)")
        count_layers(axes, numbers)
        chart.legend(axes)
        return chart.svg()


def _numbered(inspection: Inspection) -> list[LayerRecord]:
    return [layer for layer in inspection.record.layers if layer.number is not None]


def _numbers(layers: Iterable[LayerRecord]) -> list[int]:
    return known(layer.number for layer in layers)


def _amax(rows: Sequence[InputRow]) -> list[float]:
    return [_gap(row.amax or None) for row in rows]


def _ratios(rows: Sequence[InputRow]) -> list[float]:
    return [_gap(row.outlier_ratio or None) for row in rows]


def _gap(value: float | None) -> float:
    """What is unknown leaves a gap in a line."""
    return nan if value is None else value


def _limited(labels: Sequence[str]) -> list[str]:
    """Limit a chart to as many series as can be told apart; the last then takes all others."""
    if len(labels) <= MAX_SERIES:
        return list(labels)
    return [*labels[: MAX_SERIES - 1], OTHERS]


def _series(label: str, labels: Sequence[str]) -> str:
    return label if label in labels else OTHERS
