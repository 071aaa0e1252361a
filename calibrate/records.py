"""Dataclasses read back from JSON, and the differences between two JSON values."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
NOTHING = "not there"


def from_json(kind: type[T], value: Any) -> T:
    """Return the value of a type that `dataclasses.asdict` and JSON made `value` of.

    Knows dataclasses, lists, tuples, dicts, unions and what JSON holds as it is. Keys that a
    dataclass does not have are passed over; fields that are missing take their defaults. Raises
    TypeError for what does not fit.
    """
    return _read(kind, value)  # type: ignore[no-any-return]


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        known = [field.name for field in fields(kind) if field.name in value]
        return kind(**{name: _read(hints[name], value[name]) for name in known})  # type: ignore[operator]
    if origin is list and isinstance(value, list):
        return [_read(arguments[0], item) for item in value]
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(_read(item_kind, item) for item_kind, item in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {_key(arguments[0], key): _read(arguments[1], item) for key, item in value.items()}
    if kind is float and type(value) in (int, float):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise TypeError(f"{value!r} is not of type {getattr(kind, '__name__', kind)}")


def _read_union(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return _read(kind, value)
        except TypeError:
            continue
    raise TypeError(f"{value!r} is none of {', '.join(map(str, kinds))}")


def _key(kind: Any, key: str) -> Any:
    """JSON writes numbers as strings where they are keys."""
    return kind(key) if kind in (int, float) else key


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], hashes: Mapping[str, str]
) -> list[str]:
    """Say in words where two JSON objects differ, one phrase a value, in the order of `here`.

    Keys of nested values are joined with dots. `hashes` maps such keys to what they stand for.
    """
    old, new = _flat(there), _flat(here)
    keys = [*new, *(key for key in old if key not in new)]
    changed = [key for key in keys if old.get(key, NOTHING) != new.get(key, NOTHING)]
    return [
        f"{hashes[key]} differ"
        if key in hashes
        else f"{key} was {old.get(key, NOTHING)}, is {new.get(key, NOTHING)}"
        for key in changed
    ]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    found: dict[str, Any] = {}
    for key, item in items:
        full = f"{name}.{key}" if name else str(key)
        if isinstance(item, Mapping | list):
            found.update(_flat(item, full))
        else:
            found[full] = item
    return found
