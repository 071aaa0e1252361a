from __future__ import annotations

import pytest

from quantkit.inspection import words


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234.56, "1,234.6"), (0.04, "0.0"), (-2.0, "-2.0")]
)
def test_number(value: float | None, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (2.04, "+2.0"), (-2.0, "-2.0"), (-0.04, "0.0"), (0.0, "0.0")]
)
def test_signed(value: float | None, text: str) -> None:
    assert words.signed(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "- MB"),
        (0, "0.0 MB"),
        (1152, "0.0012 MB"),
        (269_030_016, "269.0 MB"),
        (400_000_000_000, "400.0 GB"),
    ],
)
def test_size(value: int | None, text: str) -> None:
    assert words.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0"), (0.00024, "0.000240"), (1.5e-7, "1.50e-07")]
)
def test_small(value: float | None, text: str) -> None:
    assert words.small(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0, "0"), (12345, "12,345")])
def test_count(value: int | None, text: str) -> None:
    assert words.count(value) == text
