"""House style of the charts: colours that follow the page's theme, and a figure as inline SVG.

A chart is drawn in the light colours; in the SVG each becomes a CSS variable of the page, which has
a dark value too. Needs the extra `report`; knows nothing about checkpoints.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

PALETTE = {
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#6b727c", "#a3abb5"),
    "grid": ("#dde1e6", "#383e47"),
    "s1": ("#0072b2", "#58b4f0"),
    "s2": ("#c84e00", "#ff8f4d"),
    "s3": ("#00805d", "#35cfa3"),
    "s4": ("#a8437f", "#e79ac6"),
    "s5": ("#946300", "#f0c03c"),
    "s6": ("#5b4bb5", "#b3a5ff"),
}
"""Name -> (light, dark). The series are Okabe and Ito's, darkened and lightened for contrast."""

INK, MUTED, GRID, *SERIES = (light for light, _ in PALETTE.values())
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH = 9.4
"""Inches. The page scales a chart to its column, about 1.4 pixels a point."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 8,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.2,
    "hatch.linewidth": 0.8,
    "hatch.color": INK,
}


@dataclass(frozen=True, slots=True)
class Look:
    """Colour and marker of a series: told apart without colour too."""

    color: str
    marker: str


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Assign looks to series in order; a seventh starts over with a marker of its own."""
    return {
        name: Look(
            SERIES[number % len(SERIES)], MARKERS[(number + number // len(SERIES)) % len(MARKERS)]
        )
        for number, name in enumerate(names)
    }


class Chart:
    """Context manager for one figure: `with Chart("bytes", height=3) as chart: chart.axes(...)`.

    `svg()` is called inside the block; the style applies there only.
    """

    def __init__(self, name: str, height: float) -> None:
        self.name = name
        style: Any = _STYLE | {"svg.hashsalt": name}
        self._style = mpl.rc_context(style)
        self._height = height

    def __enter__(self) -> Chart:
        self._style.__enter__()
        self.figure = Figure(figsize=(WIDTH, self._height), layout="constrained")
        return self

    def __exit__(self, *error: Any) -> None:
        self._style.__exit__(*error)

    def axes(self, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
        """Return the axes of a grid, row by row."""
        grid = self.figure.subplots(rows, columns, squeeze=False, **options)
        return [axes for row in grid for axes in row]

    def legend(self, axes: Axes, columns: int = 4) -> None:
        """Place the legend of `axes` above the whole figure."""
        handles, labels = axes.get_legend_handles_labels()
        self.figure.legend(handles, labels, loc="outside upper left", ncols=columns)

    def svg(self) -> str:
        """Return the figure as an <svg> element without fixed size; the same input, the same text.

        Colours are the page's variables, and ids carry the chart's name, so that several charts
        live on one page.
        """
        self.figure.patch.set_visible(False)
        for axes in self.figure.axes:
            axes.patch.set_visible(False)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        self.figure.savefig(file, format="svg", metadata=no_metadata)
        text = file.getvalue()
        text = text[text.index("<svg") :].strip()
        text = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, flags=re.DOTALL)
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        text = text.replace("xlink:href", "href")
        # The page's own font, at the size that the chart asks for.
        text = re.sub(r"font: ([\d.]+px|bold [\d.]+px) [^;\"]*", r"font: \1 var(--font)", text)
        for name, (light, _) in PALETTE.items():
            text = text.replace(light, f"var(--{name})")
        return text


def count_layers(axes: Axes, numbers: Sequence[int]) -> None:
    """Let the x axis count layers."""
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if numbers:
        axes.set_xlim(min(numbers) - 0.7, max(numbers) + 0.7)


def scale_by_powers(
    axes: Axes, which: Literal["x", "y"] = "y", steps: Sequence[float] = (1, 2, 5)
) -> None:
    """Make an axis logarithmic, with plain numbers at it, `steps` in each decade."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axes.set(**{f"{which}scale": "log"})
    axis.set_major_locator(LogLocator(subs=steps, numticks=10))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_formatter(NullFormatter())
