"""Recipes: how a model is to be quantized, read from TOML, and which of its modules that selects.

Owns the recipe file format, its strict validation, and the rules for `targets` and `ignore`. Knows
module names, not modules: no weights, no data.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError, nearest
from quantkit.numerics import E4M3
from quantkit.scheme import Granularity, QuantSpec, Scheme, fused_siblings

ALL_LINEARS = "Linear"
"""The entry of `targets` that selects every linear module."""
HEAD = "lm_head"
"""The entry of `ignore` that means the output head, whatever the model calls it.

The only entry that may match nothing: a model may have no head of its own.
"""

_KV_SPECS: dict[str, QuantSpec | None] = {
    "fp8": QuantSpec(Granularity.TENSOR),
    "fp8-head": QuantSpec(Granularity.HEAD),
    "none": None,
}
# What a checkpoint can hold, and an engine can load: (granularity, dynamic).
_WEIGHT_KINDS = (
    (Granularity.TENSOR, False),
    (Granularity.CHANNEL, False),
    (Granularity.BLOCK, False),
)
_INPUT_KINDS = (
    (Granularity.TENSOR, False),
    (Granularity.TENSOR, True),
    (Granularity.TOKEN, True),
    (Granularity.GROUP, True),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to quantize, and how. `inputs=None` quantizes weights only.

    Raises RecipeError where the parts do not make a checkpoint that engines load.
    """

    name: str
    weights: QuantSpec
    description: str = ""
    inputs: QuantSpec | None = None
    kv: str = "fp8"  # "fp8": one scale per layer; "fp8-head": one per KV head; "none"
    targets: tuple[str, ...] = (ALL_LINEARS,)
    ignore: tuple[str, ...] = (HEAD,)

    def __post_init__(self) -> None:
        """Check the values that do not depend on a model."""
        _check_kind("weights", self.weights, _WEIGHT_KINDS)
        if self.inputs is not None:
            _check_kind("inputs", self.inputs, _INPUT_KINDS)
        if self.kv not in _KV_SPECS:
            hint = nearest(self.kv, _KV_SPECS)
            raise RecipeError(f"kv is {self.kv!r}{hint}; known: {', '.join(_KV_SPECS)}")
        if not self.targets:
            raise RecipeError(f'targets is empty; targets = ["{ALL_LINEARS}"] selects all modules')

    @property
    def kv_spec(self) -> QuantSpec | None:
        """How keys and values are quantized; None leaves the cache as it is."""
        return _KV_SPECS[self.kv]

    @property
    def needs_data(self) -> bool:
        """True if a scale is measured on data: static inputs, or the KV cache."""
        return self.kv_spec is not None or (self.inputs is not None and not self.inputs.dynamic)

    def scheme(self, ignored: Iterable[str]) -> Scheme:
        """Return the scheme of a checkpoint in which `ignored` (full names) stay unquantized."""
        return Scheme(self.weights, self.inputs, self.kv_spec, tuple(ignored))

    def with_options(self, kv: str | None = None, ignore: Sequence[str] = ()) -> Recipe:
        """Return the recipe with another `kv`, if given, and with more `ignore` entries."""
        added = tuple(entry for entry in ignore if entry not in self.ignore)
        return replace(self, kv=self.kv if kv is None else kv, ignore=(*self.ignore, *added))


def _check_kind(part: str, spec: QuantSpec, known: tuple[tuple[Granularity, bool], ...]) -> None:
    """Raise RecipeError unless `spec` is E4M3 in one of the `known` (granularity, dynamic)."""
    if spec.format != E4M3.name:
        raise RecipeError(
            f"{part}.format is {spec.format!r}; checkpoints hold {E4M3.name!r}, which engines load"
        )
    if (spec.granularity, spec.dynamic) not in known:
        options = ", ".join(
            f"{granularity.value} {'dynamic' if dynamic else 'static'}"
            for granularity, dynamic in known
        )
        kind = f"{spec.granularity.value!r}, {'dynamic' if spec.dynamic else 'static'}"
        raise RecipeError(f"{part} are {kind}; checkpoints hold: {options}")


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
    try:
        table = strict_fields(Recipe, tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not valid TOML: {error}") from None
    if "weights" not in table:
        raise RecipeError(f"{where} has no [weights] table; 'granularity' is its one required key")
    for key in ("name", "description", "kv"):
        _check_type(table, key, str, where)
    for key in ("targets", "ignore"):
        if key in table:
            table[key] = _string_tuple(table[key], f"{where}: {key}")
    for key in ("weights", "inputs"):
        if key in table:
            table[key] = _parse_spec(table[key], f"{where}: [{key}]")
    try:
        return Recipe(**{"name": name, **table})
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def strict_fields(cls: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `table` if every key is a field of dataclass `cls`; else RecipeError names the key."""
    known = [field.name for field in fields(cls)]
    for key in table:
        if key not in known:
            hint = nearest(key, known)
            raise RecipeError(f"unknown key {key!r} in {where}{hint}; known: {', '.join(known)}")
    return dict(table)


def _parse_spec(value: object, where: str) -> QuantSpec:
    """Parse a [weights] or [inputs] table."""
    if not isinstance(value, dict):
        raise RecipeError(f"{where} must be a table, got {value!r}")
    table = strict_fields(QuantSpec, value, where)
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


def _check_type(table: Mapping[str, Any], key: str, kind: type, where: str) -> None:
    if key in table and not isinstance(table[key], kind):
        words = {str: "a string", bool: "true or false"}
        raise RecipeError(f"{where}: {key} must be {words[kind]}, got {table[key]!r}")


def _string_tuple(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise RecipeError(f"{where} must be a list of non-empty strings, got {value!r}")
    return tuple(value)


def _positive(value: object, where: str) -> int:
    # bool is an int to Python, not to a reader of the file.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RecipeError(f"{where} must be a whole number above 0, got {value!r}")
    return value


def resolve_modules(
    recipe: Recipe, linear_names: Sequence[str], tied_head: bool = False, head: str = HEAD
) -> tuple[list[str], list[str]]:
    """Split a model's linear modules into (quantized, ignored), full names in the model's order.

    `head` is the full name of the output head; `tied_head` says that it shares the input
    embedding's matrix, so it can only be ignored, and is then listed though it has no tensor.
    Raises RecipeError for an entry that matches nothing, a quantized tied head, a split fused
    group, and when nothing is left to quantize.
    """
    names = list(linear_names)
    if tied_head and head not in names:
        names.append(head)
    selected: set[str] = set()
    for entry in recipe.targets:
        selected.update(names if entry == ALL_LINEARS else match_names(entry, names, "targets"))
    if HEAD in recipe.targets and HEAD in recipe.ignore and not tied_head:
        raise RecipeError(
            f"recipe {recipe.name} has {HEAD!r} in targets and in ignore (its default); write "
            "ignore = [] to quantize the output head"
        )
    for entry in recipe.ignore:
        heads = [name for name in names if name == head or _has_parts(name, HEAD)]
        selected.difference_update(heads if entry == HEAD else match_names(entry, names, "ignore"))
    if tied_head and (head in selected or HEAD in recipe.targets):
        raise RecipeError(
            f"recipe {recipe.name} quantizes {head}, which this model ties to its input embedding "
            f"(tie_word_embeddings); ignore {HEAD!r} and do not target it"
        )
    if not selected:
        raise RecipeError(
            f"recipe {recipe.name} leaves nothing to quantize: ignore covers all targets among "
            f"{len(names)} linear modules"
        )
    _check_fused_groups(selected, names)
    return [n for n in names if n in selected], [n for n in names if n not in selected]


def _check_fused_groups(selected: set[str], names: list[str]) -> None:
    """Raise RecipeError if a fused group is quantized in part; engines refuse to load that."""
    present = set(names)
    for name in names:
        group = [sibling for sibling in fused_siblings(name) if sibling in present]
        missing = [sibling for sibling in group if sibling not in selected]
        if missing and len(missing) < len(group):
            parent = name.rpartition(".")[0]
            members = ", ".join(sibling.rpartition(".")[2] for sibling in group)
            raise RecipeError(
                f"the fused group ({members}) of {parent} is quantized in part: "
                f"{', '.join(missing)} would stay as it is; engines run the group as one matmul, "
                "so ignore all of its members or none"
            )


def match_names(pattern: str, names: Sequence[str], what: str) -> list[str]:
    """Return the names that a pattern selects: whole dotted parts, or `re:` + a regex.

    A plain pattern is a full name or consecutive parts of one: "lm_head", "mlp.down_proj",
    "layers.0" (all of the layer). A regex must match from the start of the name, as in
    compressed-tensors. Raises RecipeError that quotes the pattern and offers the nearest name when
    nothing matches. `what` ("targets" or "ignore") is named in that error.
    """
    if pattern.startswith("re:"):
        try:
            regex = re.compile(pattern[3:])
        except re.error as error:
            raise RecipeError(f"{what} entry {pattern!r} is not a valid regex: {error}") from None
        found = [name for name in names if regex.match(name)]
    else:
        found = [name for name in names if _has_parts(name, pattern)]
    if not found:
        parts = [name.split(".") for name in names]
        tails = {".".join(part[start:]) for part in parts for start in range(len(part))}
        known = tails | {ALL_LINEARS if what == "targets" else HEAD}
        raise RecipeError(
            f"{what} entry {pattern!r} matches no linear module{nearest(pattern, known)}; "
            "'quantkit calibrate --dry-run' lists the modules"
        )
    return found


def _has_parts(name: str, pattern: str) -> bool:
    return f".{pattern}." in f".{name}."
