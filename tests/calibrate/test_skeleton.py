"""The empty model: where its layers are, and what its names are in the source."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.source import open_source
from quantkit.errors import SourceError, UnsupportedError
from tests import tiny
from tests.calibrate import models

ModelOf = Callable[[str], Path]

LAYERS = {
    "llama": "model.layers",
    "opt": "model.decoder.layers",
    "bloom": "transformer.h",
    "mpt": "transformer.blocks",
    "gpt-neox": "gpt_neox.layers",
    "mixtral": "model.layers",  # not the list of experts, which is longer
    "modernbert-decoder": "model.layers",
}


@pytest.mark.parametrize("kind", LAYERS)
def test_decoder_layers_are_found(model_of: ModelOf, kind: str) -> None:
    skeleton = models.open_skeleton(model_of(kind))
    assert skeleton.layer_names == [f"{LAYERS[kind]}.{number}" for number in range(2)]
    for name, layer in zip(skeleton.layer_names, skeleton.layers, strict=True):
        assert skeleton.model.get_submodule(name) is layer


def test_more_experts_than_layers_are_no_layers(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**tiny.LLAMA, num_local_experts=8)
    skeleton = models.open_skeleton(models.save(tmp_path, config))
    assert len(skeleton.layers) == 2


def test_a_new_skeleton_holds_no_weight(model_of: ModelOf) -> None:
    assert all(p.is_meta for p in models.open_skeleton(model_of("llama")).model.parameters())


def test_all_experts_are_loaded_as_the_model_of_transformers_has_them(model_of: ModelOf) -> None:
    skeleton = models.open_skeleton(model_of("mixtral"))
    skeleton.load("model.layers.1")
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        model_of("mixtral"), dtype=torch.bfloat16
    )
    fused = whole.model.layers[1].mlp.experts
    for number in range(4):
        base = f"model.layers.1.mlp.experts.{number}"
        w1, w2, w3 = (skeleton.model.get_parameter(f"{base}.w{leaf}.weight") for leaf in (1, 2, 3))
        assert torch.equal(torch.cat([w1, w3]), fused.gate_up_proj[number])
        assert torch.equal(w2, fused.down_proj[number])


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma2", "opt", "bloom", "qwen2"])
def test_a_fully_loaded_skeleton_is_the_model_of_transformers(model_of: ModelOf, kind: str) -> None:
    skeleton = models.open_skeleton(model_of(kind))
    for prefix in ("", *skeleton.layer_names):
        skeleton.load(prefix)
    whole = transformers.AutoModelForCausalLM.from_pretrained(model_of(kind), dtype=torch.bfloat16)
    expected = whole.state_dict()
    for name, tensor in skeleton.model.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


def test_parameters_that_a_model_keeps_in_float32_stay_so(tmp_path: Path) -> None:
    config = transformers.FalconMambaConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8
    )
    folder = models.save(tmp_path, config, torch.float32)
    skeleton = models.open_skeleton(folder)
    skeleton.load(skeleton.layer_names[0])
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, parameter in skeleton.layers[0].named_parameters():
        assert parameter.dtype == whole.get_parameter(f"{skeleton.layer_names[0]}.{name}").dtype


class TestNames:
    def test_a_source_saved_without_the_base_prefix_is_read(
        self, model_of: ModelOf, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(model_of("llama-tied"), tmp_path / "base"))
        tensors = load_file(folder / "model.safetensors")
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
        skeleton = models.open_skeleton(folder)
        assert skeleton.disk_name("model.layers.1.mlp.up_proj") == "layers.1.mlp.up_proj"
        skeleton.load("model.layers.1")
        assert torch.equal(
            skeleton.model.get_parameter("model.layers.1.mlp.up_proj.weight"),
            bare["layers.1.mlp.up_proj.weight"],
        )

    def test_experts_are_called_what_the_source_calls_them(self, model_of: ModelOf) -> None:
        skeleton = models.open_skeleton(model_of("mixtral"))
        layer, moe = "model.layers.1", "model.layers.1.block_sparse_moe"
        assert skeleton.disk_name(layer) == layer
        assert skeleton.disk_name(f"{layer}.mlp") == moe
        assert skeleton.disk_name(f"{layer}.mlp.experts") == f"{moe}.experts"
        assert skeleton.disk_name(f"{layer}.mlp.experts.2.w3") == f"{moe}.experts.2.w3"
        assert skeleton.disk_name(f"{layer}.mlp.gate") == f"{moe}.gate"

    @pytest.mark.parametrize(
        ("kind", "routers"),
        [
            ("mixtral", ["mlp.gate"]),
            ("qwen2-moe", ["mlp.gate", "mlp.shared_expert_gate"]),
            ("gpt-oss", ["mlp.router"]),
            ("llama", []),
        ],
    )
    def test_routers_are_known(self, model_of: ModelOf, kind: str, routers: list[str]) -> None:
        found = models.open_skeleton(model_of(kind)).routers()
        assert found == {f"model.layers.{n}.{router}" for n in range(2) for router in routers}

    def test_a_missing_tensor_is_named(self, model_of: ModelOf, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(model_of("llama"), tmp_path / "model"))
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SourceError, match=r"no tensor .*layers\.1\.mlp\.up_proj\.weight"):
            models.open_skeleton(folder)

    @pytest.mark.parametrize(
        ("kind", "tied"), [("llama", False), ("llama-tied", True), ("bloom", True)]
    )
    def test_a_tied_head_is_known(self, model_of: ModelOf, kind: str, tied: bool) -> None:
        assert (models.open_skeleton(model_of(kind)).tied_head is not None) == tied


def test_unloading_frees_every_tensor_below_a_name(model_of: ModelOf) -> None:
    skeleton = models.open_skeleton(model_of("llama"))
    for name in skeleton.layer_names:
        skeleton.load(name)
    skeleton.unload(skeleton.layer_names[0])
    assert all(p.is_meta for p in skeleton.layers[0].parameters())
    assert not any(p.is_meta for p in skeleton.layers[1].parameters())


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    with pytest.raises(UnsupportedError, match=r"is not a causal language model"):
        Skeleton(source, source.config(), torch.bfloat16, torch.device("cpu"))


def test_layers_of_different_classes_are_refused(tmp_path: Path) -> None:
    config = transformers.OlmoHybridConfig(
        **tiny.LLAMA, layer_types=["linear_attention", "full_attention"]
    )
    with pytest.raises(UnsupportedError, match=r"has no list of equal decoder layers"):
        models.open_skeleton(models.save(tmp_path, config))
