"""Recipe files: TOML, validated strictly."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.tiers import Tiers
from quantkit.errors import RecipeError, nearest
from quantkit.scheme import Granularity, QuantSpec


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    folder = files("quantkit.calibrate") / "recipes"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Return a packaged recipe by its name, or the one in a FILE.toml.

    Raises RecipeError that names the file and the key for anything unknown or of a wrong type.
    """
    given = str(name_or_path)
    if given in recipe_names():
        text = (files("quantkit.calibrate") / "recipes" / f"{given}.toml").read_text("utf-8")
        return parse_recipe(text, f"recipe {given}", given)
    path = Path(name_or_path)
    if path.suffix != ".toml":
        known = recipe_names()
        raise RecipeError(
            f"unknown recipe {given!r}{nearest(given, known)}; known: {', '.join(known)}, or a "
            "FILE.toml"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"recipe file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe file {path}: {error}") from None
    return parse_recipe(text, str(path), path.stem)


def parse_recipe(text: str, where: str, name: str) -> Recipe:
    """Parse the TOML text of a recipe.

    `where` opens every error; `name` is taken if the file gives none.
    """
    table = _strict_fields(Recipe, _parse_toml(text, where), where)
    if "weights" not in table:
        raise RecipeError(f"{where} has no [weights] table; 'granularity' is its one required key")
    for key in ("name", "description", "kv", "head", "observer"):
        _check_type(table, key, str, where)
    for key in ("targets", "ignore", "kv_ignore"):
        if key in table:
            table[key] = _string_tuple(table[key], f"{where}: {key}")
    if "head" in table:
        table.setdefault("ignore", ())
    for key in ("weights", "inputs"):
        if key in table:
            table[key] = _parse_spec(table[key], f"{where}: [{key}]")
    if "tiers" in table:
        table["tiers"] = _parse_tiers(table["tiers"], f"{where}: [tiers]")
    try:
        return Recipe(**{"name": name, **table})
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(text)
        _check_integers(table)
    except (ValueError, RecursionError) as error:  # nested too deeply, a number too long
        raise RecipeError(f"{where} is not valid TOML: {error}") from None
    return table


def _check_integers(value: object) -> None:
    """Raise ValueError for an integer beyond TOML's 64 bits, which Python's parser lets pass."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer has more than 64 bits")
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    for entry in inner:
        _check_integers(entry)


def _strict_fields(cls: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `table` if every key is a field of dataclass `cls`; else RecipeError names the key."""
    known = [known.name for known in fields(cls)]
    for key in table:
        if key not in known:
            hint = nearest(key, known)
            raise RecipeError(f"unknown key {key!r} in {where}{hint}; known: {', '.join(known)}")
    return dict(table)


def _parse_spec(value: object, where: str) -> QuantSpec:
    """Parse a [weights] or [inputs] table."""
    if not isinstance(value, dict):
        raise RecipeError(f"{where} must be a table, got {value!r}")
    table = _strict_fields(QuantSpec, value, where)
    for key, kind in (("granularity", str), ("format", str), ("dynamic", bool)):
        _check_type(table, key, kind, where)
    if "granularity" not in table:
        raise RecipeError(f"{where} has no 'granularity'; known: {', '.join(Granularity)}")
    try:
        table["granularity"] = Granularity(table["granularity"])
    except ValueError:
        word = table["granularity"]
        hint = nearest(word, [member.value for member in Granularity])
        raise RecipeError(
            f"{where} has granularity {word!r}{hint}; known: {', '.join(Granularity)}"
        ) from None
    if "group_size" in table:
        table["group_size"] = _positive(table["group_size"], f"{where}: group_size")
    if "block_shape" in table:
        sizes = table["block_shape"]
        if not isinstance(sizes, list) or len(sizes) != 2:
            raise RecipeError(f"{where}: block_shape must be [rows, columns], got {sizes!r}")
        rows, columns = (_positive(size, f"{where}: block_shape") for size in sizes)
        table["block_shape"] = (rows, columns)
    try:
        return QuantSpec(**table)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _parse_tiers(value: object, where: str) -> Tiers:
    """Parse the [tiers] table."""
    if not isinstance(value, dict):
        raise RecipeError(f"{where} must be a table, got {value!r}")
    table = _strict_fields(Tiers, value, where)
    for key in ("range", "compensation", "smoothing"):
        _check_type(table, key, bool, where)
    for key in ("outlier_columns", "budget"):
        if key in table:
            table[key] = _number(table[key], f"{where}: {key}")
    if "formats" in table:
        table["formats"] = _string_tuple(table["formats"], f"{where}: formats")
    try:
        return Tiers(**table)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _check_type(table: Mapping[str, Any], key: str, kind: type, where: str) -> None:
    if key in table and not isinstance(table[key], kind):
        words = {str: "a string", bool: "true or false"}
        raise RecipeError(f"{where}: {key} must be {words[kind]}, got {table[key]!r}")


def _string_tuple(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise RecipeError(f"{where} must be a list of non-empty strings, got {value!r}")
    return tuple(value)


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RecipeError(f"{where} must be a number, got {value!r}")
    return float(value)


def _positive(value: object, where: str) -> int:
    # bool is an int to Python, not to a reader of the file.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RecipeError(f"{where} must be a whole number above 0, got {value!r}")
    return value
