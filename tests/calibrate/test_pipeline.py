"""The whole run: what it writes, that it writes it every time, and that failures leave nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.calibrate import Recipe, Report, calibrate, joint_run, layerwise, load_recipe
from quantkit.calibrate.moving import Moving
from quantkit.checkpoint import open_checkpoint, read_checkpoint
from quantkit.errors import (
    CheckpointError,
    DataError,
    QuantKitError,
    RecipeError,
    SourceError,
    UnsupportedError,
)
from quantkit.numerics import E4M3, fake_quantize
from quantkit.scheme import Granularity, QuantSpec
from quantkit.shards import ShardReader
from tests import reference, tiny
from tests.calibrate import models

Calibrated = Callable[[str], Path]
ModelOf = Callable[[str], Path]
RECIPES = ["fp8-dynamic", "fp8-static", "fp8-block"]
SCALES = ("weight_scale", "input_scale", "k_scale", "v_scale")


def run(model: Path, out: Path, data: Path, **options: Any) -> Report:
    options = {"samples": 16, "progress": False, "data": [str(data)]} | options
    return calibrate(model, out, **options)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    reader = ShardReader(folder)
    return {name: reader.tensor(name) for name in reader.names}


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file by its name below the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def config_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


class TestWhatIsWritten:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_loading_and_dequantizing_equals_fake_quantizing_the_source(
        self, tiny_llama: Path, rounded: Calibrated, recipe: str
    ) -> None:
        source, plain = tensors_of(tiny_llama), read_checkpoint(rounded(recipe))
        checkpoint, spec = open_checkpoint(rounded(recipe)), load_recipe(recipe).weights
        assert plain.keys() == source.keys()
        assert len(checkpoint.quantized) == 14
        for module in checkpoint.quantized:
            weight = source[f"{module}.weight"].float()
            grid = spec.grid(checkpoint.weight(module).scale)
            expected = fake_quantize(weight, grid, E4M3, spec.tile(*weight.shape))
            assert torch.equal(plain[f"{module}.weight"], expected)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_codes_and_scales_equal_the_oracle(
        self, tiny_llama: Path, rounded: Calibrated, recipe: str
    ) -> None:
        source, spec = tensors_of(tiny_llama), load_recipe(recipe).weights
        checkpoint = open_checkpoint(rounded(recipe))
        for module in checkpoint.quantized:
            stored = checkpoint.weight(module)
            weight = source[f"{module}.weight"].double().numpy()
            # The scale itself, shared or not, is compared in test_quantized_layer.
            grid = spec.grid(stored.scale).double().numpy()
            if recipe != "fp8-static":
                tile = spec.tile(*weight.shape)
                assert np.array_equal(grid, reference.quantize_weight(weight, tile)[1])
            codes = reference.quantize(weight, grid, "e4m3", spec.tile(*weight.shape))
            assert np.array_equal(stored.codes.view(torch.uint8).numpy(), codes)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_everything_else_is_bit_identical_in_the_sources_dtype(
        self, tiny_llama: Path, calibrated: Calibrated, recipe: str
    ) -> None:
        source, stored = tensors_of(tiny_llama), tensors_of(calibrated(recipe))
        quantized = {f"{m}.weight" for m in open_checkpoint(calibrated(recipe)).quantized}
        for name in source.keys() - quantized:
            assert stored[name].dtype == source[name].dtype
            assert torch.equal(stored[name].view(torch.int16), source[name].view(torch.int16))
        assert all(name.endswith(SCALES) for name in stored.keys() - source.keys())

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_every_scale_is_finite_positive_float32_and_a_bfloat16(
        self, calibrated: Calibrated, recipe: str
    ) -> None:
        scales = {n: t for n, t in tensors_of(calibrated(recipe)).items() if n.endswith(SCALES)}
        static = recipe == "fp8-static"
        assert len(scales) == 14 * (1 + static) + 4
        for scale in scales.values():
            assert scale.dtype == torch.float32
            assert bool((scale.isfinite() & (scale > 0)).all())
            assert torch.equal(scale.bfloat16().float(), scale)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_ignore_is_the_complement_of_what_has_scales(
        self, calibrated: Calibrated, recipe: str
    ) -> None:
        assert config_of(calibrated(recipe))["quantization_config"]["ignore"] == ["lm_head"]
        assert "lm_head.weight_scale" not in tensors_of(calibrated(recipe))

    def test_fused_groups_share_weight_and_input_scales_of_the_static_recipe(
        self, calibrated: Calibrated
    ) -> None:
        checkpoint = open_checkpoint(calibrated("fp8-static"))
        for layer in ("model.layers.0", "model.layers.1"):
            for group in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
                weights = [checkpoint.weight(f"{layer}.{group[0]}.{m}_proj") for m in group[1]]
                assert len({float(weight.scale) for weight in weights}) == 1
                assert len({float(weight.input_scale) for weight in weights}) == 1
            alone = checkpoint.weight(f"{layer}.mlp.down_proj").scale
            assert alone != checkpoint.weight(f"{layer}.mlp.up_proj").scale

    def test_config_keeps_every_key_of_the_source(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
        added = {"auto_map": {"x": "y"}, "my_key": [1, {"a": None}], "quantization_config": None}
        before = config_of(folder) | added
        (folder / "config.json").write_text(json.dumps(before))
        run(folder, tmp_path / "out", calibration_file, samples=2)
        after = config_of(tmp_path / "out")
        assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
        del before["quantization_config"]
        assert after == before
        assert list(after) == list(before)

    def test_side_files_are_there_byte_for_byte(
        self, tiny_llama: Path, calibrated: Calibrated
    ) -> None:
        source, out = contents(tiny_llama), contents(calibrated("fp8-dynamic"))
        for name in source.keys() - {"config.json", "model.safetensors"}:
            assert out[name] == source[name]
        assert out.keys() - source.keys() == {"quantkit.json"}

    @pytest.mark.parametrize("kind", ["qwen2", "llama-biases", "gpt-neox", "opt", "falcon"])
    def test_biases_are_bit_identical(
        self, model_of: ModelOf, calibration_file: Path, tmp_path: Path, kind: str
    ) -> None:
        run(model_of(kind), tmp_path / "out", calibration_file, samples=2)
        source, stored = tensors_of(model_of(kind)), tensors_of(tmp_path / "out")
        biases = [name for name in source if name.endswith("bias")]
        assert biases or kind == "falcon"
        assert stored.keys() >= source.keys()
        assert all(torch.equal(stored[name], source[name]) for name in biases)

    @pytest.mark.parametrize("max_shard_bytes", [1, 20_000, 10**9])
    def test_shards_hold_the_same_tensors_whatever_their_size(
        self,
        tiny_llama: Path,
        calibrated: Calibrated,
        calibration_file: Path,
        tmp_path: Path,
        max_shard_bytes: int,
    ) -> None:
        out = tmp_path / "out"
        run(tiny_llama, out, calibration_file, max_shard_bytes=max_shard_bytes)
        expected, stored = tensors_of(calibrated("fp8-dynamic")), tensors_of(out)
        assert stored.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8))
        for file in out.glob("model-*.safetensors"):
            content = load_file(file)
            assert len(content) == 1 or sum(t.nbytes for t in content.values()) <= max_shard_bytes

    def test_an_input_bias_or_tensor_unknown_to_the_model_is_carried_over(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
        extra = {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8.0),
            "model.layers.2.mtp.weight": torch.ones(3, dtype=torch.int64),
        }
        save_file(tensors_of(folder) | extra, folder / "model.safetensors")
        run(folder, tmp_path / "out", calibration_file, samples=2)
        stored = tensors_of(tmp_path / "out")
        assert all(torch.equal(stored[name], tensor) for name, tensor in extra.items())


class TestModules:
    def test_the_output_head_is_quantized_where_the_recipe_asks(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        recipe = Recipe("with-head", QuantSpec(Granularity.CHANNEL), ignore=())
        options: dict[str, Any] = {"recipe": recipe, "samples": 2, "tiers": "none"}
        run(tiny_llama, tmp_path / "out", calibration_file, **options)
        checkpoint = open_checkpoint(tmp_path / "out")
        assert "lm_head" in checkpoint.quantized
        assert checkpoint.scheme.ignore == ()
        weight = tensors_of(tiny_llama)["lm_head.weight"].double().numpy()
        codes, _ = reference.quantize_weight(weight, (1, weight.shape[1]))
        assert np.array_equal(checkpoint.weight("lm_head").codes.view(torch.uint8).numpy(), codes)

    def test_a_head_with_static_inputs_is_refused(self, tiny_llama: Path, tmp_path: Path) -> None:
        spec = QuantSpec(Granularity.TENSOR)
        recipe = Recipe("with-head", spec, inputs=spec, ignore=())
        with pytest.raises(UnsupportedError, match=r"lm_head cannot be quantized with static"):
            calibrate(tiny_llama, tmp_path / "out", recipe=recipe, progress=False)

    def test_ignored_modules_stay_as_they_are(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        ignore = ["layers.0.mlp", "re:.*layers.1.self_attn.o_proj"]
        run(tiny_llama, tmp_path / "out", calibration_file, ignore=ignore, samples=2)
        source, stored = tensors_of(tiny_llama), tensors_of(tmp_path / "out")
        kept = [f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
        kept += ["model.layers.1.self_attn.o_proj"]
        listed = config_of(tmp_path / "out")["quantization_config"]["ignore"]
        assert sorted(listed) == sorted([*kept, "lm_head"])
        for name in kept:
            assert torch.equal(stored[f"{name}.weight"], source[f"{name}.weight"])
            assert f"{name}.weight_scale" not in stored

    @pytest.mark.parametrize(
        ("ignore", "words"),
        [
            ("lm_haed", "'lm_haed'.*did you mean 'lm_head'"),
            ("re:.*(unclosed", "unclosed"),
            ("layers.0.self_attn.q_proj", "k_proj"),
            ("re:.*", "leaves nothing to quantize"),
        ],
    )
    def test_an_ignore_that_does_not_fit_the_model_is_refused(
        self, tiny_llama: Path, tmp_path: Path, ignore: str, words: str
    ) -> None:
        with pytest.raises(RecipeError, match=words):
            calibrate(tiny_llama, tmp_path / "out", ignore=[ignore], progress=False)
        assert not (tmp_path / "out").exists()

    def test_a_model_without_linear_modules_is_refused(
        self, tmp_path: Path, calibration_file: Path
    ) -> None:
        import transformers

        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)
        folder = models.save(tmp_path / "gpt2", config)
        with pytest.raises(QuantKitError, match=r"no linear module in its decoder layers"):
            run(folder, tmp_path / "out", calibration_file)


class TestTheSameEveryTime:
    """At tiny sizes, where a matmul does not depend on its rows; test_layerwise has larger ones."""

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("batch_size", [1, 3, 16])
    def test_bytes_do_not_depend_on_the_batch_size(
        self,
        tiny_llama: Path,
        calibrated: Calibrated,
        calibration_file: Path,
        tmp_path: Path,
        recipe: str,
        batch_size: int,
    ) -> None:
        run(tiny_llama, tmp_path / "o", calibration_file, recipe=recipe, batch_size=batch_size)
        assert contents(tmp_path / "o") == contents(calibrated(recipe))

    def test_b22_bytes_do_not_depend_on_threads(
        self, tiny_llama: Path, calibrated: Calibrated, calibration_file: Path, tmp_path: Path
    ) -> None:
        torch.set_num_threads(2)
        run(tiny_llama, tmp_path / "o", calibration_file, recipe="fp8-static")
        assert contents(tmp_path / "o") == contents(calibrated("fp8-static"))

    def test_bytes_do_not_depend_on_the_random_state(
        self, tiny_llama: Path, calibrated: Calibrated, calibration_file: Path, tmp_path: Path
    ) -> None:
        torch.manual_seed(123)
        state = torch.random.get_rng_state()
        run(tiny_llama, tmp_path / "o", calibration_file)
        assert contents(tmp_path / "o") == contents(calibrated("fp8-dynamic"))
        assert torch.equal(torch.random.get_rng_state(), state)

    def test_b22_tensors_do_not_depend_on_the_order_of_rows(
        self, tiny_llama: Path, calibrated: Calibrated, tmp_path: Path
    ) -> None:
        rows = tiny.calibration_rows()[::-1]
        data = tiny.write_jsonl(tmp_path / "reversed.jsonl", rows)
        run(tiny_llama, tmp_path / "o", data, recipe="fp8-static")
        expected = calibrated("fp8-static") / "model.safetensors"
        assert (tmp_path / "o" / "model.safetensors").read_bytes() == expected.read_bytes()

    def test_b22_another_seed_with_all_rows_used_changes_nothing_but_its_record(
        self, tiny_llama: Path, calibrated: Calibrated, calibration_file: Path, tmp_path: Path
    ) -> None:
        run(tiny_llama, tmp_path / "o", calibration_file, recipe="fp8-static", seed=7)
        one, other = contents(tmp_path / "o"), contents(calibrated("fp8-static"))
        mine, theirs = json.loads(one.pop("quantkit.json")), json.loads(other.pop("quantkit.json"))
        assert one == other
        assert (mine.pop("seed"), theirs.pop("seed")) == (7, 0)
        assert (mine["data"].pop("seed"), theirs["data"].pop("seed")) == (7, 0)
        assert mine == theirs

    def test_b22_another_seed_chooses_other_samples(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        hashes = set()
        for seed in (0, 1):
            report = run(tiny_llama, tmp_path / "o", calibration_file, samples=3, seed=seed)
            hashes.add(report.provenance["data"]["sha256"])
        assert len(hashes) == 2

    def test_no_path_of_the_model_or_the_output_is_written(
        self, calibrated: Calibrated, tiny_llama: Path
    ) -> None:
        text = (calibrated("fp8-dynamic") / "quantkit.json").read_text()
        assert str(tiny_llama) not in text
        assert str(calibrated("fp8-dynamic")) not in text

    def test_the_same_data_at_another_place_gives_the_same_bytes(
        self, tiny_llama: Path, calibrated: Calibrated, calibration_file: Path, tmp_path: Path
    ) -> None:
        moved = Path(shutil.copy(calibration_file, tmp_path))
        run(tiny_llama, tmp_path / "o", moved)
        assert contents(tmp_path / "o") == contents(calibrated("fp8-dynamic"))


class TestDtypes:
    def test_unquantized_tensors_are_cast_only_on_request(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        run(tiny_llama, tmp_path / "o", calibration_file, dtype="float32", samples=2)
        source, stored = tensors_of(tiny_llama), tensors_of(tmp_path / "o")
        assert stored["lm_head.weight"].dtype == torch.float32
        assert torch.equal(stored["lm_head.weight"], source["lm_head.weight"].float())
        assert config_of(tmp_path / "o")["dtype"] == "float32"

    def test_a_cast_that_overflows_names_tensor_and_maximum(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
        tensors = tensors_of(folder)
        tensors["model.layers.1.input_layernorm.weight"][3] = -1e5
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(SourceError, match=r"layers\.1\.input_layernorm.* 99840.*float16"):
            run(folder, tmp_path / "o", calibration_file, dtype="float16", samples=2)
        assert not (tmp_path / "o").exists()
        run(folder, tmp_path / "o", calibration_file, samples=2)  # bfloat16 holds it


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"samples": 0}, DataError, "--samples must be at least 1, got 0"),
            ({"seq_len": -1}, DataError, "--seq-len must be at least 1, got -1"),
            ({"batch_size": 0}, DataError, "--batch-size must be at least 1, got 0"),
            ({"seq_len": 128}, DataError, "128 exceeds the model's limit of 64"),
            ({"dtype": "fp16"}, UnsupportedError, "'fp16'; known: auto"),
            ({"device": "tpu"}, UnsupportedError, "'tpu'; known: auto, cpu, cuda"),
            ({"kv": "int8"}, RecipeError, "'int8'"),
            ({"recipe": "fp8-dynamics"}, RecipeError, "did you mean 'fp8-dynamic'"),
            ({"data": ["bultin"]}, DataError, "did you mean 'builtin'"),
            ({"data": []}, DataError, "calibration data is required"),
            ({"chat_template": "/no/such.jinja"}, DataError, "chat template /no/such.jinja"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    def test_a_wrong_one_is_named_and_nothing_is_left(
        self,
        tiny_llama: Path,
        tmp_path: Path,
        options: dict[str, Any],
        error: type[QuantKitError],
        words: str,
    ) -> None:
        with pytest.raises(error, match=words):
            calibrate(tiny_llama, tmp_path / "out", progress=False, **options)
        assert list(tmp_path.iterdir()) == []

    def test_an_output_is_needed_unless_it_is_a_dry_run(self, tiny_llama: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no output folder is given.*-o"):
            calibrate(tiny_llama)
        assert calibrate(tiny_llama, dry_run=True).path is None

    def test_the_model_itself_is_no_output(self, tiny_llama: Path) -> None:
        before = contents(tiny_llama)
        with pytest.raises(CheckpointError, match=r"is the model itself"):
            calibrate(tiny_llama, tiny_llama)
        assert contents(tiny_llama) == before

    def test_the_default_length_is_the_models_limit_and_this_is_said(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        report = run(tiny_llama, tmp_path / "o", calibration_file, samples=2)
        assert report.provenance["data"]["seq_len"] == 64
        assert any("64 tokens" in warning for warning in report.warnings)

    def test_a_dry_run_touches_nothing(self, tiny_llama: Path, tmp_path: Path) -> None:
        before = contents(tiny_llama)
        out = tmp_path / "not" / "there"
        report = calibrate(tiny_llama, out, dry_run=True, data=["/no/such/file.txt"])
        assert "model.layers.1.mlp.down_proj" in str(report)
        assert list(tmp_path.iterdir()) == []
        assert contents(tiny_llama) == before


class TestFailures:
    @pytest.fixture
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
        """Let the second layer fail. (An interrupt leaves what --resume needs: test_resume.)"""
        original = joint_run.calibrate_layer

        def fail(model: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            if number == 1:
                raise ValueError("boom")
            return original(model, number, *args, **kwargs)

        monkeypatch.setattr(joint_run, "calibrate_layer", fail)
        return ValueError

    def test_leave_no_output_and_nothing_beside_it(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path, failing: Any
    ) -> None:
        with pytest.raises(failing):
            run(tiny_llama, tmp_path / "out", calibration_file)
        assert list(tmp_path.iterdir()) == []

    def test_leave_an_earlier_result_as_it_was(
        self, calibrated: Calibrated, tiny_llama: Path, tmp_path: Path, failing: Any
    ) -> None:
        out = Path(shutil.copytree(calibrated("fp8-dynamic"), tmp_path / "out"))
        before = contents(out)
        with pytest.raises(failing):
            calibrate(tiny_llama, out, samples=2, progress=False)
        assert contents(out) == before
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_an_earlier_result_is_replaced_by_a_new_one(
        self, calibrated: Calibrated, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        out = Path(shutil.copytree(calibrated("fp8-static"), tmp_path / "out"))
        run(tiny_llama, out, calibration_file)
        assert contents(out) == contents(calibrated("fp8-dynamic"))

    def test_foreign_files_are_not_replaced(self, tiny_llama: Path, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(CheckpointError, match=r"not empty and has no quantkit.json"):
            calibrate(tiny_llama, tmp_path, progress=False)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_too_little_disk_is_said_before_data_is_read(
        self, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
        with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes .* 1,000 free"):
            calibrate(tiny_llama, tmp_path / "out", data=["/no/such/file.txt"], progress=False)

    def test_hooks_are_removed_when_a_layer_fails(
        self,
        tiny_llama: Path,
        calibration_file: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        kept: list[Any] = []
        monkeypatch.setattr(
            layerwise.LayerwiseModel,
            "start",
            lambda self, *args: kept.append(self.skeleton) or Moving(1, 1),
        )
        with pytest.raises((IndexError, QuantKitError)):
            run(tiny_llama, tmp_path / "out", calibration_file, budget=0)
        modules = list(kept[0].model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


class TestOutputInsideTheSource:
    def test_an_output_below_the_model_is_not_copied_into_itself(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
        for _ in range(2):
            run(folder, folder / "fp8", calibration_file, samples=2)
        assert not (folder / "fp8" / "fp8").exists()


def test_modes_follow_the_umask(tiny_llama: Path, calibration_file: Path, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        run(tiny_llama, tmp_path / "out", calibration_file, samples=2)
    finally:
        os.umask(mask)
    for path in (tmp_path / "out").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path
