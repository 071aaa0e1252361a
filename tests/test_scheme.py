"""QuantSpec and Scheme: validation, shapes, and the `quantization_config` form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from pydantic import ValidationError

from quantkit.calibrate.recipe_file import load_recipe, recipe_names
from quantkit.containers import default_container, read_scheme
from quantkit.errors import CheckpointError, RecipeError
from quantkit.scheme import Granularity, QuantSpec, Scheme, fused_siblings

CHANNEL = QuantSpec(Granularity.CHANNEL)
KV = ["fp8", "fp8-head", "none"]


def block_of(scheme: Scheme) -> dict[str, Any]:
    """The `quantization_config` that a calibration writes, as a reader gets it."""
    block: dict[str, Any] = json.loads(json.dumps(default_container(scheme).to_config(scheme)))
    return block


def scheme_of(block: dict[str, Any]) -> Scheme:
    return read_scheme({"quantization_config": block})[1]


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", [n for n in recipe_names() if load_recipe(n).is_portable])
def test_compressed_tensors_parses_what_every_recipe_writes(name: str, kv: str) -> None:
    recipe = load_recipe(name).with_options(kv=kv)
    config = block_of(recipe.scheme(["lm_head"]))
    parsed = QuantizationConfig.model_validate(config)
    group = parsed.config_groups["group_0"]
    assert group.weights.strategy == recipe.weights.granularity.value
    assert group.weights.block_structure == (
        list(recipe.weights.block_shape) if recipe.weights.block_shape else None
    )
    assert group.input_activations.dynamic == recipe.inputs.dynamic
    assert group.input_activations.group_size == recipe.inputs.group_size
    assert parsed.ignore == ["lm_head"]
    assert (parsed.kv_cache_scheme is None) == (kv == "none")


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", recipe_names())
def test_a_scheme_survives_its_config(name: str, kv: str) -> None:
    scheme = load_recipe(name).with_options(kv=kv).scheme(["lm_head", "model.layers.0.mlp"])
    assert scheme_of(block_of(scheme)) == scheme


def test_weights_only_survives_its_config() -> None:
    scheme = Scheme(weights=CHANNEL)
    assert block_of(scheme)["config_groups"]["group_0"]["input_activations"] is None
    assert scheme_of(block_of(scheme)) == scheme
    QuantizationConfig.model_validate(block_of(scheme))


def test_config_has_the_keys_engines_expect_and_no_key_they_reject() -> None:
    config = block_of(load_recipe("fp8-dynamic").scheme(["lm_head"]))
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == "float-quantized"
    assert config["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
        "group_size": None,
    }
    assert block_of(Scheme(CHANNEL))["kv_cache_scheme"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": "gptq"}, ["quant_method='gptq'", "compressed-tensors"]),
        ({"format": "pack-quantized"}, ["pack-quantized"]),
        ({"config_groups": {}}, ["0 config groups"]),
        ({"config_groups": {"a": {"weights": None}}}, ["with weights"]),
    ],
    ids=["method", "format", "no group", "no weights"],
)
def test_other_containers_are_refused_by_name(change: dict[str, Any], words: list[str]) -> None:
    config = block_of(Scheme(CHANNEL)) | change
    with pytest.raises(CheckpointError) as caught:
        scheme_of(config)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": "tensro"}, ["'tensro'", "tensor"]),
        ({"num_bits": 4}, ["num_bits=4"]),
        ({"type": "int"}, ["type=int"]),
        ({"symmetric": False}, ["symmetric=False"]),
    ],
    ids=["strategy", "bits", "type", "asymmetric"],
)
def test_specs_quantkit_cannot_read_are_refused_by_name(
    change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        QuantSpec.from_config(CHANNEL.to_config() | change)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": "group"},
        {"strategy": "group", "group_size": 0},
        {"strategy": "group", "group_size": 1.5},
        {"strategy": "block"},
        {"strategy": "block", "block_structure": [128]},
        {"strategy": "block", "block_structure": "128x128"},
        {"strategy": "block", "block_structure": [0, 128]},
    ],
    ids=["no size", "size 0", "half a column", "no shape", "one number", "text", "zero rows"],
)
def test_incomplete_specs_in_a_checkpoint_are_checkpoint_errors(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        QuantSpec.from_config(CHANNEL.to_config() | change)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"granularity": Granularity.GROUP}, ["'group' needs group_size"]),
        ({"granularity": Granularity.BLOCK}, ["'block' needs block_shape"]),
        ({"granularity": Granularity.TENSOR, "group_size": 128}, ["takes no group_size", "128"]),
        ({"granularity": Granularity.TOKEN, "block_shape": (1, 2)}, ["takes no block_shape"]),
        ({"granularity": Granularity.GROUP, "group_size": -1}, ["above 0", "-1"]),
        ({"granularity": Granularity.TENSOR, "format": "e4m4"}, ["'e4m4'", "did you mean 'e4m3'"]),
    ],
)
def test_contradictory_specs_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        QuantSpec(**fields)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("spec", "stored", "tile"),
    [
        (QuantSpec(Granularity.TENSOR), (1,), (300, 200)),
        (QuantSpec(Granularity.CHANNEL), (300, 1), (1, 200)),
        (QuantSpec(Granularity.TOKEN), (300, 1), (1, 200)),
        (QuantSpec(Granularity.GROUP, group_size=128), (300, 2), (1, 128)),
        (QuantSpec(Granularity.BLOCK, block_shape=(128, 128)), (3, 2), (128, 128)),
    ],
    ids=lambda value: value.granularity.value if isinstance(value, QuantSpec) else None,
)
def test_scale_shape_tile_and_grid_fit_together(
    spec: QuantSpec, stored: tuple[int, ...], tile: tuple[int, int]
) -> None:
    assert spec.scale_shape(300, 200) == stored
    assert spec.tile(300, 200) == tile
    grid = spec.grid(torch.ones(stored))
    assert grid.ndim == 2
    assert grid.shape == (-(-300 // tile[0]), -(-200 // tile[1]))


def test_blocks_larger_than_the_matrix_give_one_scale() -> None:
    spec = QuantSpec(Granularity.BLOCK, block_shape=(128, 128))
    assert spec.scale_shape(15, 32) == (1, 1)


def test_heads_belong_to_the_cache_only() -> None:
    with pytest.raises(RecipeError, match="KV cache only"):
        QuantSpec(Granularity.HEAD).tile(4, 4)


def test_specs_are_values() -> None:
    assert replace(CHANNEL) == CHANNEL
    assert hash(replace(CHANNEL)) == hash(CHANNEL)
    with pytest.raises(AttributeError):
        CHANNEL.format = "e5m2"  # type: ignore[misc]


def test_fused_siblings_of_every_family() -> None:
    attention = "model.layers.3.self_attn"
    group = tuple(f"{attention}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj"))
    assert all(fused_siblings(name) == group for name in group)
    assert fused_siblings("layers.0.mlp.up_proj") == (
        "layers.0.mlp.gate_proj",
        "layers.0.mlp.up_proj",
    )
    assert fused_siblings("experts.0.w3") == ("experts.0.w1", "experts.0.w3")
    assert fused_siblings("layers.0.mlp.down_proj") == ("layers.0.mlp.down_proj",)
    assert fused_siblings("q_proj") == ("q_proj", "k_proj", "v_proj")
    assert fused_siblings("lm_head") == ("lm_head",)


def test_a_native_scheme_survives_json_and_is_refused_by_others() -> None:
    formats = {"model.layers.0.mlp.down_proj": "e5m2"}
    scheme = Scheme(QuantSpec(Granularity.CHANNEL, "e3m4"), None, None, ("lm_head",), True, formats)
    config = block_of(scheme)
    assert config["quant_method"] == "quantkit"
    assert scheme_of(config) == scheme
    assert scheme.weights_of("model.layers.0.mlp.down_proj").format == "e5m2"
    assert scheme.weights_of("model.layers.0.mlp.up_proj").format == "e3m4"
    with pytest.raises(ValidationError, match="config_groups"):
        QuantizationConfig.model_validate(config)


def test_a_native_scheme_with_an_unknown_format_is_refused() -> None:
    block = block_of(Scheme(CHANNEL, native=True))
    block["formats"] = {"a": "e9m9"}
    with pytest.raises(CheckpointError, match="unknown format 'e9m9'"):
        scheme_of(block)


def test_a_portable_scheme_has_no_formats_of_its_own() -> None:
    with pytest.raises(RecipeError, match="portable"):
        Scheme(QuantSpec(Granularity.CHANNEL, "e3m4"))
