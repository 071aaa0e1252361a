from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.inspection import Inspection, inspect, plots
from tests.inspection.documents import document, write_folder

Plot = Callable[[Inspection], str | None]
ALL: list[Plot] = [
    plots.error_by_depth,
    plots.gain_by_kind,
    plots.input_ranges,
    plots.bytes_by_kind,
    plots.sensitivity_by_layer,
    plots.kv_by_layer,
]


def texts(plot: Plot, inspection: Inspection) -> list[str]:
    svg = plot(inspection)
    assert svg is not None
    return re.findall(r">([^<>\n]+)</text>", svg)


@pytest.mark.parametrize(
    ("plot", "words"),
    [
        (plots.error_by_depth, {"output SQNR, dB", "layer", "whole layer", "down_proj"}),
        (plots.error_by_depth, {"plain rounding", "with the tiers"}),
        (plots.gain_by_kind, {"q_proj", "range + compensation", "plain rounding"}),
        (plots.input_ranges, {"input of q/k/v_proj", "input of down_proj", "layer"}),
        (plots.bytes_by_kind, {"q_proj", "source", "this checkpoint", "size, MB (10^6 bytes)"}),
        (plots.sensitivity_by_layer, {"gate/up_proj", "predicted KL, nats a token", "layer"}),
        (plots.kv_by_layer, {"keys", "values", "attention output", "SQNR, dB (higher is better)"}),
    ],
)
def test_a_chart_names_its_axes_and_series(plot: Plot, words: set[str], full: Inspection) -> None:
    assert words <= set(texts(plot, full))


def test_what_is_kept_or_flagged_is_marked(full: Inspection) -> None:
    assert plots.KEPT in texts(plots.error_by_depth, full)
    assert "kept in the source's dtype" in texts(plots.sensitivity_by_layer, full)
    assert any("flagged" in text for text in texts(plots.kv_by_layer, full))


def test_an_older_checkpoint_shows_weights_and_layers_alone(older: Inspection) -> None:
    drawn = [plot.__name__ for plot in ALL if plot(older) is not None]  # type: ignore[attr-defined]
    assert drawn == ["error_by_depth", "bytes_by_kind"]
    found = set(texts(plots.error_by_depth, older))
    assert {"weight SQNR, dB", "weight alone", "whole layer"} <= found


@pytest.mark.parametrize("plot", ALL)
def test_without_facts_there_is_no_chart(plot: Plot, tmp_path: Path) -> None:
    assert plot(inspect(write_folder(tmp_path, {}))) is None


def test_more_tiers_than_can_be_told_apart_are_others(tmp_path: Path) -> None:
    value = document()
    for number, module in enumerate(value["layers"][0]["modules"]):
        module["tiers"] = [f"tier{number}"]
    found = texts(plots.gain_by_kind, inspect(write_folder(tmp_path, value)))
    assert "others" in found
    series = [text for text in found if text.startswith(("tier", "range", "plain"))]
    assert len(series) == plots.MAX_SERIES - 1


def test_a_layer_without_a_number_is_in_no_depth_chart_but_in_sensitivity(tmp_path: Path) -> None:
    value = document()
    head = value["layers"][0]["modules"][0] | {"name": "lm_head"}
    value["layers"].append({"name": "lm_head", "modules": [head]})
    inspection = inspect(write_folder(tmp_path, value))
    assert "lm_head" not in texts(plots.error_by_depth, inspection)
    assert "lm_head" in texts(plots.sensitivity_by_layer, inspection)
