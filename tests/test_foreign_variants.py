"""What other releases of the same tools wrote, and what must be refused, by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit import load_fp8
from quantkit.checkpoint import open_checkpoint, read_checkpoint
from quantkit.errors import CheckpointError
from quantkit.inspection import inspect
from quantkit.scheme import Granularity
from tests.checkpoints import edit_config
from tests.foreign import (
    AUTO,
    BLOCK,
    DOWN,
    E4M3,
    FOREIGN,
    KV,
    KV_NAMES,
    LAYER,
    LLMC,
    MODELOPT,
    Q,
    Tensors,
    config_of,
    edit,
    edit_block,
    ids,
    same_logits,
)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(FOREIGN / name, tmp_path / name))


Copied = Callable[[str], Path]


def test_modelopt_with_its_own_file_alone_is_read(copied: Copied) -> None:
    folder = copied(MODELOPT)
    edit_config(folder, quantization_config=None)
    assert open_checkpoint(folder).scheme == open_checkpoint(FOREIGN / MODELOPT).scheme
    assert same_logits(folder, MODELOPT)


@pytest.mark.parametrize("key", ["compression_config", "text_config"])
def test_the_block_is_found_where_older_tools_put_it(copied: Copied, key: str) -> None:
    folder = copied(LLMC)
    block = config_of(LLMC)["quantization_config"]
    if key == "text_config":
        edit_config(folder, quantization_config=None, text_config={"quantization_config": block})
    else:
        edit_config(folder, quantization_config=None, compression_config=block)
    assert open_checkpoint(folder, kv=False).scheme.weights.granularity is Granularity.TENSOR


def test_modelopt_without_kv_scales_means_1(copied: Copied) -> None:
    """As its preset fp8_cast writes it: a KV cache is declared, and no tensor belongs to it."""

    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(("k_scale", "v_scale"))]:
            del tensors[key]

    checkpoint = open_checkpoint(edit(copied(MODELOPT), change))
    assert checkpoint.kv_modules() == {n: f"model.layers.{n}.self_attn" for n in range(2)}
    for scale in checkpoint.kv_scales(1):
        assert (scale.shape, scale.item()) == ((1,), 1.0)


def test_an_attention_module_that_has_no_name_of_one_is_said(copied: Copied) -> None:
    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if "self_attn" in key]:
            tensor = tensors.pop(key)
            if not key.endswith(("k_scale", "v_scale")):
                tensors[key.replace("self_attn", "mixer")] = tensor

    checkpoint = open_checkpoint(edit(copied(MODELOPT), change))
    assert checkpoint.kv_scales(0)[0].item() == 1.0
    with pytest.raises(CheckpointError, match="no attention module of layer 0"):
        checkpoint.kv_modules()


def test_one_kv_scale_of_old_serves_both(copied: Copied) -> None:
    def change(tensors: Tensors) -> None:
        for layer in range(2):
            attention = f"model.layers.{layer}.self_attn"
            del tensors[f"{attention}.v_proj.output_scale"]
            tensors[f"{attention}.kv_scale"] = tensors.pop(f"{attention}.k_proj.output_scale")

    checkpoint = open_checkpoint(edit(copied(AUTO), change))
    key, value = checkpoint.kv_scales(0)
    stored = load_file(FOREIGN / AUTO / "model.safetensors")
    assert torch.equal(key, value)
    assert key.item() == stored[f"{LAYER}.self_attn.k_proj.output_scale"].item()


def test_the_names_of_transformers_static_scales_are_read(copied: Copied) -> None:
    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(("weight_scale", "input_scale"))]:
            new = key.replace("weight_scale", "weight_scale_inv")
            tensors[new.replace("input_scale", "activation_scale")] = tensors.pop(key)

    folder = edit(copied(AUTO), change)
    assert same_logits(folder, AUTO)
    expected = open_checkpoint(FOREIGN / AUTO).weight(Q).input_scale
    assert torch.equal(open_checkpoint(folder).weight(Q).input_scale, expected)


def test_blocks_that_the_matrix_does_not_fill_are_read_under_deepseeks_names(
    copied: Copied,
) -> None:
    name = "llmcompressor-block-odd"

    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith("weight_scale")]:
            tensors[f"{key}_inv"] = tensors.pop(key).float()

    folder = edit(copied(name), change)
    block = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    edit_config(folder, quantization_config=block)
    assert open_checkpoint(folder).weight(DOWN).scale.shape == (2, 1)
    assert same_logits(folder, name)


def test_the_shards_of_qkv_have_scales_of_their_own_in_what_is_compared_above() -> None:
    checkpoint = open_checkpoint(FOREIGN / LLMC)
    leaves = ("q_proj", "k_proj", "v_proj")
    scales = {checkpoint.weight(f"{LAYER}.self_attn.{leaf}").scale.item() for leaf in leaves}
    assert len(scales) == 3


def test_experts_are_modules_like_others(copied: Copied) -> None:
    """As DeepSeek and Qwen store them: each expert has its own weights and scales."""

    def change(tensors: Tensors) -> None:
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            for kind in ("weight", "weight_scale_inv"):
                tensor = tensors.pop(f"{LAYER}.mlp.{leaf}.{kind}")
                for expert in range(2):
                    tensors[f"{LAYER}.mlp.experts.{expert}.{leaf}.{kind}"] = tensor.clone()
        tensors[f"{LAYER}.mlp.gate.weight"] = torch.ones(2, 128).bfloat16()

    folder = edit_block(
        edit(copied(BLOCK), change), modules_to_not_convert=[f"{LAYER}.mlp.gate", "lm_head"]
    )
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.quantized) == 4 + 2 * 3
    original = open_checkpoint(FOREIGN / BLOCK).weight(DOWN).dequantize()
    assert torch.equal(read_checkpoint(folder)[f"{LAYER}.mlp.experts.1.down_proj.weight"], original)


def test_groups_that_agree_are_one_scheme(copied: Copied) -> None:
    group = config_of(LLMC)["quantization_config"]["config_groups"]["group_0"]
    groups = {
        "attention": {**group, "targets": [r"re:.*self_attn.*"]},
        "mlp": {**group, "targets": [r"re:.*mlp.*"]},
        "cache": {"targets": ["Qwen2Attention"], "input_activations": group["input_activations"]},
    }
    assert same_logits(edit_block(copied(LLMC), config_groups=groups), LLMC)


def test_an_embedding_in_fp8_is_dequantized(copied: Copied) -> None:
    name = "transformers-tensor"

    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(E4M3)
        tensors["model.embed_tokens.weight_scale"] = torch.tensor([0.5])

    def plain(tensors: Tensors) -> None:
        codes = tensors["model.embed_tokens.weight"].to(E4M3)
        tensors["model.embed_tokens.weight"] = (codes.float() * 0.5).bfloat16()

    folder = edit(copied(name), change)
    expected = edit(Path(shutil.copytree(FOREIGN / name, folder.parent / "plain")), plain)
    found, wanted = (load_fp8(f, dtype="float32").logits(ids(128)) for f in (folder, expected))
    assert torch.equal(found, wanted)


# What must be refused, by name.


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        (AUTO, "weight_scale"),
        (AUTO, "input_scale"),
        (BLOCK, "weight_scale_inv"),
        (LLMC, "weight_scale"),
        (MODELOPT, "weight_scale"),
        (MODELOPT, "input_scale"),
    ],
)
@pytest.mark.parametrize("value", [None, 0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_a_scale_that_is_missing_or_none_is_named(
    copied: Copied, name: str, leaf: str, value: float | None
) -> None:
    key = f"{Q}.{leaf}"

    def change(tensors: Tensors) -> None:
        if value is None:
            del tensors[key]
        else:
            tensors[key] = torch.full_like(tensors[key], value)

    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        open_checkpoint(edit(copied(name), change))


@pytest.mark.parametrize("name", KV)
@pytest.mark.parametrize("value", [None, 0.0, float("nan")], ids=str)
def test_a_kv_scale_that_is_missing_or_none_is_named(
    copied: Copied, name: str, value: float | None
) -> None:
    last = config_of(name)["num_hidden_layers"] - 1
    key = f"model.layers.{last}.self_attn.{KV_NAMES[name][1]}"

    def change(tensors: Tensors) -> None:
        if value is None:
            del tensors[key]
        else:
            tensors[key] = torch.full_like(tensors[key], value)

    folder = edit(copied(name), change)
    expected = key if value is not None else f"model.layers.{last}.self_attn"
    with pytest.raises(CheckpointError, match=expected.replace(".", r"\.")):
        open_checkpoint(folder)
    open_checkpoint(folder, kv=False)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (BLOCK, lambda t: t.update({f"{Q}.weight_scale": torch.ones(1, 1)}), "only one can be"),
        (BLOCK, lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 1)}), r"\[2, 1\]"),
        (BLOCK, lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(1)}), r"\[1\], expected"),
        (MODELOPT, lambda t: t.update({f"{Q}.weight_scale": torch.ones(64)}), r"\[64\]"),
        (
            LLMC,
            lambda t: t.update({f"{LAYER}.self_attn.k_scale": torch.ones(2)}),
            r"k_scale .* \[2\]",
        ),
        (AUTO, lambda t: t.update({"lm_head.weight": torch.ones(128, 64).to(E4M3)}), "'lm_head'"),
        (
            BLOCK,
            lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2).to(E4M3)}),
            "experts.gate_up_proj in FP8 without",
        ),
        (
            AUTO,
            lambda t: t.update({f"{Q}.weight": torch.ones(64, 64).to(torch.float8_e5m2)}),
            "E5M2",
        ),
    ],
    ids=[
        "two scales",
        "another grid",
        "no grid",
        "a scale per row",
        "a KV scale per head",
        "an ignored module",
        "fused experts",
        "another format",
    ],
)
def test_tensors_that_contradict_the_config_are_named(
    copied: Copied, name: str, change: Callable[[Tensors], object], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(edit(copied(name), change))


def test_a_tied_head_in_fp8_is_not_passed_over(copied: Copied) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = torch.ones(128, 64).to(E4M3)
        tensors["lm_head.weight_scale"] = torch.tensor(1.0)
        tensors["lm_head.input_scale"] = torch.tensor(1.0)

    folder = edit_block(edit(copied(AUTO), change), ignored_layers=[])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight; check config\.json"):
        load_fp8(folder)


def test_inspect_of_a_damaged_folder_names_the_tensor(copied: Copied) -> None:
    folder = edit(copied(BLOCK), lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=f"{Q}.weight_scale_inv".replace(".", r"\.")):
        inspect(folder)
