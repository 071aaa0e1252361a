"""Which of a model's linear modules a recipe's `targets` and `ignore` select.

Knows module names, not modules: no weights, no data.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from quantkit.calibrate.groups import expert_of
from quantkit.errors import RecipeError, nearest
from quantkit.scheme import fused_siblings

ALL_LINEARS = "Linear"
"""The entry of `targets` that selects every linear module."""
HEAD = "lm_head"
"""The entry of `ignore` that means the output head, whatever the model calls it.

The only entry that may match nothing: a model may have no head of its own.
"""


class Selecting(Protocol):
    """The part of a recipe that selects modules."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def targets(self) -> tuple[str, ...]:
        """Patterns of what to quantize."""
        ...

    @property
    def ignore(self) -> tuple[str, ...]:
        """Patterns of what to leave out of that."""
        ...


def resolve_modules(
    recipe: Selecting,
    linear_names: Sequence[str],
    tied_head: bool = False,
    head: str = HEAD,
    unquantized: Sequence[str] = (),
) -> tuple[list[str], list[str]]:
    """Split a model's linear modules into (quantized, ignored), full names in the model's order.

    `head` is the full name of the output head; `tied_head` says that it shares the input
    embedding's matrix, so it can only be ignored, and is then listed though it has no tensor.
    `unquantized` are further modules that stay as they are in any case (routers): entries of
    `ignore` may match them. Raises RecipeError for an entry that matches nothing, a quantized tied
    head, a split fused group, and when nothing is left to quantize.
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
        known = [*names, *unquantized]
        selected.difference_update(heads if entry == HEAD else match_names(entry, known, "ignore"))
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
    _check_experts(selected, names)
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


def _check_experts(selected: set[str], names: list[str]) -> None:
    """Raise RecipeError if some experts of a layer are quantized and others not."""
    first: dict[str, str] = {}
    for name in names:
        expert = expert_of(name)
        if expert is None:
            continue
        other = first.setdefault(expert[0], name)
        if (name in selected) != (other in selected):
            left = other if name in selected else name
            raise RecipeError(
                f"the experts of {expert[0]} are quantized in part: {left} would stay as it is; "
                "engines run all experts of a layer as one, so ignore all of them or none"
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
