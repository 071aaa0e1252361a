"""Mixture-of-experts models: every expert is quantized, whatever tokens reached it."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit import load_fp8
from quantkit.calibrate import Recipe, Report, calibrate, joint_run, load_recipe
from quantkit.calibrate.expert_tokens import ENOUGH_SHARE, ExpertReach, scarce_warnings
from quantkit.calibrate.groups import engine_group, expert_of, kind_of
from quantkit.calibrate.plan import make_plan
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError, RecipeError
from quantkit.scheme import Granularity
from quantkit.shards import ShardReader
from tests import tiny
from tests.calibrate import models

ModelOf = Callable[[str], Path]
Run = Callable[..., Path]
KINDS = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3"]
RECIPES = ["fp8-dynamic", "fp8-static", "fp8-block"]
IDS = torch.stack([tiny.random_ids(20, seed) for seed in range(3)])
EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)$")


@pytest.fixture(scope="session")
def written(
    model_of: ModelOf, calibration_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return the checkpoint of a tiny model, made once: read it only."""
    folder = tmp_path_factory.mktemp("experts")

    @cache
    def call(kind: str, recipe: str = "fp8-static", samples: int = 24) -> Path:
        out = folder / f"{kind} {recipe} {samples}"
        options = {"data": [str(calibration_file)], "budget": 0, "progress": False}
        calibrate(model_of(kind), out, recipe=recipe, samples=samples, **options)
        return out

    return call


@pytest.fixture
def run(calibration_file: Path, tmp_path: Path) -> Run:
    """Calibrate a folder into tmp_path / "out", all of whose modules fit into no budget."""

    def call(model: Path, out: str = "out", **options: Any) -> Path:
        given = {"data": [str(calibration_file)], "samples": 24, "budget": 0, "progress": False}
        report = calibrate(model, tmp_path / out, **(given | options))
        assert isinstance(report, Report)
        return tmp_path / out

    return call


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "quantkit.json").read_text())
    return found


def ignored(folder: Path) -> set[str]:
    return set(json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model(ids).logits
    return result


class TestTensors:
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_each_expert_is_stored_in_8_bits_under_the_names_of_the_source(
        self, model_of: ModelOf, written: Run, kind: str, recipe: str
    ) -> None:
        out, source = ShardReader(written(kind, recipe)), ShardReader(model_of(kind))
        weights = load_recipe(recipe).weights
        experts = [n for n in source.names if EXPERT.search(n.removesuffix(".weight"))]
        assert len(experts) == 4 * 3 * (1 if kind == "deepseek-v3" else 2)
        for name in experts:
            rows, columns = source.shape(name)
            assert out.dtype(name) == "F8_E4M3"
            assert out.shape(name) == (rows, columns)
            scale = name.replace(".weight", ".weight_scale")
            assert out.shape(scale) == weights.scale_shape(rows, columns)
            assert (name.replace(".weight", ".input_scale") in out) == (recipe == "fp8-static")
        scales = (".weight_scale", ".input_scale", ".k_scale", ".v_scale")
        assert {n for n in out.names if not n.endswith(scales)} == set(source.names)

    @pytest.mark.parametrize("kind", KINDS)
    def test_routers_stay_as_they_are_and_are_ignored_by_name(
        self, model_of: ModelOf, written: Run, kind: str
    ) -> None:
        out, source = written(kind), ShardReader(model_of(kind))
        gates = {n for n in source.names if re.search(r"\.(gate|shared_expert_gate)\.weight$", n)}
        assert gates
        for name in gates:
            assert torch.equal(ShardReader(out).tensor(name), source.tensor(name))
        assert ignored(out) == {"lm_head", *(name.removesuffix(".weight") for name in gates)}

    def test_shared_experts_are_linears_like_others(self, written: Run) -> None:
        quantized = open_checkpoint(written("qwen2-moe")).quantized
        assert "model.layers.0.mlp.shared_expert.down_proj" in quantized

    def test_static_input_scales_are_those_of_the_whole_layer(
        self, model_of: ModelOf, run: Run
    ) -> None:
        for tiers in ("range,compensation", "none"):
            out = run(model_of("qwen3-moe"), recipe="fp8-static", tiers=tiers)
            scales: dict[tuple[str, str], set[float]] = {}
            for module in open_checkpoint(out).quantized:
                if found := EXPERT.search(module):
                    stored = ShardReader(out).tensor(f"{module}.input_scale").item()
                    scales.setdefault((module[: found.start()], found[2]), set()).add(stored)
            assert len(scales) == 2 * 3
            assert all(len(found) == 1 for found in scales.values())
            for layer in {layer for layer, _ in scales}:
                assert scales[layer, "gate_proj"] == scales[layer, "up_proj"]
                assert scales[layer, "gate_proj"] != scales[layer, "down_proj"]

    def test_a_static_scale_covers_the_largest_input_of_all_experts(self, written: Run) -> None:
        out = written("mixtral")
        (layer, *_), reader = report_of(out)["layers"], ShardReader(out)
        for leaf in ("w1", "w2", "w3"):
            modules = [m for m in layer["modules"] if m["name"].endswith(leaf)]
            widest = max(module["input_amax"] for module in modules)
            assert len({module["input_amax"] for module in modules}) > 1
            scale = reader.tensor(f"{modules[0]['name']}.input_scale").item()
            (shared,) = {module["input_range"] for module in modules}
            assert widest <= shared <= 2 * widest
            assert shared <= 448 * scale <= shared * (1 + 2**-7)

    def test_experts_that_a_source_stores_together_are_written_one_by_one(
        self, model_of: ModelOf, run: Run, written: Run, tmp_path: Path
    ) -> None:
        def fuse(tensors: dict[str, Tensor]) -> None:
            for layer in range(2):
                base = f"model.layers.{layer}.mlp.experts"
                parts = [
                    [tensors.pop(f"{base}.{n}.{leaf}_proj.weight") for n in range(4)]
                    for leaf in ("gate", "up", "down")
                ]
                gate_up = [torch.cat(pair) for pair in zip(*parts[:2], strict=True)]
                tensors[f"{base}.gate_up_proj"] = torch.stack(gate_up)
                tensors[f"{base}.down_proj"] = torch.stack(parts[2])

        together = Path(shutil.copytree(model_of("qwen3-moe"), tmp_path / "together"))
        edit(together, fuse)
        transformers.AutoModelForCausalLM.from_pretrained(together)  # it is a model
        out = run(together, "from-fused", recipe="fp8-static")
        expected = load_file(written("qwen3-moe") / "model.safetensors")
        found = load_file(out / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name

    def test_a_plan_of_a_fused_source_is_exact(self, model_of: ModelOf) -> None:
        skeleton = models.open_skeleton(model_of("gpt-oss"))
        plan = make_plan(skeleton, load_recipe("fp8-dynamic"), 2, 8, 1)
        kept = {module.name: module for module in plan.modules if not module.quantized}
        experts = kept["model.layers.1.mlp.experts"]
        names = [n for n in skeleton.source.names if "layers.1.mlp.experts." in n]
        reader = ShardReader(model_of("gpt-oss"))
        assert experts.source_bytes == sum(reader.tensor(name).nbytes for name in names)
        weights = [reader.shape(name) for name in names if not name.endswith("bias")]
        assert (experts.layer, prod(experts.shape)) == (1, sum(map(prod, weights)))
        (warning,) = plan.warnings
        assert "model.layers.0.mlp.experts, model.layers.1.mlp.experts" in warning


class TestReaders:
    @pytest.mark.parametrize("kind", [*KINDS, "gpt-oss"])
    def test_transformers_and_quantkit_load_what_is_written(
        self, written: Run, tmp_path: Path, kind: str
    ) -> None:
        out = written(kind)
        expected = logits(models.dequantized(out, tmp_path / "plain"))
        ours = load_fp8(out, kv="none", dtype="float32").logits(IDS)
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            out,
            dtype=torch.float32,
            quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        )
        assert torch.equal(logits(theirs.eval()), expected)

    def test_transformers_by_default_has_the_same_experts(
        self, written: Run, tmp_path: Path
    ) -> None:
        out = written("mixtral", "fp8-dynamic")
        plain = models.dequantized(out, tmp_path / "plain")
        found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{part}"
            assert torch.equal(found.get_parameter(name), plain.get_parameter(name))

    @pytest.mark.parametrize("kind", KINDS)
    def test_predictions_stay_those_of_the_source(
        self, model_of: ModelOf, written: Run, kind: str
    ) -> None:
        source = transformers.AutoModelForCausalLM.from_pretrained(
            model_of(kind), dtype=torch.float32
        )
        expected = logits(source.eval())
        found = load_fp8(written(kind, "fp8-dynamic"), kv="none", dtype="float32").logits(IDS)
        # A token whose experts change differs a lot; most tokens keep theirs. Two layers of six
        # roundings of 0.025 each; an expert in the place of another changes a token by 1 or more.
        differences = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert differences.median() < 0.15


class TestQuality:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_tiers_lower_the_error_of_the_experts(self, written: Run, recipe: str) -> None:
        out = written("mixtral", recipe, 64)
        modules = [m for layer in report_of(out)["layers"] for m in layer["modules"]]
        experts = [m for m in modules if expert_of(m["name"])]
        assert len(experts) == 2 * 4 * 3
        gains = [m["output_sqnr_db"] - m["plain_output_sqnr_db"] for m in experts]
        assert min(gains) >= 0
        assert sum(gains) / len(gains) > 0.3

    @torch.no_grad()
    def test_they_do_so_on_other_text_by_the_layers_own_output(
        self, model_of: ModelOf, run: Run, tmp_path: Path
    ) -> None:
        source = transformers.AutoModelForCausalLM.from_pretrained(
            model_of("mixtral"), dtype=torch.float32
        ).eval()
        seen: list[Tensor] = []
        block = source.model.layers[0].mlp
        handle = block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        text = [tiny.sentence(40, seed=1000 + number) for number in range(24)]
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_of("mixtral"))
        for line in text:
            source(torch.tensor([tokenizer(line)["input_ids"]]))
        handle.remove()
        errors = {}
        for tiers in ("none", "range,compensation"):
            out = run(model_of("mixtral"), tiers, tiers=tiers, samples=64)
            other = models.dequantized(out, tmp_path / f"plain {tiers}").model.layers[0].mlp
            errors[tiers] = sum((other(x) - block(x)).square().sum().item() for x in seen)
        assert errors["range,compensation"] < 0.9 * errors["none"]


class TestRepeatable:
    OPTIONS: ClassVar[dict[str, Any]] = {"samples": 12, "recipe": "fp8-static"}

    def test_two_runs_and_any_batch_size_give_the_same_bytes(
        self, model_of: ModelOf, run: Run
    ) -> None:
        first = contents(run(model_of("qwen2-moe"), "one", **self.OPTIONS))
        assert contents(run(model_of("qwen2-moe"), "two", **self.OPTIONS)) == first
        assert contents(run(model_of("qwen2-moe"), "x", batch_size=5, **self.OPTIONS)) == first

    def test_a_run_that_was_stopped_ends_with_the_same_bytes(
        self, model_of: ModelOf, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = contents(run(model_of("mixtral"), "whole", **self.OPTIONS))
        original = joint_run.calibrate_layer

        def stopping(model: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            if number == 1:
                raise MemoryError
            return original(model, number, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(joint_run, "calibrate_layer", stopping)
            with pytest.raises(MemoryError):
                run(model_of("mixtral"), "resumed", **self.OPTIONS)
        assert contents(run(model_of("mixtral"), "resumed", resume=True, **self.OPTIONS)) == whole

    def test_only_one_layer_is_in_memory(self, model_of: ModelOf) -> None:
        skeleton = models.open_skeleton(model_of("mixtral"))
        assert all(parameter.is_meta for parameter in skeleton.model.parameters())
        skeleton.load("model.layers.1")
        loaded = [name for name, p in skeleton.model.named_parameters() if not p.is_meta]
        assert len(loaded) == 4 + 2 + 1 + 4 * 3
        assert all(name.startswith("model.layers.1.") for name in loaded)


class TestSelection:
    @pytest.mark.parametrize("budget", [1.05, 1.5, 1.8])
    def test_a_budget_keeps_all_experts_of_a_layer_or_none(
        self, model_of: ModelOf, run: Run, budget: float
    ) -> None:
        out = run(model_of("mixtral"), budget=budget)
        modules = [m for layer in report_of(out)["layers"] for m in layer["modules"]]
        kept: dict[str, set[bool]] = {}
        costs: dict[str, set[float]] = {}
        for module in modules:
            expert = expert_of(module["name"])
            if expert:
                kept.setdefault(expert[0], set()).add("keep" in module["tiers"])
                costs.setdefault(expert[0], set()).add(module["predicted_kl"])
        assert len(kept) == 2
        assert all(len(answers) == 1 for answers in kept.values())
        assert all(len(values) == 1 for values in costs.values())
        if budget == 1.8:
            assert {True} in kept.values()

    def test_some_experts_of_a_layer_cannot_be_ignored(self, model_of: ModelOf, run: Run) -> None:
        with pytest.raises(
            RecipeError, match=r"experts of model\.layers\.0\.\S+\.experts .*in par"
        ):
            run(model_of("mixtral"), ignore=["model.layers.0.block_sparse_moe.experts.3"])

    def test_all_experts_of_a_layer_can(self, model_of: ModelOf, run: Run) -> None:
        name = "model.layers.0.block_sparse_moe.experts"
        out = run(model_of("mixtral"), ignore=[name], recipe="fp8-static")
        for number in range(4):
            assert {f"{name}.{number}.w{leaf}" for leaf in (1, 2, 3)} <= ignored(out)
        assert not any(module.startswith(name) for module in open_checkpoint(out).quantized)
        assert load_fp8(out).logits(IDS).isfinite().all()

    @pytest.mark.parametrize("pattern", [r"re:.*mlp\.gate$", "mlp.shared_expert_gate"])
    def test_routers_may_be_named_in_ignore(
        self, model_of: ModelOf, run: Run, pattern: str
    ) -> None:
        folder = model_of("qwen2-moe")
        assert ignored(run(folder, "a", ignore=[pattern])) == ignored(run(folder, "b"))

    def test_routers_cannot_be_quantized(self, model_of: ModelOf, run: Run) -> None:
        weights = load_recipe("fp8-dynamic").weights
        recipe = Recipe("gates", weights, targets=("mlp.shared_expert_gate",))
        with pytest.raises(RecipeError, match=r"matches no linear module"):
            run(model_of("qwen2-moe"), recipe=recipe)


class TestGroups:
    NAME = "model.layers.0.mlp.experts"

    def test_names_of_experts_are_taken_apart(self) -> None:
        assert expert_of(f"{self.NAME}.13.up_proj") == (self.NAME, 13, "up_proj")
        for other in ("mlp.shared_experts.up_proj", "mlp.shared_experts.0.up_proj", "mlp.up_proj"):
            assert expert_of(f"model.layers.0.{other}") is None

    def test_experts_are_one_group_and_others_as_they_are_fused(self) -> None:
        names = [f"{self.NAME}.0.up_proj", "a.k_proj", "a.v_proj", "a.o_proj"]
        assert [engine_group(name, names) for name in names] == [
            self.NAME, "a.k_proj", "a.k_proj", "a.o_proj",
        ]  # fmt: skip

    def test_kinds_tell_experts_from_other_modules(self) -> None:
        assert kind_of(f"{self.NAME}.2.up_proj") == "experts.up_proj"
        assert kind_of("model.layers.0.mlp.up_proj") == "up_proj"


def without_expert_3(folder: Path, target: Path) -> Path:
    """Return a copy of the tiny Mixtral whose routers never choose the last of four experts.

    Channel 0 of the residual stream is 4 in every token, and no layer writes to it; the routers
    read it with a large negative weight.
    """

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:, 0] = 4.0
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "w2.weight")):
                tensor[0] = 0
            if name.endswith("layernorm.weight"):
                tensor[0] = 1
        route(tensors, -100.0)

    return edit(Path(shutil.copytree(folder, target)), change)


def route(tensors: dict[str, Tensor], weight: float) -> None:
    """Let every token of the model of `without_expert_3` be sent to expert 3, or none."""
    for name, tensor in tensors.items():
        if name.endswith(".gate.weight"):
            tensor[3] = 0
            tensor[3, 0] = weight


class TestB08UnreachedExperts:
    @pytest.fixture
    def source(self, model_of: ModelOf, tmp_path: Path) -> Path:
        return without_expert_3(model_of("mixtral"), tmp_path / "never-3")

    @pytest.mark.parametrize("tiers", [None, "none", "range,compensation,smoothing"])
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_b08_a_every_expert_has_finite_scales_and_one_warning_says_which_were_not_reached(
        self, source: Path, run: Run, recipe: str, tiers: str | None,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        with caplog.at_level(logging.WARNING):
            out = run(source, recipe=recipe, tiers=tiers)
        checkpoint = open_checkpoint(out)
        experts = [module for module in checkpoint.quantized if expert_of(module)]
        assert len(experts) == 2 * 4 * 3
        for module in experts:
            weight = checkpoint.weight(module)
            for scale in (weight.scale, weight.input_scale):
                assert scale is None or (scale.isfinite().all() and (scale > 0).all())
        if recipe != "fp8-static" and tiers == "none":
            return  # nothing of it depends on data
        for number, layer in enumerate(report_of(out)["layers"]):
            (reach,) = layer["experts"]
            assert reach["name"] == f"model.layers.{number}.block_sparse_moe.experts"
            assert reach["tokens"][3] == 0
            assert sum(reach["tokens"]) > 0
            assert 3 in reach["on_every_token"]
        told = [r.message for r in caplog.records if "too few calibration tokens" in r.message]
        assert told == [w for w in report_of(out)["warnings"] if "too few calibration" in w]
        (warning,) = told
        for number in range(2):
            assert re.search(rf"model\.layers\.{number}: [\d, ]*\b3 of 4", warning)

    def test_b08_b_a_prompt_through_that_expert_is_finite_and_right(
        self, source: Path, run: Run, tmp_path: Path
    ) -> None:
        out = edit(run(source, recipe="fp8-static"), lambda tensors: route(tensors, 100.0))
        expected = logits(models.dequantized(out, tmp_path / "plain"))
        for activations in ("full", "quantized"):
            model = load_fp8(out, kv="none", dtype="float32", activations=activations)
            found = model.logits(IDS)
            assert found.isfinite().all()
            error = (found - expected).norm() / expected.norm()
            assert error < (1e-4 if activations == "full" else 0.2)
        assert len(load_fp8(out).generate_ids([[1, 5, 9]])[0].ids)

    def test_b08_c_its_weights_are_as_good_as_those_of_others(self, source: Path, run: Run) -> None:
        out = run(source, recipe="fp8-static", samples=64)
        for layer in report_of(out)["layers"]:
            for module in layer["modules"]:
                expert = expert_of(module["name"])
                if expert and expert[1] == 3:
                    assert module["output_sqnr_db"] >= module["plain_output_sqnr_db"] > 25
                    assert module["input_amax"] > 0

    def test_b08_d_an_expert_without_tokens_in_a_batch_is_no_problem(
        self, source: Path, run: Run
    ) -> None:
        model = load_fp8(run(source, recipe="fp8-static"), activations="quantized")
        assert model.logits(IDS[:1, :1]).isfinite().all()  # two experts of four get no token

    @pytest.mark.parametrize("value", [None, 0.0, torch.nan, torch.inf, -1.0])
    def test_b08_e_a_bad_input_scale_is_refused_by_name(
        self, source: Path, run: Run, value: float | None
    ) -> None:
        name = "model.layers.1.block_sparse_moe.experts.3.w2.input_scale"

        def spoil(tensors: dict[str, Tensor]) -> None:
            if value is None:
                del tensors[name]
            else:
                tensors[name].fill_(value)

        out = edit(run(source, recipe="fp8-static"), spoil)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            load_fp8(out)


class TestFewTokens:
    def test_experts_with_enough_tokens_keep_to_their_own(self, written: Run) -> None:
        out = written("mixtral", "fp8-dynamic", 64)
        for layer in report_of(out)["layers"]:
            (reach,) = layer["experts"]
            few = [n for n, count in enumerate(reach["tokens"]) if count < ENOUGH_SHARE * 96]
            assert reach["on_every_token"] == few
            assert len(few) < 4

    def test_with_little_data_all_are_calibrated_on_every_token(
        self, model_of: ModelOf, run: Run
    ) -> None:
        out = run(model_of("mixtral"), samples=1, seq_len=8)
        for layer in report_of(out)["layers"]:
            assert layer["experts"][0]["on_every_token"] == [0, 1, 2, 3]

    def test_one_line_names_layers_and_experts(self) -> None:
        reports = {
            "layers.0": [ExpertReach("layers.0.experts", (9, 0, 8), (1,))],
            "layers.1": [ExpertReach("layers.1.experts", (9, 9, 8))],
            "layers.2": [ExpertReach("layers.2.experts", (0, 9, 1), (0, 2))],
        }
        (line,) = scarce_warnings(reports)
        assert line.endswith("layers.0: 1 of 3; layers.2: 0, 2 of 3")
        assert scarce_warnings({"layers.1": reports["layers.1"]}) == []
        assert scarce_warnings({"layers.0": []}) == []


def test_a_tensor_scale_is_shared_by_gate_and_up_of_each_expert(written: Run) -> None:
    assert load_recipe("fp8-static").weights.granularity is Granularity.TENSOR
    reader = ShardReader(written("qwen3-moe"))
    base = "model.layers.0.mlp.experts"
    scales = [
        [reader.tensor(f"{base}.{n}.{leaf}.weight_scale").item() for n in range(4)]
        for leaf in ("gate_proj", "up_proj")
    ]
    assert scales[0] == scales[1]
    assert len(set(scales[0])) > 1
