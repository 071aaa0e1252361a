"""Recipe files, and which modules a recipe selects in a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.recipe_file import load_recipe, parse_recipe, recipe_names
from quantkit.calibrate.selection import match_names, resolve_modules
from quantkit.calibrate.tiers import Tiers
from quantkit.errors import RecipeError
from quantkit.scheme import Granularity, QuantSpec

LEAVES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
LAYER_0, LAYER_1 = ([f"model.layers.{n}.{leaf}" for leaf in LEAVES] for n in range(2))
LINEARS = [*LAYER_0, *LAYER_1, "lm_head"]
DYNAMIC = load_recipe("fp8-dynamic")
MINIMAL = "[weights]\ngranularity = 'channel'\n"


def assert_mentions(error: pytest.ExceptionInfo[RecipeError], *words: str) -> None:
    for word in words:
        assert word in str(error.value)


# Files.


def test_the_packaged_recipes_are_what_their_names_say() -> None:
    assert recipe_names() == ["fp8-accurate", "fp8-block", "fp8-dynamic", "fp8-static"]
    dynamic, static, block = (load_recipe(f"fp8-{n}") for n in ("dynamic", "static", "block"))
    assert dynamic.weights == QuantSpec(Granularity.CHANNEL)
    assert dynamic.inputs == QuantSpec(Granularity.TOKEN, dynamic=True)
    assert static.weights == static.inputs == QuantSpec(Granularity.TENSOR)
    assert block.weights == QuantSpec(Granularity.BLOCK, block_shape=(128, 128))
    assert block.inputs == QuantSpec(Granularity.GROUP, group_size=128, dynamic=True)
    accurate = load_recipe("fp8-accurate")
    assert (accurate.weights, accurate.inputs) == (QuantSpec(Granularity.CHANNEL), None)
    assert [r.is_portable for r in (dynamic, static, block, accurate)] == [True, True, True, False]
    for recipe in (dynamic, static, block):
        assert (recipe.head, recipe.ignore, recipe.kv) == (None, ("lm_head",), "fp8")
    assert (accurate.head, accurate.ignore, accurate.kv) == ("e3m4", (), "fp8-e3m4")
    for recipe in (dynamic, static, block, accurate):
        assert recipe.targets == ("Linear",)
        assert recipe.description


def test_a_file_is_read_and_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("kv = 'none'\nignore = []\n" + MINIMAL)
    recipe = load_recipe(path)
    assert recipe == Recipe("mine", QuantSpec(Granularity.CHANNEL), kv="none", ignore=())
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fp8-dynamc", ["'fp8-dynamc'", "did you mean 'fp8-dynamic'", "FILE.toml"]),
        ("nowhere/mine.toml", ["nowhere/mine.toml does not exist"]),
        (".toml", ["unknown recipe '.toml'"]),
    ],
)
def test_an_unknown_recipe_names_the_nearest(given: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(given)
    assert_mentions(caught, *words)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    for name in ("binary.toml", "folder.toml"):
        with pytest.raises(RecipeError, match=f"cannot read recipe file .*{name}"):
            load_recipe(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no [weights] table"]),
        ("weights = ", ["not valid TOML"]),
        ("wieghts = 1", ["'wieghts'", "did you mean 'weights'"]),
        ("weights = 'fp8'", ["[weights] must be a table", "'fp8'"]),
        ("[weights]", ["[weights] has no 'granularity'", "channel"]),
        ("[weights]\ngranularity = 'chanel'", ["'chanel'", "did you mean 'channel'"]),
        ("[weights]\ngranularty = 'channel'", ["'granularty'", "did you mean 'granularity'"]),
        ("[weights]\ngranularity = 3", ["granularity must be a string", "3"]),
        (MINIMAL + "dynamic = 'yes'", ["dynamic must be true or false", "'yes'"]),
        (MINIMAL + "dynamic = true", ["weights are 'channel', dynamic", "channel static"]),
        (MINIMAL + "format = 'e4m4'", ["'e4m4'", "did you mean 'e4m3'"]),
        (
            MINIMAL + "format = 'e5m2'\n[inputs]\ngranularity = 'token'\ndynamic = true",
            ["E4M3 on both sides", "leave out [inputs]"],
        ),
        (MINIMAL + "[tiers]\nrnage = true", ["'rnage'", "did you mean 'range'"]),
        (MINIMAL + "[tiers]\nrange = 1", ["range must be true or false", "1"]),
        (MINIMAL + "[tiers]\nbudget = true", ["budget must be a number", "True"]),
        (MINIMAL + "[tiers]\nbudget = 3", ["1 to 2 bytes a weight", "3"]),
        (MINIMAL + "[tiers]\noutlier_columns = 0.9", ["share of 0 to 0.5", "0.9"]),
        (MINIMAL + "[tiers]\nformats = ['e3m5']", ["'e3m5'", "did you mean 'e3m4'"]),
        ("tiers = 3\n" + MINIMAL, ["[tiers] must be a table"]),
        (MINIMAL + "group_size = 128", ["'channel' takes no group_size"]),
        ("[weights]\ngranularity = 'token'", ["weights are 'token'"]),
        ("[weights]\ngranularity = 'block'", ["'block' needs block_shape"]),
        ("[weights]\ngranularity = 'block'\nblock_shape = [128]", ["[rows, columns]", "[128]"]),
        ("[weights]\ngranularity = 'block'\nblock_shape = [0, 8]", ["above 0", "got 0"]),
        (MINIMAL + "[inputs]\ngranularity = 'channel'", ["inputs are 'channel', static"]),
        (MINIMAL + "[inputs]\ngranularity = 'token'", ["inputs are 'token', static"]),
        (
            MINIMAL + "[inputs]\ngranularity = 'group'\ndynamic = true\ngroup_size = true",
            ["group_size must be a whole number", "True"],
        ),
        ("kv = 'fp9'\n" + MINIMAL, ["'fp9'", "did you mean 'fp8'"]),
        ("kv = true\n" + MINIMAL, ["kv must be a string"]),
        ("targets = 'Linear'\n" + MINIMAL, ["targets must be a list", "'Linear'"]),
        ("targets = []\n" + MINIMAL, ["targets is empty"]),
        ("ignore = [1]\n" + MINIMAL, ["ignore must be a list", "[1]"]),
        ("ignore = ['']\n" + MINIMAL, ["ignore must be a list"]),
    ],
)
def test_a_malformed_recipe_is_quoted_with_its_file(text: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "mine.toml", "mine")
    assert_mentions(caught, "mine.toml", *words)


# Options.


def test_options_override_the_cache_and_add_to_ignore() -> None:
    recipe = DYNAMIC.with_options(kv="none", ignore=["lm_head", "down_proj", "down_proj"])
    assert recipe.kv == "none"
    assert set(recipe.ignore) == {"lm_head", "down_proj"}
    assert DYNAMIC.with_options() == DYNAMIC
    with pytest.raises(RecipeError, match=r"'fp-8'.*did you mean 'fp8'"):
        DYNAMIC.with_options(kv="fp-8")


@pytest.mark.parametrize(
    ("name", "kv", "tiers", "needs"),
    [
        ("fp8-dynamic", "fp8", "none", True),
        ("fp8-dynamic", "fp8-head", "none", True),
        ("fp8-dynamic", "none", "none", False),
        ("fp8-dynamic", "none", None, True),
        ("fp8-dynamic", "none", "keep", True),
        ("fp8-block", "none", "none", False),
        ("fp8-static", "none", "none", True),
    ],
)
def test_data_is_needed_only_where_something_is_measured(
    name: str, kv: str, tiers: str | None, needs: bool
) -> None:
    assert load_recipe(name).with_options(kv=kv, tiers=tiers).needs_data is needs


def test_tiers_are_switched_off_by_leaving_them_out() -> None:
    recipe = load_recipe("fp8-accurate")
    only = recipe.with_options(tiers="range, formats").tiers
    assert only == Tiers(compensation=False, formats=recipe.tiers.formats)
    assert recipe.with_options(budget=1.5).tiers.budget == 1.5
    assert not DYNAMIC.with_options(tiers="smoothing,keep").tiers.range
    with pytest.raises(RecipeError, match=r"unknown tier 'rang' .*'range'.*keep"):
        recipe.with_options(tiers="rang")


def test_the_scheme_of_a_recipe() -> None:
    scheme = DYNAMIC.with_options(kv="fp8-head").scheme(["lm_head"])
    assert (scheme.weights, scheme.inputs) == (DYNAMIC.weights, DYNAMIC.inputs)
    assert scheme.kv == QuantSpec(Granularity.HEAD)
    assert scheme.ignore == ("lm_head",)


# Modules.


def test_all_linear_modules_but_the_head_by_default() -> None:
    assert resolve_modules(DYNAMIC, LINEARS) == ([*LAYER_0, *LAYER_1], ["lm_head"])


def test_a_tied_head_is_ignored_and_listed_though_it_has_no_tensor() -> None:
    assert resolve_modules(DYNAMIC, LINEARS, tied_head=True)[1] == ["lm_head"]
    assert resolve_modules(DYNAMIC, LINEARS[:-1], tied_head=True)[1] == ["lm_head"]


def test_a_model_without_head_needs_no_change_to_the_recipe() -> None:
    assert resolve_modules(DYNAMIC, LINEARS[:-1]) == ([*LAYER_0, *LAYER_1], [])


def test_lm_head_means_the_output_head_whatever_its_name() -> None:
    names = [*LAYER_0, "embed_out"]
    assert resolve_modules(DYNAMIC, names, head="embed_out") == (LAYER_0, ["embed_out"])


@pytest.mark.parametrize(
    "recipe",
    [
        replace(DYNAMIC, ignore=()),
        replace(DYNAMIC, targets=("Linear", "lm_head")),
        replace(DYNAMIC, targets=("Linear", "lm_head"), ignore=()),
    ],
    ids=["not ignored", "targeted", "both"],
)
@pytest.mark.parametrize("linears", [LINEARS, LINEARS[:-1]], ids=["module", "no module"])
def test_quantizing_a_tied_head_names_the_tie(recipe: Recipe, linears: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_modules(recipe, linears, tied_head=True)
    assert_mentions(caught, "lm_head", "ties", "tie_word_embeddings")


def test_an_untied_head_is_quantized_on_request_only_without_contradiction() -> None:
    assert resolve_modules(replace(DYNAMIC, ignore=()), LINEARS) == (LINEARS, [])
    with pytest.raises(RecipeError, match=r"'lm_head' in targets and in ignore"):
        resolve_modules(replace(DYNAMIC, targets=("Linear", "lm_head")), LINEARS)


@pytest.mark.parametrize(
    ("entry", "ignored"),
    [
        ("down_proj", [LAYER_0[-1], LAYER_1[-1]]),
        ("mlp.down_proj", [LAYER_0[-1], LAYER_1[-1]]),
        (LAYER_1[3], [LAYER_1[3]]),
        ("layers.0", LAYER_0),
        ("re:.*layers\\.1\\.", LAYER_1),
        ("re:.*_proj$", None),
    ],
)
def test_ignore_takes_parts_of_names_and_regexes(entry: str, ignored: list[str] | None) -> None:
    recipe = DYNAMIC.with_options(ignore=[entry])
    if ignored is None:
        with pytest.raises(RecipeError, match="leaves nothing to quantize"):
            resolve_modules(recipe, LINEARS)
    else:
        assert resolve_modules(recipe, LINEARS)[1] == [*ignored, "lm_head"]


def test_targets_select_and_the_rest_is_ignored() -> None:
    recipe = replace(DYNAMIC, targets=("down_proj", "re:.*o_proj"))
    quantized, ignored = resolve_modules(recipe, LINEARS)
    assert quantized == [LAYER_0[3], LAYER_0[6], LAYER_1[3], LAYER_1[6]]
    assert sorted(quantized + ignored) == sorted(LINEARS)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("lm_haed", ["ignore entry 'lm_haed'", "did you mean 'lm_head'", "--dry-run"]),
        ("re:.*(unclosed", ["'re:.*(unclosed'", "not a valid regex"]),
        ("mlp.gate$", ["'mlp.gate$'", "did you mean 'mlp.gate_proj'"]),
        ("re:down_proj", ["'re:down_proj'", "matches no linear module"]),
        ("proj", ["'proj'", "matches no linear module"]),
        ("model.layers.0.mlp.down_prj", ["did you mean 'model.layers.0.mlp.down_proj'"]),
    ],
)
def test_an_ignore_entry_that_matches_nothing_is_quoted(entry: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_modules(DYNAMIC.with_options(ignore=[entry]), LINEARS)
    assert_mentions(caught, *words)


def test_a_target_that_matches_nothing_is_quoted() -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_modules(replace(DYNAMIC, targets=("Linaer",)), LINEARS)
    assert_mentions(caught, "targets entry 'Linaer'", "did you mean 'Linear'")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            DYNAMIC.with_options(ignore=[LAYER_0[0]]),
            ["(q_proj, k_proj, v_proj) of model.layers.0.self_attn", f"{LAYER_0[0]} would stay"],
        ),
        (DYNAMIC.with_options(ignore=["re:.*mlp.gate"]), ["(gate_proj, up_proj)", "gate_proj"]),
        (replace(DYNAMIC, targets=("k_proj",)), ["q_proj, k_proj, v_proj", LAYER_0[2]]),
    ],
    ids=["ignore one", "unescaped dot", "target one"],
)
def test_splitting_a_fused_group_names_the_group_and_the_members(
    recipe: Recipe, words: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_modules(recipe, LINEARS)
    assert_mentions(caught, "fused group", *words)


def test_a_group_may_be_ignored_as_a_whole_and_lack_members() -> None:
    recipe = DYNAMIC.with_options(ignore=["layers.0.self_attn"])
    assert resolve_modules(recipe, LINEARS)[1] == [*LAYER_0[:4], "lm_head"]
    assert resolve_modules(DYNAMIC, ["layers.0.k_proj"])[0] == ["layers.0.k_proj"]


def test_a_model_without_linear_modules_leaves_nothing() -> None:
    with pytest.raises(RecipeError, match="nothing to quantize"):
        resolve_modules(DYNAMIC, [])


def test_plain_patterns_match_whole_parts_only() -> None:
    names = ["a.gate", "a.gate_proj", "a.gate.b"]
    assert match_names("gate", names, "ignore") == ["a.gate", "a.gate.b"]
    assert match_names("a.gate", names, "ignore") == ["a.gate", "a.gate.b"]
    assert match_names("re:a\\.gate$", names, "ignore") == ["a.gate"]
