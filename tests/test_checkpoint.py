"""Opening a checkpoint: what its tensors mean, and every way in which they cannot be trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibrate.recipe_file import load_recipe
from quantkit.checkpoint import cached_layers, check_scale, open_checkpoint, read_checkpoint
from quantkit.containers import default_container
from quantkit.errors import CheckpointError
from quantkit.numerics import E4M3, amax_to_scale, fake_quantize, quantize, tile_amax
from quantkit.shards import ShardWriter, write_json

ROWS, COLUMNS, NUM_LAYERS, KV_HEADS = 200, 300, 2, 2
RECIPES = ["fp8-dynamic", "fp8-static", "fp8-block"]
Tensors = dict[str, Tensor]


def source_weight(layer: int) -> Tensor:
    generator = torch.Generator().manual_seed(layer)
    return (torch.randn(ROWS, COLUMNS, generator=generator) * 0.02).bfloat16()


def checkpoint_tensors(recipe: str, kv: str) -> Tensors:
    """A model of one quantized projection per layer, an embedding and a norm."""
    parts = load_recipe(recipe)
    spec = parts.weights
    tensors: Tensors = {"embed.weight": torch.randn(8, COLUMNS).bfloat16(), "norm": torch.ones(3)}
    for layer in range(NUM_LAYERS):
        weight, attention = source_weight(layer), f"model.layers.{layer}.self_attn"
        tile = spec.tile(ROWS, COLUMNS)
        scale = amax_to_scale(tile_amax(weight, tile), E4M3)
        stored = scale.reshape(spec.scale_shape(ROWS, COLUMNS))
        tensors[f"{attention}.q_proj.weight"] = quantize(weight, scale, E4M3, tile)
        tensors[f"{attention}.q_proj.weight_scale"] = stored
        tensors[f"{attention}.q_proj.bias"] = torch.randn(ROWS).bfloat16()
        if parts.inputs is not None and not parts.inputs.dynamic:
            tensors[f"{attention}.q_proj.input_scale"] = torch.tensor([0.5])
        shape = {"fp8": (1,), "fp8-head": (KV_HEADS, 1, 1)}.get(kv)
        if shape:
            tensors[f"{attention}.k_scale"] = torch.full(shape, 0.25 + layer)
            tensors[f"{attention}.v_scale"] = torch.full(shape, 0.5 + layer)
    return tensors


def save(
    folder: Path,
    recipe: str = "fp8-dynamic",
    kv: str = "fp8",
    edit: Callable[[Tensors], object] = lambda tensors: None,
    max_shard_bytes: int = 10**9,
    **config: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(recipe, kv)
    edit(tensors)
    writer = ShardWriter(folder, max_shard_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    scheme = load_recipe(recipe).with_options(kv=kv).scheme(["lm_head"])
    block = default_container(scheme).to_config(scheme)
    base = {"num_hidden_layers": NUM_LAYERS, "quantization_config": block}
    write_json(folder / "config.json", base | config)
    return folder


Q0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("recipe", RECIPES)
def test_save_load_dequantize_equals_fake_quantize_bit_for_bit(tmp_path: Path, recipe: str) -> None:
    checkpoint = open_checkpoint(save(tmp_path, recipe, max_shard_bytes=70_000))
    spec = load_recipe(recipe).weights
    tile = spec.tile(ROWS, COLUMNS)
    assert checkpoint.quantized == [f"model.layers.{n}.self_attn.q_proj" for n in range(NUM_LAYERS)]
    for layer, module in enumerate(checkpoint.quantized):
        weight = source_weight(layer)
        scale = amax_to_scale(tile_amax(weight, tile), E4M3)
        stored = checkpoint.weight(module)
        for dtype in (torch.float32, torch.bfloat16):
            expected = fake_quantize(weight.to(dtype), scale, E4M3, tile)
            assert torch.equal(stored.dequantize(dtype), expected)
        assert stored.spec == spec
        assert (stored.input_scale is None) == (recipe != "fp8-static")


@pytest.mark.parametrize(
    ("recipe", "groups", "group_size"),
    [("fp8-dynamic", 1, COLUMNS), ("fp8-static", 1, COLUMNS), ("fp8-block", 3, 128)],
)
def test_row_scales_rebuild_the_weight_for_every_granularity(
    tmp_path: Path, recipe: str, groups: int, group_size: int
) -> None:
    stored = open_checkpoint(save(tmp_path, recipe)).weight(Q0)
    scales, size = stored.row_scales()
    assert (scales.shape, scales.dtype, size) == ((ROWS, groups), torch.float32, group_size)
    assert scales.is_contiguous()
    spread = scales.repeat_interleave(size, dim=1)[:, :COLUMNS]
    assert torch.equal(stored.codes.float() * spread, stored.dequantize())


def test_read_checkpoint_gives_plain_weights_and_no_scales(tmp_path: Path) -> None:
    save(tmp_path, "fp8-static")
    plain = read_checkpoint(tmp_path, torch.bfloat16)
    tensors = checkpoint_tensors("fp8-static", "fp8")
    assert sorted(plain) == sorted(name for name in tensors if not name.endswith("_scale"))
    assert plain[f"{Q0}.weight"].dtype == torch.bfloat16
    opened = open_checkpoint(tmp_path)
    assert torch.equal(plain[f"{Q0}.weight"], opened.weight(Q0).dequantize(torch.bfloat16))
    assert torch.equal(plain["embed.weight"], opened.tensor("embed.weight"))
    assert plain["embed.weight"].dtype == torch.bfloat16


def test_read_checkpoint_needs_no_kv_scales(tmp_path: Path) -> None:
    save(tmp_path, edit=lambda t: t.pop("model.layers.1.self_attn.k_scale"))
    assert f"{Q0}.weight" in read_checkpoint(tmp_path)


# KV cache scales.


@pytest.mark.parametrize(("kv", "heads"), [("fp8", 1), ("fp8-head", KV_HEADS)])
def test_kv_scales_come_flat_and_per_layer(tmp_path: Path, kv: str, heads: int) -> None:
    checkpoint = open_checkpoint(save(tmp_path, kv=kv))
    for layer in range(NUM_LAYERS):
        key, value = checkpoint.kv_scales(layer)
        assert key.tolist() == [0.25 + layer] * heads
        assert value.tolist() == [0.5 + layer] * heads
    with pytest.raises(CheckpointError, match="layer 2"):
        checkpoint.kv_scales(2)


def rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[f"model.layers.0.self_attn.{new}"] = tensors.pop(f"model.layers.0.self_attn.{old}")


@pytest.mark.parametrize("alias", ["k_proj.k_scale", "k_proj.output_scale"])
def test_other_tools_names_for_kv_scales_are_read(tmp_path: Path, alias: str) -> None:
    folder = save(tmp_path, edit=lambda t: rename(t, "k_scale", alias))
    assert open_checkpoint(folder).kv_scales(0)[0].tolist() == [0.25]


def test_all_aliases_at_once_are_read(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        rename(tensors, "k_scale", "k_proj.output_scale")
        rename(tensors, "v_scale", "v_proj.output_scale")

    key, value = open_checkpoint(save(tmp_path, edit=edit)).kv_scales(0)
    assert (key.tolist(), value.tolist()) == ([0.25], [0.5])


def test_a_missing_kv_scale_is_named(tmp_path: Path) -> None:
    save(tmp_path, edit=lambda t: t.pop("model.layers.1.self_attn.v_scale"))
    with pytest.raises(CheckpointError, match=r"no model\.layers\.1\.self_attn\.v_scale"):
        open_checkpoint(tmp_path)
    open_checkpoint(tmp_path, kv=False)


def test_a_declared_kv_cache_without_any_scale_is_refused(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
            del tensors[name]

    save(tmp_path, edit=edit)
    with pytest.raises(CheckpointError, match=r"declares an FP8 KV cache.*layer 0"):
        open_checkpoint(tmp_path)


def test_a_checkpoint_without_kv_cache_has_no_kv_scales(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, kv="none"))
    with pytest.raises(CheckpointError, match=r"no KV cache scales for layer 0.*--kv fp8"):
        checkpoint.kv_scales(0)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 3}, [0, 1, 2]),
        ({"n_layer": 2}, [0, 1]),
        ({"text_config": {"num_hidden_layers": 2}, "num_hidden_layers": 5}, [0, 1]),
        (
            {
                "num_hidden_layers": 4,
                "layer_types": ["conv", "full_attention", "linear_attention", "sliding_attention"],
            },
            [1, 3],
        ),
    ],
    ids=["plain", "gpt2", "nested", "hybrid"],
)
def test_layers_with_a_cache(config: dict[str, Any], layers: list[int]) -> None:
    assert cached_layers(config) == layers


# What must be refused.

BAD_VALUES = [0.0, -0.5, float("nan"), float("inf")]


@pytest.mark.parametrize("value", BAD_VALUES, ids=str)
@pytest.mark.parametrize(
    "name", [f"{Q0}.weight_scale", f"{Q0}.input_scale", "model.layers.0.self_attn.k_scale"]
)
def test_a_scale_that_is_not_finite_and_positive_is_named(
    tmp_path: Path, name: str, value: float
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name].flatten()[0] = value

    save(tmp_path, "fp8-static", edit=edit)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        open_checkpoint(tmp_path)
    assert "1 of 1" in str(caught.value)


def test_one_bad_scale_among_many_is_counted() -> None:
    scale = torch.ones(100, 1)
    scale[7] = float("nan")
    with pytest.raises(CheckpointError, match=r"x has 1 of 100 scales.*nan"):
        check_scale("x", scale)
    check_scale("x", torch.ones(3))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(f"{Q0}.weight_scale"), [f"{Q0}.weight in FP8 without"]),
        (lambda t: t.pop(f"{Q0}.input_scale"), [f"no {Q0}.input_scale"]),
        (lambda t: t.update({f"{Q0}.weight_scale": torch.ones(7, 1)}), ["[7, 1]", "expected [1]"]),
        (lambda t: t.update({f"{Q0}.input_scale": torch.ones(2)}), ["[2]", "expected [1]"]),
        (
            lambda t: t.update({f"{Q0}.weight": torch.ones(4, 4).to(torch.float8_e5m2)}),
            ["F8_E5M2", "F8_E4M3"],
        ),
        (
            lambda t: t.update({f"{Q0}.weight": torch.ones(2, 2, 2).to(torch.float8_e4m3fn)}),
            ["[2, 2, 2]", "two dimensions"],
        ),
        (
            lambda t: t.update({"embed.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}),
            ["embed.weight in FP8 without embed.weight_scale"],
        ),
        (
            lambda t: t.update({"codes": torch.ones(2).to(torch.float8_e4m3fn)}),
            ["codes in FP8 without"],
        ),
    ],
    ids=[
        "no weight_scale",
        "no input_scale",
        "weight_scale shape",
        "input_scale shape",
        "e5m2",
        "3-D",
        "embedding",
        "not a weight",
    ],
)
def test_inconsistent_tensors_are_named(
    tmp_path: Path, edit: Callable[[Tensors], object], words: list[str]
) -> None:
    save(tmp_path, "fp8-static", edit=edit)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_scalar_scale_of_another_tool_is_read(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("_scale"):
                tensors[name] = tensors[name].reshape(())

    folder = save(tmp_path, "fp8-static", edit=edit)
    checkpoint = open_checkpoint(folder)
    stored = checkpoint.weight(Q0)
    assert torch.equal(stored.dequantize(), stored.codes.float() * stored.scale.float())
    scales, group_size = stored.row_scales()
    assert (scales.shape, group_size) == ((ROWS, 1), COLUMNS)
    assert stored.input_scale is not None
    assert stored.input_scale.shape == (1,)
    assert checkpoint.kv_scales(0)[0].shape == (1,)


def test_bf16_scales_of_another_tool_are_read_as_float32(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{Q0}.weight_scale"] = tensors[f"{Q0}.weight_scale"].bfloat16()

    stored = open_checkpoint(save(tmp_path, edit=edit)).weight(Q0)
    assert stored.scale.dtype == torch.float32


def test_a_stray_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path, max_shard_bytes=70_000)
    stray = tmp_path / "model-00009-of-00009.safetensors"
    stray.write_bytes(next(tmp_path.glob("model-00001-*.safetensors")).read_bytes())
    with pytest.raises(CheckpointError, match=stray.name):
        open_checkpoint(tmp_path)


def test_a_missing_or_truncated_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path, max_shard_bytes=70_000)
    victim = next(tmp_path.glob("model-00002-*.safetensors"))
    content = victim.read_bytes()
    victim.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=rf"{victim.name} .* is truncated"):
        open_checkpoint(tmp_path)
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name} is missing"):
        open_checkpoint(tmp_path)


def test_a_folder_that_is_none_or_no_checkpoint_is_said(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"no quantization_config; quantize the model first"):
        open_checkpoint(tiny_llama)


def test_a_declared_quantization_without_fp8_weight_is_refused(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for layer in range(NUM_LAYERS):
            name = f"model.layers.{layer}.self_attn.q_proj"
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].bfloat16()

    save(tmp_path, edit=edit)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_config_json_that_is_no_object_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"config\.json holds list"):
        open_checkpoint(tmp_path)
