"""The plan says beforehand what the run then does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantkit.calibrate import calibrate, load_recipe
from quantkit.calibrate.plan import Plan, check_tied_head, make_plan, redundant_head
from quantkit.errors import RecipeError, SourceError
from quantkit.shards import ShardReader
from tests.calibrate import models

ModelOf = Callable[[str], Path]
RECIPES = ["fp8-dynamic", "fp8-static", "fp8-block"]


def plan_for(folder: Path, recipe: str = "fp8-dynamic", **options: Any) -> Plan:
    chosen = load_recipe(recipe).with_options(**options)
    return make_plan(models.open_skeleton(folder), chosen, 4, 16, 2)


def tensor_bytes(folder: Path) -> int:
    reader = ShardReader(folder)
    return sum(reader.tensor(name).nbytes for name in reader.names)


class TestBytes:
    @pytest.mark.parametrize("kv", ["fp8", "fp8-head", "none"])
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("kind", ["llama-odd", "llama-tied", "mixtral"])
    def test_before_and_after_are_exact(
        self,
        model_of: ModelOf,
        calibration_file: Path,
        tmp_path: Path,
        kind: str,
        recipe: str,
        kv: str,
    ) -> None:
        plan = plan_for(model_of(kind), recipe, kv=kv)
        out = tmp_path / "out"
        # Without a budget: what it keeps is only known when sensitivities have been measured.
        options = {"data": [str(calibration_file)], "samples": 2, "budget": 0, "progress": False}
        calibrate(model_of(kind), out, recipe=recipe, kv=kv, **options)
        assert plan.source_bytes == tensor_bytes(model_of(kind))
        assert plan.target_bytes == tensor_bytes(out)

    def test_a_report_counts_what_was_written_also_after_a_cast(
        self, model_of: ModelOf, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        report = calibrate(model_of("llama"), out, dtype="float32", kv="none", progress=False)
        assert report.to_json()["target_bytes"] == tensor_bytes(out)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_of_each_module_are_exact(
        self, model_of: ModelOf, calibration_file: Path, tmp_path: Path, recipe: str
    ) -> None:
        out = tmp_path / "out"
        data = [str(calibration_file)]
        calibrate(model_of("llama"), out, recipe=recipe, data=data, samples=2, progress=False)
        reader = ShardReader(out)
        for module in plan_for(model_of("llama"), recipe).modules:
            leaves = ("weight", "weight_scale", "input_scale")
            names = [f"{module.name}.{leaf}" for leaf in leaves]
            stored = sum(reader.tensor(name).nbytes for name in names if name in reader)
            assert module.target_bytes == stored


class TestModules:
    def test_are_listed_in_the_models_order_with_their_layer(self, model_of: ModelOf) -> None:
        modules = plan_for(model_of("llama")).modules
        assert [module.layer for module in modules] == [0] * 7 + [1] * 7 + [None]
        assert modules[0].name == "model.layers.0.self_attn.q_proj"
        assert modules[4].shape == (96, 64)
        assert modules[-1].name == "lm_head"

    @pytest.mark.parametrize("kind", models.CONFIGS)
    def test_every_matrix_of_a_layer_is_quantized_or_ignored(
        self, model_of: ModelOf, kind: str
    ) -> None:
        """An engine takes a linear layer that is in neither for an FP8 one without scale."""
        plan = plan_for(model_of(kind), kv="none")
        listed = {module.name for module in plan.quantized} | set(plan.ignored)
        reader = ShardReader(model_of(kind))
        for name in reader.names:
            is_matrix = name.endswith(".weight") and len(reader.shape(name)) == 2
            if is_matrix and any(part.isdigit() for part in name.split(".")):
                assert name.removesuffix(".weight") in listed

    @pytest.mark.parametrize("kind", ["mixtral", "llama", "phi3"])
    def test_every_quantized_module_is_on_disk_under_its_name(
        self, model_of: ModelOf, kind: str
    ) -> None:
        names = ShardReader(model_of(kind)).names
        assert all(
            f"{module.name}.weight" in names for module in plan_for(model_of(kind)).quantized
        )

    def test_experts_that_transformers_fuses_are_quantized_under_their_names_on_disk(
        self, model_of: ModelOf
    ) -> None:
        plan = plan_for(model_of("mixtral"))
        moe = "model.layers.1.block_sparse_moe"
        shapes = {module.name: module.shape for module in plan.quantized}
        assert shapes[f"{moe}.experts.3.w1"] == (96, 64)
        assert shapes[f"{moe}.experts.3.w2"] == (64, 96)
        assert len(shapes) == 2 * (4 + 4 * 3)
        routers = {f"model.layers.{number}.block_sparse_moe.gate" for number in range(2)}
        assert set(plan.ignored) == {"lm_head", *routers}
        assert plan.warnings == ()

    def test_the_head_is_ignored_under_its_name_on_disk(self, model_of: ModelOf) -> None:
        assert plan_for(model_of("gpt-neox")).ignored == ["embed_out"]


class TestTiedHead:
    @pytest.fixture
    def folder(self, tiny_llama_tied: Path, tmp_path: Path) -> Path:
        """The tied tiny Llama with a second copy of the matrix under the head's name."""
        folder = Path(shutil.copytree(tiny_llama_tied, tmp_path / "model"))
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def test_an_identical_copy_is_found_and_dropped(self, folder: Path) -> None:
        skeleton = models.open_skeleton(folder)
        expected = ("lm_head.weight", "model.embed_tokens.weight")
        assert redundant_head(skeleton) == expected
        check_tied_head(skeleton)

    def test_a_different_copy_is_refused_naming_both(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"][5, 5] += 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SourceError, match=r"lm_head\.weight .*model\.embed_tokens\.weight"):
            plan_for(folder)

    def test_quantizing_it_is_refused(self, tiny_llama_tied: Path) -> None:
        recipe = load_recipe("fp8-dynamic")
        targeted = type(recipe)("head", recipe.weights, targets=("lm_head",), ignore=())
        with pytest.raises(RecipeError, match=r"quantizes lm_head, which this model ties"):
            make_plan(models.open_skeleton(tiny_llama_tied), targeted, 1, 8, 1)


class TestEstimates:
    def test_memory_covers_two_layers_hidden_states_and_a_shard(self, model_of: ModelOf) -> None:
        plan = plan_for(model_of("llama"), tiers="none")
        layer = (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96) * 2
        assert plan.memory_bytes == 2 * layer + 4 * 16 * 64 * 2 + plan.target_bytes

    def test_memory_covers_what_batches_carry_inside_a_layer(self, model_of: ModelOf) -> None:
        through = plan_for(model_of("llama"), tiers="none")
        stopping = plan_for(model_of("llama"))
        # Residual and normed stream; queries, keys and values, or 96 channels into down_proj.
        assert stopping.memory_bytes - through.memory_bytes == 4 * 16 * (2 * 64 + 3 * 64) * 2

    def test_memory_covers_the_moments_of_every_expert(self, model_of: ModelOf) -> None:
        with_tiers = plan_for(model_of("mixtral"))
        without = plan_for(model_of("mixtral"), tiers="none")
        assert with_tiers.memory_bytes - without.memory_bytes == 4 * 2 * 4 * (64**2 + 96**2)

    def test_without_data_no_time_is_estimated(self, model_of: ModelOf) -> None:
        assert plan_for(model_of("llama"), kv="none", tiers="none").seconds == 0
        assert plan_for(model_of("llama")).seconds > 0

    def test_planning_leaves_the_weights_unread(self, model_of: ModelOf) -> None:
        skeleton = models.open_skeleton(model_of("llama"))
        make_plan(skeleton, load_recipe("fp8-dynamic"), 1, 8, 1)
        assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_scales_by_head_are_not_portable(model_of: ModelOf) -> None:
    assert plan_for(model_of("llama")).is_portable
    assert not plan_for(model_of("llama"), kv="fp8-head").is_portable
