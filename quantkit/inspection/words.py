"""Numbers as people read them; what is unknown is a dash."""

from __future__ import annotations

UNKNOWN = "-"


def number(value: float | None, digits: int = 1) -> str:
    """Return a number with a fixed count of decimals."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def signed(value: float | None, digits: int = 1) -> str:
    """Return a difference with its sign; one that rounds to zero has none."""
    if value is None:
        return UNKNOWN
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def count(value: int | None) -> str:
    """Return an integer with separators."""
    return UNKNOWN if value is None else f"{value:,}"


def megabytes(value: int | None) -> str:
    """Return bytes in MB (10**6), with the decimals that their size needs."""
    if value is None:
        return UNKNOWN
    digits = 4 if 0 < value < 1e6 else 1 if value < 1e9 else 0
    return f"{value / 1e6:,.{digits}f}"


def size(value: int | None) -> str:
    """Return bytes with their unit, MB or GB."""
    if value is not None and value >= 1e10:
        return f"{value / 1e9:,.1f} GB"
    return f"{megabytes(value)} MB"


def small(value: float | None) -> str:
    """Return a small positive number, such as a KL, with three significant digits."""
    return UNKNOWN if value is None else "0" if value == 0 else f"{value:#.3g}"


def text(value: object) -> str:
    """Return any other value."""
    return UNKNOWN if value is None else str(value)
