from __future__ import annotations

import re
from xml.etree import ElementTree

from quantkit.inspection.drawing import MARKERS, PALETTE, SERIES, Chart, looks, scale_by_powers


def draw(name: str = "chart", title: str = "a title") -> str:
    with Chart(name, 2) as chart:
        (axes,) = chart.axes()
        axes.plot([1, 10, 100], color=SERIES[0], marker="o", label="line")
        axes.bar([0], [5], color=SERIES[1], hatch="//")
        scale_by_powers(axes)
        axes.set_title(title)
        chart.legend(axes)
        return chart.svg()


def test_the_result_is_one_svg_element_that_scales() -> None:
    root = ElementTree.fromstring(draw())
    assert root.tag == "svg"
    assert set(root.attrib) == {"viewBox"}


def test_colours_are_variables_of_the_page() -> None:
    svg = draw()
    assert "var(--s1)" in svg
    assert "var(--ink)" in svg
    # Black is what SVG falls back to; nothing may be drawn in a colour that the theme lacks.
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", svg)) == set()


def test_text_is_text_in_the_font_of_the_page() -> None:
    svg = draw(title="$x_1$ <b> & more")
    assert ">$x_1$ &lt;b&gt; &amp; more</text>" in svg
    assert ">100</text>" in svg
    assert "mathdefault" not in svg
    assert set(re.findall(r"font: ([^;\"]*)", svg)) <= {
        f"{weight}{size}px var(--font)" for weight in ("", "bold ") for size in ("8", "8.5")
    }


def test_two_charts_can_share_a_page() -> None:
    ids = [set(re.findall(r'\bid="([^"]+)"', draw(name))) for name in ("a", "b")]
    assert not ids[0] & ids[1]
    svg = draw("a")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    assert used <= ids[0]
    assert used


def test_the_same_chart_is_the_same_text() -> None:
    assert draw() == draw()


def test_series_differ_without_colour_too() -> None:
    style = looks([str(number) for number in range(6)])
    assert len({look.marker for look in style.values()}) == len(MARKERS) == 6
    assert len({look.color for look in style.values()}) == 6


def test_every_colour_reads_on_its_background() -> None:
    # WCAG asks for 3 to 1 for graphics, 4.5 to 1 for text.
    for name, colors in PALETTE.items():
        if name != "grid":
            for color, page in zip(colors, ("#ffffff", "#15181c"), strict=True):
                needed = 4.5 if name in ("ink", "muted") else 3.0
                assert contrast(color, page) >= needed, (name, color)


def contrast(color: str, background: str) -> float:
    """Contrast ratio by WCAG 2."""
    high, low = sorted((luminance(color), luminance(background)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    channels = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
