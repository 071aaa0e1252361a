"""Every container: schemes there and back, the shapes of scales, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate.recipe_file import load_recipe, recipe_names
from quantkit.containers import CONTAINERS, container_of, default_container, read_scheme
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.scheme import Granularity, QuantSpec, Scheme

KV = ["fp8", "fp8-head", "none"]
HOLDS = {
    ("compressed-tensors", "fp8-block"): KV,
    ("compressed-tensors", "fp8-dynamic"): KV,
    ("compressed-tensors", "fp8-static"): KV,
    ("fp8-block", "fp8-block"): ["fp8", "none"],
    ("modelopt", "fp8-dynamic"): ["fp8", "none"],
    ("modelopt", "fp8-static"): ["fp8", "none"],
    ("native", "fp8-accurate"): KV,
}
"""What each container can say of each recipe: the kinds of KV cache."""
IGNORED = ["lm_head", "model.layers.0.mlp.down_proj"]
TENSOR, CHANNEL = QuantSpec(Granularity.TENSOR), QuantSpec(Granularity.CHANNEL)
TOKEN = QuantSpec(Granularity.TOKEN, dynamic=True)
BLOCK = QuantSpec(Granularity.BLOCK, block_shape=(128, 128))
GROUP = QuantSpec(Granularity.GROUP, group_size=128, dynamic=True)
HEAD = QuantSpec(Granularity.HEAD)


def scheme_of_recipe(name: str, kv: str) -> Scheme:
    return load_recipe(name).with_options(kv=kv).scheme(IGNORED)


def as_read(value: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(value))
    return result


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_scheme_survives_its_container_or_is_refused(name: str, recipe: str, kv: str) -> None:
    container, scheme = CONTAINERS[name], scheme_of_recipe(recipe, kv)
    if kv not in HOLDS.get((name, recipe), []):
        with pytest.raises(UnsupportedError, match=name if name != "native" else "portable"):
            container.to_config(scheme)
        return
    block = as_read(container.to_config(scheme))
    assert block["quant_method"] == container.method
    assert read_scheme({"quantization_config": block}) == (container, scheme)
    for content in container.side_files(scheme).values():
        assert container.from_config(as_read(content)) == scheme


def test_containers_are_told_apart_by_their_method() -> None:
    assert {container.method for container in CONTAINERS.values()} == {
        "compressed-tensors", "fp8", "modelopt", "quantkit"
    }  # fmt: skip
    for name, container in CONTAINERS.items():
        assert container.name == name
        assert (
            container_of({"quantization_config": {"quant_method": container.method}}) is container
        )


def test_calibration_writes_compressed_tensors_unless_the_scheme_is_native() -> None:
    assert default_container(Scheme(CHANNEL)).name == "compressed-tensors"
    assert default_container(Scheme(CHANNEL, native=True)).name == "native"


@pytest.mark.parametrize("method", ["gptq", "quark", "fbgemm_fp8", "mxfp8", "awq", None])
def test_an_unknown_method_is_refused_with_the_known_ones(method: str | None) -> None:
    with pytest.raises(CheckpointError) as caught:
        container_of({"quantization_config": {"quant_method": method, "bits": 8}})
    for word in (f"quant_method={str(method)!r}", "'fp8'", "'modelopt'", "'compressed-tensors'"):
        assert word in str(caught.value)


def test_a_config_without_quantization_is_named(tmp_path: Path) -> None:
    for config in ({}, {"quantization_config": None}, {"text_config": None}):
        with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config"):
            read_scheme(config, tmp_path)


# Shapes. Stored and own scales hold the same numbers in the same order.


@pytest.mark.parametrize(
    ("name", "spec", "written", "also_read"),
    [
        ("compressed-tensors", TENSOR, (1,), [()]),
        ("compressed-tensors", CHANNEL, (300, 1), []),
        ("compressed-tensors", BLOCK, (3, 2), []),
        ("native", CHANNEL, (300, 1), []),
        ("fp8-block", BLOCK, (3, 2), []),
        ("fp8-block", TENSOR, (1,), [(), (1, 1)]),
        ("modelopt", TENSOR, (), [(1,)]),
        ("modelopt", CHANNEL, (300,), [(300, 1)]),
        ("modelopt", BLOCK, (3, 1, 2, 1), [(3, 2)]),
    ],
)
def test_a_weights_scale_goes_there_and_back(
    name: str, spec: QuantSpec, written: tuple[int, ...], also_read: list[tuple[int, ...]]
) -> None:
    shapes = CONTAINERS[name].weight_scale_shapes(spec, 300, 200)
    assert shapes == (written, *also_read)
    own = torch.arange(1.0, 1.0 + torch.Size(spec.scale_shape(300, 200)).numel())
    own = own.reshape(spec.scale_shape(300, 200))
    for shape in shapes:
        assert torch.equal(own.reshape(shape).reshape(own.shape), own)


def test_a_single_block_of_modelopt_may_be_0_d_and_many_may_not() -> None:
    modelopt = CONTAINERS["modelopt"]
    assert () in modelopt.weight_scale_shapes(BLOCK, 100, 128)
    assert () not in modelopt.weight_scale_shapes(BLOCK, 129, 128)


@pytest.mark.parametrize(
    ("name", "inputs", "per_layer", "key", "value"),
    [
        ("compressed-tensors", (1,), (1,), "k_scale", "v_scale"),
        ("fp8-block", (1,), (1,), "k_scale", "v_scale"),
        ("modelopt", (), (), "k_proj.k_scale", "v_proj.v_scale"),
    ],
)
def test_what_is_written_for_inputs_and_the_kv_cache(
    name: str, inputs: tuple[int, ...], per_layer: tuple[int, ...], key: str, value: str
) -> None:
    container = CONTAINERS[name]
    assert container.input_scale_shapes()[0] == inputs
    assert container.kv_scale_shapes(TENSOR, 4)[0] == per_layer
    assert (container.names.k_scale[0], container.names.v_scale[0]) == (key, value)
    assert container.names.input_scale[0] == "input_scale"
    expected = "weight_scale_inv" if name == "fp8-block" else "weight_scale"
    assert container.names.weight_scale[0] == expected


def test_heads_have_a_scale_each_in_compressed_tensors() -> None:
    assert CONTAINERS["compressed-tensors"].kv_scale_shapes(HEAD, 4)[0] == (4, 1, 1)


# What each container refuses to write.


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("fp8-block", Scheme(BLOCK)),
        ("fp8-block", Scheme(BLOCK, TENSOR)),
        ("fp8-block", Scheme(BLOCK, replace(GROUP, group_size=64))),
        ("fp8-block", Scheme(replace(BLOCK, block_shape=(64, 128)), GROUP)),
        ("fp8-block", Scheme(BLOCK, GROUP, HEAD)),
        ("fp8-block", Scheme(BLOCK, GROUP, native=True)),
        ("modelopt", Scheme(TENSOR)),
        ("modelopt", Scheme(TENSOR, replace(TENSOR, dynamic=True))),
        ("modelopt", Scheme(CHANNEL, TENSOR)),
        ("modelopt", Scheme(BLOCK)),
        ("modelopt", Scheme(TENSOR, TENSOR, HEAD)),
        ("modelopt", Scheme(TENSOR, TENSOR, native=True)),
        ("compressed-tensors", Scheme(TENSOR, TENSOR, native=True)),
        ("native", Scheme(TENSOR, TENSOR)),
    ],
)
def test_a_scheme_that_a_container_cannot_say_is_refused(name: str, scheme: Scheme) -> None:
    container = CONTAINERS[name]
    with pytest.raises(UnsupportedError):
        container.to_config(scheme)
    if name == "modelopt":
        with pytest.raises(UnsupportedError):
            container.side_files(scheme)


def test_what_is_returned_is_the_callers_own() -> None:
    container, scheme = CONTAINERS["modelopt"], scheme_of_recipe("fp8-static", "fp8")
    first = container.to_config(scheme)
    first["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    first["kv_cache_scheme"].clear()
    assert container.from_config(container.to_config(scheme)) == scheme
