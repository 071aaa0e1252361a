"""Values out of a JSON object that others wrote: absent is None, a wrong type is an error.

Knows types and where a value stands in its file, not what any key means.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError


class Fields:
    """One JSON object of `path`; `place` is where it stands, such as "layers[3].modules[0]".

    Every getter returns None (or nothing) for a key that is absent or null and raises
    CheckpointError, with file, place and value, for one of another type.
    """

    def __init__(self, value: object, path: Path, place: str = "") -> None:
        self.path, self.place = path, place
        if not isinstance(value, dict):
            raise self._mistake("", value, "an object")
        self._value: dict[str, Any] = value

    def text(self, key: str) -> str | None:
        """Return a string; control characters, which could steer a terminal, become spaces."""
        value = self._value.get(key)
        return None if value is None else self._text(key, value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings."""
        values = self._list(key)
        return None if values is None else tuple(self._text(key, value) for value in values)

    def number(self, key: str) -> float | None:
        """Return a finite number."""
        value = self._value.get(key)
        return None if value is None else self._number(key, value)

    def count(self, key: str) -> int | None:
        """Return an integer >= 0."""
        value = self._value.get(key)
        return None if value is None else self._count(key, value)

    def counts(self, key: str) -> tuple[int, ...] | None:
        """Return a list of integers >= 0."""
        values = self._list(key)
        return None if values is None else tuple(self._count(key, value) for value in values)

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        value = self._value.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._mistake(key, value, "true or false")
        return value

    def flags(self, key: str) -> dict[str, bool] | None:
        """Return an object whose values are all true or false."""
        child = self.child(key)
        return None if child is None else {name: bool(child.flag(name)) for name in child._value}

    def pairs(self, key: str) -> tuple[tuple[int, float], ...]:
        """Return a list of [integer, number]."""
        found = []
        for value in self._list(key) or []:
            if not isinstance(value, list) or len(value) != 2:
                raise self._mistake(key, value, "pairs [integer, number]")
            found.append((self._count(key, value[0]), self._number(key, value[1])))
        return tuple(found)

    def child(self, key: str) -> Fields | None:
        """Return an object below this one."""
        value = self._value.get(key)
        return None if value is None else Fields(value, self.path, self._at(key))

    def children(self, key: str) -> Iterator[Fields]:
        """Yield the objects of a list."""
        for number, value in enumerate(self._list(key) or []):
            yield Fields(value, self.path, f"{self._at(key)}[{number}]")

    def raw(self) -> dict[str, Any]:
        """Return the object as it was read."""
        return self._value

    def missing(self, key: str) -> CheckpointError:
        """Return the error for a key that no version of the file goes without."""
        return CheckpointError(
            f"{self.path} has no {self._at(key)}; restore the file, or calibrate again"
        )

    def _list(self, key: str) -> list[Any] | None:
        value = self._value.get(key)
        if value is not None and not isinstance(value, list):
            raise self._mistake(key, value, "a list")
        return value

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self._mistake(key, value, "text")
        return "".join(character if character.isprintable() else " " for character in value)

    def _number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self._mistake(key, value, "a finite number")
        return float(value)

    def _count(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._mistake(key, value, "an integer >= 0")
        return value

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place and key else self.place or key

    def _mistake(self, key: str, value: object, expected: str) -> CheckpointError:
        shown = ascii(value) if len(ascii(value)) <= 40 else f"{ascii(value)[:37]}..."
        where = self._at(key) or "the file"
        return CheckpointError(
            f"{self.path}: {where} is {shown}, expected {expected}; restore the file, or "
            "calibrate again"
        )
