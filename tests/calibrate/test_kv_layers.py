"""Layers that keep keys and values as they are: from the recipe to the cache that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate import calibrate
from quantkit.calibrate.kv_layers import check_entries, ignored_layers
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.recipe_file import load_recipe, parse_recipe
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError, RecipeError, UnsupportedError
from quantkit.export import export
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.kv_cache import PagedCache
from quantkit.runtime.loading import load_engine
from quantkit.runtime.shapes import parse_config
from quantkit.runtime.transformers_engine import TransformersEngine
from quantkit.runtime.weights import WeightReader
from quantkit.shards import read_json
from tests import checkpoints, tiny

GEMMA = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "linear_attention"]
}
MISTRAL = {"num_hidden_layers": 3, "sliding_window": 5}
LLAMA = {"num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("entries", "config", "expected"),
    [
        ((), LLAMA, ()),
        (("sliding_window",), GEMMA, (0, 2)),
        (("sliding_window",), {"text_config": GEMMA}, (0, 2)),
        (("2", "sliding_window"), GEMMA, (0, 2)),
        (("11", "3-5"), LLAMA, (3, 4, 5, 11)),
        (("10-99",), LLAMA, (10, 11)),
    ],
)
def test_entries_select_layers(
    entries: tuple[str, ...], config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert ignored_layers(entries, config) == expected


@pytest.mark.parametrize(
    ("entries", "config", "message"),
    [
        (("sliding_window",), LLAMA, "no layer of this model"),
        (("12",), LLAMA, "0 to 11"),
        (("3",), GEMMA, "no layer of this model"),  # it has a state, not a cache
        (("0-11",), LLAMA, 'use kv = "none"'),
        (("sliding_window",), MISTRAL, 'use kv = "none"'),
    ],
)
def test_entries_that_do_not_fit_the_model_are_refused(
    entries: tuple[str, ...], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        ignored_layers(entries, config)


@pytest.mark.parametrize("entry", ["sliding", "", "-1", "1-", "layer 3", "1.5"])
def test_entries_that_mean_nothing_are_refused_with_the_recipe(entry: str) -> None:
    with pytest.raises(RecipeError, match="kv_ignore has"):
        check_entries([entry])
    text = f'kv_ignore = ["{entry}"]\n[weights]\ngranularity = "channel"\n'
    with pytest.raises(RecipeError, match="my recipe: kv_ignore"):
        parse_recipe(text, "my recipe", "mine")


def recipe(*entries: str) -> Recipe:
    text = f'kv_ignore = {list(entries)!r}\n[weights]\ngranularity = "channel"\n'
    return parse_recipe(text, "a recipe", "mixed")


def test_a_recipe_with_them_is_native_while_it_quantizes_the_cache() -> None:
    assert not recipe("0").is_portable
    assert recipe("0").with_options(kv="none").is_portable
    assert load_recipe("fp8-dynamic").is_portable


@pytest.fixture(scope="module")
def mixed(
    model_of: Callable[[str], Path],
    calibration_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("mixed") / "gemma3"
    calibrate(
        model_of("gemma3"),
        out,
        recipe=recipe("sliding_window").with_options(tiers="none"),
        data=[str(calibration_file)],
        samples=8,
        progress=False,
    )
    return out


def test_the_checkpoint_says_so_and_has_scales_for_the_others_only(mixed: Path) -> None:
    block = read_json(mixed / "config.json")["quantization_config"]
    assert (block["quant_method"], block["kv_cache_ignore"]) == ("quantkit", [0])
    checkpoint = open_checkpoint(mixed)
    assert checkpoint.scheme.kv_ignore == (0,)
    scales = [name for name in checkpoint.names if name.endswith(("k_scale", "v_scale"))]
    assert [name.split(".")[2] for name in scales] == ["1", "1"]
    layers = read_json(mixed / "quantkit.json")["layers"]
    assert [layer["kv"] is None for layer in layers] == [True, False]


def test_caches_are_of_both_kinds_and_agree_with_transformers(mixed: Path) -> None:
    decoder = load_engine(mixed, dtype="float32")
    assert isinstance(decoder, Decoder)
    ids = tiny.random_ids(24)
    cache = decoder.new_cache(1, len(ids))
    assert isinstance(cache, PagedCache)
    kinds = [tensor.dtype for tensor in cache.tensors()[::4]]
    assert kinds == [torch.float32, torch.float8_e4m3fn]
    whole = decoder.forward(ids, [0], [len(ids)], cache, last_only=False)
    checkpoint = open_checkpoint(mixed)
    reader = WeightReader(checkpoint, torch.device("cpu"), torch.float32)
    other = TransformersEngine(reader, parse_config(checkpoint.config), quantize_kv=True)
    stored = other.new_cache(1, len(ids))
    expected = other.forward(ids, [0], [len(ids)], stored, last_only=False)
    # A key between two codes may round the other way; without its scale the cache is exact.
    torch.testing.assert_close(whole, expected, rtol=0, atol=2e-2)
    assert set(stored[0].scales) == {1}


def test_steps_of_one_token_equal_one_pass(mixed: Path) -> None:
    engine, ids = load_engine(mixed, dtype="float32"), tiny.random_ids(20)
    whole = engine.forward(ids, [0], [20], engine.new_cache(1, 20), last_only=False)
    cache = engine.new_cache(1, 20)
    for position in range(20):
        out = engine.forward(ids[position : position + 1], [0], [1], cache)
        torch.testing.assert_close(out[0], whole[position], rtol=0, atol=2e-2)


@pytest.mark.parametrize("format_name", ["compressed-tensors", "fp8-block", "modelopt"])
def test_other_containers_cannot_say_it_and_export_refuses(
    mixed: Path, tmp_path: Path, format_name: str
) -> None:
    with pytest.raises(UnsupportedError, match=r"layers 0 in 16 bits; calibrate without kv_ignore"):
        export(mixed, tmp_path / "out", format=format_name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["0", [-1], [True], [1.0], {"0": 1}])
def test_a_damaged_list_is_refused(mixed: Path, tmp_path: Path, value: Any) -> None:
    block = {**read_json(mixed / "config.json")["quantization_config"], "kv_cache_ignore": value}
    (tmp_path / "model.safetensors").write_bytes((mixed / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((mixed / "config.json").read_bytes())
    checkpoints.edit_config(tmp_path, quantization_config=block)
    with pytest.raises(CheckpointError, match="kv_cache_ignore"):
        open_checkpoint(tmp_path)
