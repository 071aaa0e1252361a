"""Dataclasses from JSON, and what differs between two JSON objects."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import inf

import pytest

from quantkit.calibrate.records import differences, from_json
from quantkit.calibrate.report import LayerReport, ModuleReport


@dataclass(frozen=True)
class Inner:
    pairs: tuple[tuple[int, float], ...] = ()
    note: str | None = None


@dataclass
class Outer:
    name: str
    shape: tuple[int, int]
    inner: list[Inner] = field(default_factory=list)
    by_number: dict[int, float] = field(default_factory=dict)


def test_a_dataclass_is_read_back_as_it_was() -> None:
    value = Outer("a", (2, 3), [Inner(((1, 0.1), (2, inf)), "x"), Inner()], {3: 1.5})
    assert from_json(Outer, json.loads(json.dumps(asdict(value)))) == value


def test_a_layer_report_is_read_back_as_it_was() -> None:
    module = ModuleReport(
        "m", (2, 3), ("range",), "e4m3", 30.123456789, top_input_channels=((4, 9.5),)
    )
    report = LayerReport("layer", [module], 1 / 3, {"k": [0.1]})
    assert from_json(LayerReport, json.loads(json.dumps(asdict(report)))) == report


def test_missing_fields_take_their_defaults_and_unknown_keys_are_passed_over() -> None:
    assert from_json(Outer, {"name": "a", "shape": [1, 2], "new": 1}) == Outer("a", (1, 2))


@pytest.mark.parametrize(
    "value",
    [{"name": 1, "shape": [1, 2]}, {"name": "a"}, {"name": "a", "shape": "xy"}, []],
    ids=str,
)
def test_what_does_not_fit_is_an_error(value: object) -> None:
    with pytest.raises(TypeError):
        from_json(Outer, value)


def test_differences_are_named_by_their_path() -> None:
    there = {"a": {"b": 1, "c": [1, 2]}, "h": "x", "old": 1}
    here = {"a": {"b": 2, "c": [1]}, "h": "y", "new": None}
    assert differences(there, here, {"h": "the weights"}) == [
        "a.b was 1, is 2",
        "the weights differ",
        "new was not there, is None",
        "a.c.1 was 2, is not there",
        "old was 1, is not there",
    ]
    assert differences(here, here, {}) == []
