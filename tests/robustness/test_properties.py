"""What holds for all inputs: of formats, of the shapes of scales, of recipes."""

from __future__ import annotations

import contextlib
import json
import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.recipe_file import parse_recipe
from quantkit.errors import RecipeError
from quantkit.numerics import FORMATS, Format, amax_to_scale, decode, encode, quantize, tile_amax
from quantkit.scheme import Granularity, QuantSpec

EVERY_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40)


@EVERY_FORMAT
@given(values=FLOATS)
@settings(max_examples=50, derandomize=True)
def test_rounding_is_monotone_odd_and_keeps_its_own_values(
    fmt: Format, values: list[float]
) -> None:
    x = torch.tensor(values).sort().values
    rounded = decode(encode(x, fmt), fmt)
    assert bool((rounded.diff() >= 0).all())
    assert bool((rounded.abs() <= fmt.max).all())
    assert torch.equal(decode(encode(rounded, fmt), fmt), rounded)
    assert torch.equal(decode(encode(-x, fmt), fmt), -rounded)


SPECS = st.one_of(
    st.builds(QuantSpec, st.sampled_from([Granularity.TENSOR, Granularity.CHANNEL])),
    st.integers(1, 300).map(lambda size: QuantSpec(Granularity.GROUP, group_size=size)),
    st.tuples(st.integers(1, 300), st.integers(1, 300)).map(
        lambda shape: QuantSpec(Granularity.BLOCK, block_shape=shape)
    ),
)


@given(spec=SPECS, rows=st.integers(1, 70), columns=st.integers(1, 70))
@settings(max_examples=60, derandomize=True)
def test_a_stored_scale_is_the_grid_that_numerics_takes(
    spec: QuantSpec, rows: int, columns: int
) -> None:
    x = torch.arange(1.0, rows * columns + 1).view(rows, columns)
    tile, shape = spec.tile(rows, columns), spec.scale_shape(rows, columns)
    scale = amax_to_scale(tile_amax(x, tile), spec.fmt)
    assert math.prod(shape) == scale.numel()
    grid = spec.grid(scale.reshape(shape))
    assert torch.equal(grid, scale)
    assert quantize(x, grid, spec.fmt, tile).shape == x.shape
    # x grows along rows and columns, so the last element of a tile is its largest.
    for i, j in product(range(grid.shape[0]), range(grid.shape[1])):
        last = x[min((i + 1) * tile[0], rows) - 1, min((j + 1) * tile[1], columns) - 1]
        assert grid[i, j] == amax_to_scale(last, spec.fmt)


WORDS = ["Linear", "lm_head", "tensor", "channel", "block", "group", "attn_head", "e4m3", "e3m4"]
WORDS += ["fp8", "none", "re:(", "", "x"]
LEAVES = (
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner),
    max_leaves=5,
)


def _table(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([*keys, "other"]), VALUES, max_size=4)


WEIGHTS = _table("granularity", "format", "dynamic", "group_size", "block_shape")
TIERS = _table("range", "compensation", "smoothing", "outlier_columns", "budget", "formats")
GOOD_WEIGHTS = st.sampled_from(
    [{"granularity": "channel"}, {"granularity": "block", "block_shape": [128, 128]}]
)
RECIPES = st.fixed_dictionaries(
    {"weights": GOOD_WEIGHTS | WEIGHTS | VALUES},
    optional={
        "name": VALUES,
        "description": VALUES,
        "inputs": WEIGHTS | VALUES,
        "kv": VALUES,
        "head": VALUES,
        "targets": VALUES,
        "ignore": VALUES,
        "tiers": TIERS | VALUES,
        "other": VALUES,
    },
)


def toml(value: Any) -> str:
    """Write a value as TOML does in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


@given(table=RECIPES)
@settings(max_examples=300, derandomize=True)
@example(table={"weights": {"granularity": "channel"}})
@example(table={"weights": {"granularity": "channel"}, "tiers": {"budget": math.nan}})
@example(table={"weights": {"granularity": "channel"}, "tiers": {"outlier_columns": 10**400}})
def test_any_table_is_a_recipe_or_a_recipe_error(table: dict[str, Any]) -> None:
    text = "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
    with contextlib.suppress(RecipeError):
        assert isinstance(parse_recipe(text, "r.toml", "r"), Recipe)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "9" * 5000,
        "a = [0x1" + "0" * 5000 + "]",
        "a = 1\na = 2",
        "\0",
        "a = 2000-13-45",
    ],
    ids=["nested", "long number", "long hexadecimal", "a key twice", "no text", "no date"],
)
def test_text_that_is_hard_on_parsers_is_a_recipe_error(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^r\.toml is not valid TOML: ."):
        parse_recipe(text, "r.toml", "r")
