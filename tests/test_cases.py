"""Cases from the field, end to end: calibrate a tiny model, then load it here and elsewhere.

Each test carries the number of its case. Three ways of computing a checkpoint's logits meet here:
transformers on our dequantized weights (the reference), transformers through compressed-tensors,
and quantkit's own runtime. None of them is involved in writing it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit import load_fp8
from quantkit.calibrate import Recipe, Report, calibrate, load_recipe
from quantkit.checkpoint import open_checkpoint, read_checkpoint
from quantkit.errors import CheckpointError, DataError, QuantKitError, RecipeError, SourceError
from quantkit.scheme import Granularity, QuantSpec
from quantkit.shards import ShardReader
from tests import checkpoints, reference, tiny
from tests.calibrate import models
from tests.checkpoints import reference_model

CASES = "01 03 04 06 08 09 10 11 13 14 15 17 18 20 22 23 25 26 27 28 30 32 34 35 37 38 40 42 43 45"
RECIPES = ["fp8-dynamic", "fp8-static", "fp8-block"]
CEILING = 0.030
"""Relative Frobenius error of E4M3 by channel on Gaussian weights is 0.0251; cases allow 0.030."""
IDS = torch.stack([tiny.random_ids(20, seed) for seed in range(3)])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(calibration_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """Calibrate a folder into tmp_path / "out"; options override the defaults."""

    def calibrate_into(model: Path, out: str = "out", **options: Any) -> Path:
        options = {"data": [str(calibration_file)], "samples": 16, "progress": False} | options
        report = calibrate(model, tmp_path / out, **options)
        assert isinstance(report, Report)
        return tmp_path / out

    return calibrate_into


Run = Callable[..., Path]


def build(
    folder: Path, kind: str = "LlamaConfig", dtype: Any = torch.float32, **changes: Any
) -> Path:
    """Save a random model whose biases have a deviation of 50, with the tiny tokenizer."""
    config = getattr(transformers, kind)(**{**tiny.LLAMA, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        checkpoints.randomize(model)
    model.config.dtype = dtype
    model.to(dtype).save_pretrained(folder)
    return tiny.save_tokenizer(folder)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    reader = ShardReader(folder)
    return {name: reader.tensor(name) for name in reader.names}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def config_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model(ids).logits.float()
    return result


def through_compressed_tensors(folder: Path, **options: Any) -> Any:
    """Load a checkpoint as a user of transformers does, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **options
    )
    return model.eval()


def assert_loads_everywhere(folder: Path) -> None:
    """C3: the reference, transformers' decompressed weights and our runtime agree.

    Exactly, with transformers: the same code on the same weights. Within 1e-4 of the largest logit
    with our decoder: other kernels, float32 sums of at most a few hundred terms.
    """
    expected = logits(reference_model(folder))
    assert bool(expected.isfinite().all())
    weights_only = transformers.CompressedTensorsConfig(run_compressed=False)
    other = through_compressed_tensors(folder, quantization_config=weights_only)
    assert torch.equal(logits(other), expected)
    ours = load_fp8(folder, dtype="float32", kv="none").logits(IDS)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / x.double().norm())


def test_every_case_has_a_test_that_carries_its_number() -> None:
    found: set[str] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for line in re.findall(r"^ *(?:def test_|class TestB)\w+", path.read_text(), re.MULTILINE):
            found.update(re.findall(r"(?:_b|TestB)(\d\d)", line))
    assert found >= set(CASES.split())


class TestB01TiedEmbeddings:
    def assert_one_matrix(self, source: Path, out: Path) -> None:
        embedding = "model.embed_tokens.weight"
        stored, before = tensors_of(out), tensors_of(source)
        vocabulary = [n for n, t in stored.items() if t.shape[:1] == (tiny.VOCAB_SIZE,)]
        assert vocabulary == [embedding]
        assert stored[embedding].dtype == before[embedding].dtype
        assert torch.equal(stored[embedding], before[embedding])
        assert config_of(out)["tie_word_embeddings"] is True
        assert "lm_head" in config_of(out)["quantization_config"]["ignore"]

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_b01_a_one_matrix_is_stored(self, tiny_llama_tied: Path, run: Run, recipe: str) -> None:
        out = run(tiny_llama_tied, recipe=recipe)
        self.assert_one_matrix(tiny_llama_tied, out)
        assert_loads_everywhere(out)

    def test_b01_b_quantizing_the_head_is_refused_naming_the_tie(
        self, tiny_llama_tied: Path, run: Run, tmp_path: Path
    ) -> None:
        recipe = tmp_path / "head.toml"
        recipe.write_text(
            'targets = ["lm_head"]\nignore = []\n[weights]\ngranularity = "channel"\n'
        )
        with pytest.raises(RecipeError, match=r"lm_head.*ties.*tie_word_embeddings"):
            run(tiny_llama_tied, recipe=recipe)

    def test_b01_c_an_identical_copy_is_dropped(
        self, tiny_llama_tied: Path, run: Run, tmp_path: Path
    ) -> None:
        folder = copy(tiny_llama_tied, tmp_path / "model")
        embedding = tensors_of(folder)["model.embed_tokens.weight"]
        edit(folder, lambda t: t.update({"lm_head.weight": embedding.clone()}))
        out = run(folder)
        self.assert_one_matrix(tiny_llama_tied, out)
        assert_loads_everywhere(out)

    def test_b01_d_a_different_copy_is_refused_naming_both(
        self, tiny_llama_tied: Path, run: Run, tmp_path: Path
    ) -> None:
        folder = copy(tiny_llama_tied, tmp_path / "model")
        other = tensors_of(folder)["model.embed_tokens.weight"] * 2
        edit(folder, lambda t: t.update({"lm_head.weight": other}))
        with pytest.raises(SourceError, match=r"lm_head\.weight .* model\.embed_tokens\.weight"):
            run(folder)


class TestB03Biases:
    @pytest.fixture(params=["qwen2", "llama"])
    def source(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        if request.param == "qwen2":
            return build(tmp_path / "model", "Qwen2Config")
        return build(tmp_path / "model", attention_bias=True, mlp_bias=True)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_b03_every_bias_is_stored_as_it_was_and_used_once(
        self, source: Path, run: Run, recipe: str
    ) -> None:
        out = run(source, recipe=recipe)
        before, stored = tensors_of(source), tensors_of(out)
        biases = [name for name in before if name.endswith("bias")]
        assert len(biases) >= 6
        for name in biases:
            assert stored[name].dtype == before[name].dtype
            assert torch.equal(stored[name], before[name])
        assert_loads_everywhere(out)

    def test_b03_predictions_stay_those_of_the_source(self, run: Run, tmp_path: Path) -> None:
        source = build(tmp_path / "model", "Qwen2Config", hidden_size=256)
        spec = QuantSpec(Granularity.CHANNEL)
        out = run(source, recipe=Recipe("weights-only", spec, kv="none"))
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        ours = load_fp8(out, dtype="float32").logits(IDS)
        agreement = (ours.argmax(-1) == logits(model).argmax(-1)).float().mean()
        assert agreement >= 0.95


@pytest.mark.parametrize("tiers", ["none", None])
@pytest.mark.parametrize("recipe", RECIPES)
def test_b04_odd_dimensions(tmp_path: Path, run: Run, recipe: str, tiers: str | None) -> None:
    source = build(tmp_path / "model", **checkpoints.ODD)
    out = run(source, recipe=recipe, tiers=tiers, budget=0)
    before, checkpoint = tensors_of(source), open_checkpoint(out)
    spec = load_recipe(recipe).weights
    assert len(checkpoint.quantized) == 14
    for module in checkpoint.quantized:
        weight, stored = before[f"{module}.weight"], checkpoint.weight(module)
        rows, columns = weight.shape
        shapes = {"tensor": (1,), "channel": (rows, 1)}
        block = (-(-rows // 128), -(-columns // 128))
        assert stored.codes.shape == weight.shape
        assert stored.scale.shape == shapes.get(spec.granularity, block)
        # Compensation moves errors to where they make up for each other: the weight loses.
        ceiling = CEILING if tiers == "none" else 2 * CEILING
        assert relative_error(weight, stored.dequantize()) <= ceiling
    assert_loads_everywhere(out)
    [completion] = load_fp8(out).generate_ids([tiny.random_ids(5).tolist()], max_new_tokens=8)
    assert 1 <= len(completion.ids) <= 8


@pytest.mark.parametrize("recipe", ["fp8-dynamic", "fp8-static"])
def test_b09_fused_projections_keep_names_shapes_and_one_scale_a_row(
    tmp_path: Path, run: Run, recipe: str
) -> None:
    """By tensor there is one scale; by channel one a row of the fused matrix: 128 and 192."""
    source = build(tmp_path / "model", "Phi3Config")
    stored = tensors_of(run(source, recipe=recipe))
    for name, rows in (("self_attn.qkv_proj", 128), ("mlp.gate_up_proj", 192)):
        module = f"model.layers.0.{name}"
        scales = {"fp8-dynamic": (rows, 1), "fp8-static": (1,)}
        assert stored[f"{module}.weight"].shape == (rows, 64)
        assert stored[f"{module}.weight_scale"].shape == scales[recipe]
    assert not [name for name in stored if re.search(r"\.(q|k|v|gate|up)_proj\.", name)]
    assert_loads_everywhere(tmp_path / "out")


def unfused(source: Path, target: Path) -> Path:
    """Save a Phi-3 as the Llama that computes the same."""
    config = transformers.LlamaConfig(**{**tiny.LLAMA, "rms_norm_eps": 1e-5})
    model = transformers.AutoModelForCausalLM.from_config(config)
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    sizes = {"qkv_proj": (64, 32, 32), "gate_up_proj": (96, 96)}
    tensors = {}
    for name, tensor in tensors_of(source).items():
        fused = next((leaf for leaf in parts if f".{leaf}." in name), None)
        pieces = tensor.split(sizes[fused]) if fused else (tensor,)
        for leaf, piece in zip(parts[fused] if fused else ("",), pieces, strict=True):
            tensors[name.replace(fused, leaf) if fused else name] = piece
    model.load_state_dict(tensors)
    model.save_pretrained(target)
    return tiny.save_tokenizer(target)


def test_b09_key_and_value_scales_are_those_of_the_unfused_model(tmp_path: Path, run: Run) -> None:
    source = build(tmp_path / "model", "Phi3Config")
    other = unfused(source, tmp_path / "other")
    both = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (source, other)
    ]
    assert relative_error(*map(logits, both)) < 1e-5
    one, two = (tensors_of(run(folder, folder.name + "-fp8")) for folder in (source, other))
    for number in (0, 1):
        for leaf in ("k_scale", "v_scale"):
            name = f"model.layers.{number}.self_attn.{leaf}"
            assert one[name].item() == pytest.approx(two[name].item(), rel=0.01)


@pytest.mark.parametrize("recipe", ["fp8-dynamic", "fp8-static"])
@pytest.mark.parametrize("kind", ["gpt-neox", "falcon"])
def test_b09_interleaved_heads_keep_their_matrix_too(
    tmp_path: Path, run: Run, kind: str, recipe: str
) -> None:
    """Falcon has one head of keys and of values, 64 + 16 + 16 rows; GPT-NeoX has four of each."""
    config = (checkpoints.OTHERS | models.CONFIGS)[kind]()
    stored = tensors_of(run(tiny.save_model(tmp_path / "model", config), recipe=recipe))
    [name] = [
        n
        for n in stored
        if "layers.0." in n.replace("h.0.", "layers.0.") and n.endswith("query_key_value.weight")
    ]
    rows = {"gpt-neox": 192, "falcon": 96}[kind]
    assert stored[name].shape == (rows, 64)
    assert stored[f"{name}_scale"].shape == ((rows, 1) if recipe == "fp8-dynamic" else (1,))
    assert_loads_everywhere(tmp_path / "out")


class TestB10AlreadyQuantized:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_b10_a_our_own_output_is_refused(self, tiny_llama: Path, run: Run, recipe: str) -> None:
        out = run(tiny_llama, recipe=recipe)
        text = (out / "config.json").read_text()
        assert text.count("quantization_config") == text.count("quant_method") == 1
        assert config_of(out)["quantization_config"]["quant_method"] == "compressed-tensors"
        with pytest.raises(SourceError, match=r"'compressed-tensors'.*already quantized"):
            run(out, "again", data=["/not/read.txt"])

    def test_b10_b_a_declared_quantization_is_refused(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        folder = copy(tiny_llama, tmp_path / "model")
        value = config_of(folder) | {"quantization_config": {"quant_method": "fp8"}}
        (folder / "config.json").write_text(json.dumps(value))
        with pytest.raises(SourceError, match=r"'fp8'.*remove the block if the weights are not"):
            run(folder, data=["/not/read.txt"])

    def test_b10_c_one_float8_tensor_is_refused(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        folder = copy(tiny_llama, tmp_path / "model")
        edit(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
        with pytest.raises(SourceError, match=rf"{name} \(float8_e4m3fn\).*dequantize it first"):
            run(folder, data=["/not/read.txt"])


@pytest.mark.parametrize("parts", [1, 3], ids=["one-file", "sharded"])
@pytest.mark.parametrize("recipe", ["fp8-dynamic", "fp8-static"])
def test_b11_pickles_give_the_same_bytes_as_safetensors(
    tiny_llama: Path, run: Run, tmp_path: Path, recipe: str, parts: int
) -> None:
    folder = copy(tiny_llama, tmp_path / "tiny-llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {}
    for number in range(parts):
        file = "pytorch_model.bin" if parts == 1 else f"pytorch_model-{number}-of-{parts}.bin"
        part = {name: tensors[name] for name in list(tensors)[number::parts]}
        torch.save(part, folder / file)
        files |= dict.fromkeys(part, file)
    if parts > 1:
        index = json.dumps({"metadata": {}, "weight_map": files})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    one, other = run(folder, "bin", recipe=recipe), run(tiny_llama, "safe", recipe=recipe)
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


class TestB13Dtypes:
    DTYPES = (torch.float32, torch.float16, torch.bfloat16)

    def sources(self, tmp_path: Path) -> Iterator[Path]:
        """The same values three times: bfloat16 ones that float16 holds exactly."""
        base = build(tmp_path / "base", dtype=torch.bfloat16)

        def exact(tensor: Tensor) -> Tensor:
            return torch.where(tensor.half().float() == tensor.float(), tensor, 0)

        for dtype in self.DTYPES:
            kind = str(dtype).removeprefix("torch.")
            folder = copy(base, tmp_path / kind)
            edit(folder, lambda t, d=dtype: t.update({n: exact(x).to(d) for n, x in t.items()}))
            config = config_of(folder) | {"dtype": kind}
            (folder / "config.json").write_text(json.dumps(config))
            yield folder

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_b13_equal_values_give_equal_codes_and_scales(
        self, tmp_path: Path, run: Run, recipe: str
    ) -> None:
        first: dict[str, Tensor] | None = None
        for source in self.sources(tmp_path):
            out = run(source, f"out-{source.name}", recipe=recipe)
            stored, before = tensors_of(out), tensors_of(source)
            assert config_of(out)["dtype"] == source.name
            quantized = {f"{module}.weight" for module in open_checkpoint(out).quantized}
            for name in before.keys() - quantized:
                assert stored[name].dtype == before[name].dtype
            shared = {n: t for n, t in stored.items() if n in quantized or "scale" in n}
            first = first or shared
            assert shared.keys() == first.keys()
            for name, tensor in shared.items():
                assert torch.equal(tensor.view(torch.uint8), first[name].view(torch.uint8)), name

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_b13_an_export_has_the_size_of_its_parts(
        self, tmp_path: Path, run: Run, recipe: str
    ) -> None:
        for source in self.sources(tmp_path):
            out = run(source, f"out-{source.name}", recipe=recipe)
            before, stored = tensors_of(source), tensors_of(out)
            quantized = {f"{module}.weight" for module in open_checkpoint(out).quantized}
            scales = sum(t.nbytes for name, t in stored.items() if name.endswith("scale"))
            bound = sum(t.numel() if n in quantized else t.nbytes for n, t in before.items())
            size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
            assert size <= bound + scales + 64 * 1024

    def test_b13_a_residual_stream_beyond_float16_is_no_problem(
        self, tmp_path: Path, run: Run
    ) -> None:
        source = build(tmp_path / "model", dtype=torch.bfloat16)
        edit(source, lambda t: t["model.layers.0.mlp.down_proj.weight"].mul_(1e5))
        edit(source, lambda t: t["model.layers.1.input_layernorm.weight"].fill_(1e5))
        out = run(source)
        assert tensors_of(out)["model.layers.1.input_layernorm.weight"].dtype == torch.bfloat16
        assert_loads_everywhere(out)

    def test_b13_a_requested_cast_that_overflows_names_tensor_and_maximum(
        self, tmp_path: Path, run: Run
    ) -> None:
        source = build(tmp_path / "model", dtype=torch.bfloat16)
        edit(source, lambda t: t["model.norm.weight"][:1].fill_(1e5))
        with pytest.raises(SourceError, match=r"model\.norm\.weight reaches 99840.*float16"):
            run(source, dtype="float16")


@pytest.mark.parametrize(
    ("name", "index", "value", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", (3, 4), torch.inf, "0 NaN and 1 Inf"),
        ("model.layers.0.self_attn.q_proj.weight", (0, 0), torch.nan, "1 NaN and 0 Inf"),
        ("model.embed_tokens.weight", (127, 63), -torch.inf, "0 NaN and 1 Inf"),
    ],
)
def test_b14_nan_or_inf_stops_at_load_with_its_place(
    tiny_llama: Path,
    run: Run,
    tmp_path: Path,
    name: str,
    index: tuple[int, int],
    value: float,
    words: str,
) -> None:
    folder = copy(tiny_llama, tmp_path / "model")
    edit(folder, lambda t: t[name].__setitem__(index, value))
    place = f"{list(index)}".replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(SourceError, match=rf"{name} has {words} of \d+ values, .* {place}"):
        run(folder, data=["/not/read.txt"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0])
def test_b14_a_scale_that_is_no_scale_stops_the_run_by_name(
    tiny_llama: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Whatever made it: nothing with such a scale is written."""

    def wrong(amax: Tensor, fmt: Any) -> Tensor:
        return torch.full_like(amax.float(), value)

    monkeypatch.setattr("quantkit.calibrate.weight_tiers.amax_to_scale", wrong)
    with pytest.raises(QuantKitError, match=r"model\.layers\.0\.\w+\.\w+_proj\.weight_scale has"):
        run(tiny_llama, tiers="none", kv="none")
    assert not (tmp_path / "out").exists()


class TestB15Zeros:
    GATE, DOWN = "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.down_proj"
    UP, QUERY = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"

    def zero(self, tensors: dict[str, Tensor]) -> None:
        tensors[f"{self.GATE}.weight"][7] = 0
        tensors[f"{self.DOWN}.weight"][:] = 0
        tensors[f"{self.UP}.weight"][128:256, :128] = 0
        for leaf in "qkv":
            tensors[f"model.layers.1.self_attn.{leaf}_proj.weight"][:, 5] = 0

    @pytest.mark.parametrize("tiers", ["none", None])
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_b15_zeros_stay_zero_and_neighbours_stay_as_they_were(
        self, tmp_path: Path, run: Run, recipe: str, tiers: str | None
    ) -> None:
        sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
        source = build(tmp_path / "model", dtype=torch.bfloat16, **sizes)
        options = {"recipe": recipe, "tiers": tiers, "budget": 0}
        plain = open_checkpoint(run(source, "plain", **options))
        edit(source, self.zero)
        out = run(source, **options)
        checkpoint, before = open_checkpoint(out), tensors_of(source)
        for module in checkpoint.quantized:
            stored, zeros = checkpoint.weight(module), before[f"{module}.weight"] == 0
            codes = stored.codes.view(torch.uint8)
            assert bool((stored.scale > 0).all())
            # +0 for a zero, and exactly zero again. (A small weight may round to -0.)
            assert not codes[zeros].any()
            assert not stored.dequantize()[zeros].any()
            if tiers is not None and module not in (
                self.DOWN,
                self.UP,
            ):  # fp8-static: whose largest value is gone
                same = plain.weight(module)
                rows = stored.scale.flatten() == same.scale.flatten()
                assert bool(rows.float().mean() > 0.9)
        if tiers is not None:  # with tiers, other inputs give other codes
            codes_of = [c.weight(self.QUERY).codes.view(torch.uint8) for c in (plain, checkpoint)]
            assert codes_of[0][:, :5].equal(codes_of[1][:, :5])
        assert_loads_everywhere(out)

    def test_b15_channels_beside_a_zero_row_keep_their_codes(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        folder = copy(tiny_llama, tmp_path / "model")
        edit(folder, lambda t: t[f"{self.GATE}.weight"][7].zero_())
        one = open_checkpoint(run(tiny_llama, "plain")).weight(self.GATE)
        other = open_checkpoint(run(folder)).weight(self.GATE)
        kept = torch.arange(len(one.codes)) != 7
        assert torch.equal(one.codes.view(torch.uint8)[kept], other.codes.view(torch.uint8)[kept])
        assert torch.equal(one.scale[kept], other.scale[kept])
        assert other.scale[7] == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_b17_one_enormous_weight_leaves_other_channels_alone(
    tiny_llama: Path, run: Run, tmp_path: Path, recipe: str
) -> None:
    name = "model.layers.0.mlp.up_proj"
    folder = copy(tiny_llama, tmp_path / "model")
    edit(folder, lambda t: t[f"{name}.weight"][0].__setitem__(0, 6e4))
    weight = tensors_of(folder)[f"{name}.weight"].float()
    values = open_checkpoint(run(folder, recipe=recipe)).weight(name).dequantize()
    assert values[0, 0] == pytest.approx(6e4, rel=2**-4)  # half a step of 3 mantissa bits
    if recipe == "fp8-dynamic":
        assert relative_error(weight[1:], values[1:]) <= CEILING


@pytest.mark.parametrize("tiers", ["none", None])
def test_b17_a_recipe_that_zeroes_weights_says_where_and_how_many(
    tiny_llama: Path, run: Run, tmp_path: Path, tiers: str | None
) -> None:
    name = "model.layers.0.mlp.up_proj"
    folder = copy(tiny_llama, tmp_path / "model")
    edit(folder, lambda t: t[f"{name}.weight"][0].__setitem__(0, 6e4))
    out = run(folder, recipe="fp8-static", tiers=tiers, budget=0)
    record = json.loads((out / "quantkit.json").read_text())
    [line] = [line for line in record["warnings"] if line.startswith(f"{name}: ")]
    assert re.search(r"(9\d|100)\.\d% of its weights became zero", line)
    assert "quantkit eval" in line
    [module] = [m for m in record["layers"][0]["modules"] if m["name"] == name]
    assert module["outlier_ratio"] > 1e4
    # Nobody else's weights are lost: its sibling shares the scale, and is named too.
    others = {line.split(":")[0] for line in record["warnings"] if "became zero" in line}
    assert others == {name, name.replace("up_proj", "gate_proj")}


class TestB18Data:
    def test_b18_a_without_data_a_static_recipe_says_why_it_needs_some(
        self, tiny_llama: Path, run: Run
    ) -> None:
        with pytest.raises(DataError, match=r"data is required.*input_activations or kv_cache"):
            run(tiny_llama, recipe="fp8-static", data=[])

    def test_b18_b_an_empty_file_has_no_rows(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
            run(tiny_llama, data=[str(tmp_path / "empty.jsonl")])

    def test_b18_c_rows_with_other_fields_are_told_apart(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        data = tiny.write_jsonl(tmp_path / "d.jsonl", [{"content": "hello world the"}] * 3)
        with pytest.raises(DataError, match=r"'content'; accepted: 'text' or 'messages'"):
            run(tiny_llama, data=[str(data)])

    def test_b18_d_few_usable_rows_are_counted_in_log_and_report(
        self,
        tiny_llama: Path,
        run: Run,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        rows = [{"text": tiny.sentence(9, n) if n < 3 else ""} for n in range(16)]
        data = tiny.write_jsonl(tmp_path / "d.jsonl", rows)
        monkeypatch.setattr(logging.getLogger("quantkit"), "propagate", True)
        out = run(tiny_llama, recipe="fp8-static", data=[str(data)], samples=128)
        words = "3 of 128 samples usable (13 empty)"
        assert caplog.text.count(words) == 1
        report = json.loads((out / "quantkit.json").read_text())
        assert any(words in warning for warning in report["warnings"])
        assert report["data"]["samples"] == 3
        with pytest.raises(DataError, match=r"3 of 128 samples usable \(13 empty\).*--samples"):
            run(tiny_llama, data=[str(data)], samples=128, strict_samples=True)

    def test_b18_e_rows_of_one_token_are_too_short(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        data = tiny.write_jsonl(tmp_path / "d.jsonl", [{"text": "hello"}] * 4)
        with pytest.raises(DataError, match=r"at least 2 tokens"):
            run(tiny_llama, data=[str(data)])

    def test_b18_f_weights_alone_need_no_data(self, tiny_llama: Path, run: Run) -> None:
        out = run(tiny_llama, kv="none", tiers="none", data=["/not/read.txt"])
        assert json.loads((out / "quantkit.json").read_text())["data"] is None
        assert_loads_everywhere(out)


class TestB20LongSamples:
    def test_b20_long_rows_are_cut_with_one_warning(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        rows = [*tiny.calibration_rows(), {"text": tiny.sentence(500)}]
        data = tiny.write_jsonl(tmp_path / "d.jsonl", rows)
        out = run(tiny_llama, data=[str(data)], samples=17)
        report = json.loads((out / "quantkit.json").read_text())
        cut = [warning for warning in report["warnings"] if "were cut" in warning]
        assert len(cut) == 1
        assert "1 of 17" in cut[0]
        assert "64 tokens (longest: 501)" in cut[0]

    def test_b20_an_explicit_length_beyond_the_limit_names_both(
        self, tiny_llama: Path, run: Run
    ) -> None:
        with pytest.raises(DataError, match=r"--seq-len 128 .*64"):
            run(tiny_llama, seq_len=128)

    def test_b20_learned_positions_are_not_exceeded(self, run: Run, tmp_path: Path) -> None:
        sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2}
        config = transformers.OPTConfig(
            vocab_size=128, num_attention_heads=4, max_position_embeddings=32, **sizes
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / "opt")
        tiny.save_tokenizer(tmp_path / "opt")
        data = tiny.write_jsonl(tmp_path / "d.jsonl", [{"text": tiny.sentence(500)}] * 2)
        out = run(tmp_path / "opt", data=[str(data)], samples=2)
        assert json.loads((out / "quantkit.json").read_text())["data"]["seq_len"] == 32


def test_b22_two_runs_write_the_same_bytes_into_every_file(tiny_llama: Path, run: Run) -> None:
    one, other = (run(tiny_llama, n, recipe="fp8-static", max_shard_bytes=30_000) for n in "ab")
    files = sorted(path.relative_to(one) for path in one.rglob("*"))
    assert files == sorted(path.relative_to(other) for path in other.rglob("*"))
    assert Path("model.safetensors.index.json") in files
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def test_b23_weights_at_and_beyond_the_range_saturate(
    tiny_llama: Path, run: Run, tmp_path: Path
) -> None:
    """With one scale for a fused group, the largest weight lands on 448 exactly or just below."""
    folder = copy(tiny_llama, tmp_path / "model")
    edit(folder, lambda t: t["model.layers.0.self_attn.k_proj.weight"][0].mul_(1000))
    checkpoint = open_checkpoint(run(folder, recipe="fp8-static", tiers="none"))
    for module in checkpoint.quantized:
        codes = checkpoint.weight(module).codes.view(torch.uint8).numpy()
        values = np.abs(reference.float8_values("e4m3")[codes])
        assert np.isfinite(values).all()
        assert values.max() <= 448
    key = checkpoint.weight("model.layers.0.self_attn.k_proj")
    assert key.codes.float().abs().max() in (416, 448)  # the scale is rounded up by < 2**-7


class TestB25KvScales:
    KINDS = ("llama", "qwen2", "phi3", "gemma2")

    @torch.no_grad()
    def cached(self, source: Path, data: Path) -> list[tuple[float, float]]:
        """Return amax of (keys, values) of each layer over all rows, by the source model."""
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        amax: list[tuple[float, float]] = []
        for line in data.read_text().splitlines():
            ids = tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"][:, :64]
            cache = transformers.DynamicCache()  # keeps all positions of sliding layers
            model(ids, use_cache=True, past_key_values=cache)
            row = [(x.keys.abs().max().item(), x.values.abs().max().item()) for x in cache.layers]
            amax = (
                row
                if not amax
                else [(max(a[0], b[0]), max(a[1], b[1])) for a, b in zip(amax, row, strict=True)]
            )
        return amax

    @pytest.mark.filterwarnings("ignore:.*past_key_values")
    @pytest.mark.parametrize("recipe", ["fp8-dynamic", "fp8-static"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_b25_scales_are_those_of_the_source_models_cache(
        self, calibration_file: Path, tmp_path: Path, run: Run, kind: str, recipe: str
    ) -> None:
        config = (checkpoints.FAMILIES | checkpoints.OTHERS)[kind]()
        source = tiny.save_model(tmp_path / "model", config)
        out = run(source, recipe=recipe)
        block = config_of(out)["quantization_config"]["kv_cache_scheme"]
        expected = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        assert expected.items() <= block.items()
        assert block["symmetric"] is True
        stored = tensors_of(out)
        for number, amax in enumerate(self.cached(source, calibration_file)):
            tolerance = 0.05 if number == 0 else 0.25  # later layers see quantized ones before
            for leaf, wanted in zip(("k_scale", "v_scale"), amax, strict=True):
                scale = stored[f"model.layers.{number}.self_attn.{leaf}"]
                assert scale.shape == (1,)
                assert scale.item() == pytest.approx(wanted / 448, rel=tolerance)
                assert scale.item() != 1

    def test_b25_a_missing_scale_stops_loading_unless_the_cache_is_plain(
        self, tiny_llama: Path, run: Run
    ) -> None:
        out = run(tiny_llama)
        edit(out, lambda t: t.pop("model.layers.1.self_attn.k_scale"))
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_scale"):
            load_fp8(out)
        assert load_fp8(out, kv="none").logits(IDS).isfinite().all()

    @pytest.mark.parametrize("alias", ["k_proj.k_scale", "k_proj.output_scale"])
    def test_b25_other_tools_names_are_read(self, tiny_llama: Path, run: Run, alias: str) -> None:
        out = run(tiny_llama)
        before = open_checkpoint(out).kv_scales(1)
        base = "model.layers.1.self_attn"
        edit(out, lambda t: t.update({f"{base}.{alias}": t.pop(f"{base}.k_scale")}))
        after = open_checkpoint(out).kv_scales(1)
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))

    def test_b25_one_scale_per_head_has_the_engines_shape(self, tiny_llama: Path, run: Run) -> None:
        out = run(tiny_llama, kv="fp8-head")
        scale = tensors_of(out)["model.layers.0.self_attn.k_scale"]
        assert scale.shape == (2, 1, 1)
        assert config_of(out)["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"
        assert scale.max() == tensors_of(run(tiny_llama, "t"))["model.layers.0.self_attn.k_scale"]


class TestB28DiskFull:
    """What there is on a disk; `test_small_disk` has disks that are full."""

    @pytest.mark.parametrize("kind", ["file", "link", "foreign", "below-a-file"])
    def test_b28_a_destination_that_is_not_ours_is_refused_untouched(
        self, tiny_llama: Path, run: Run, tmp_path: Path, kind: str
    ) -> None:
        out = tmp_path / "out"
        if kind == "file":
            out.write_text("x")
        elif kind == "link":
            (tmp_path / "elsewhere").mkdir()
            out.symlink_to(tmp_path / "elsewhere")
        elif kind == "foreign":
            out.mkdir()
            (out / "model.safetensors").write_text("theirs")
        else:
            (tmp_path / "file").write_text("x")
        name = "file/out" if kind == "below-a-file" else "out"
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match=r"choose another output"):
            run(tiny_llama, name, data=["/not/read.txt"])
        assert sorted(path.name for path in tmp_path.rglob("*")) == before

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_b28_an_unwritable_parent_is_refused(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(CheckpointError, match=r"closed is not a writable folder"):
            run(tiny_llama, "closed/out")


class TestB30GenerationConfig:
    @pytest.mark.parametrize(
        "text",
        [
            '{"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": true}',
            '{"eos_token_id":[2,7],"temperature":0.6,"do_sample":false}\n',  # transformers refuses
        ],
        ids=["valid", "invalid"],
    )
    def test_b30_it_is_copied_as_it_is(
        self, tiny_llama: Path, run: Run, tmp_path: Path, text: str
    ) -> None:
        folder = copy(tiny_llama, tmp_path / "model")
        (folder / "generation_config.json").write_text(text)
        out = run(folder, samples=2)
        assert (out / "generation_config.json").read_text() == text

    def test_b30_none_is_invented(self, tiny_llama: Path, run: Run, tmp_path: Path) -> None:
        folder = copy(tiny_llama, tmp_path / "model")
        (folder / "generation_config.json").unlink()
        assert not (run(folder, samples=2) / "generation_config.json").exists()


class TestB32Patterns:
    WEIGHTS = '[weights]\ngranularity = "channel"\n'

    @pytest.mark.parametrize(
        ("toml", "words"),
        [
            ('ignore = ["lm_haed"]', r"'lm_haed'.*did you mean 'lm_head'"),
            ('ignore = ["re:.*(unclosed"]', r"'re:\.\*\(unclosed'.*not a valid regex"),
            ('targets = ["Linaer"]', r"'Linaer'.*did you mean 'Linear'"),
            ('ignore = ["layers.0.self_attn.q_proj"]', r"\(q_proj, k_proj, v_proj\).*in part"),
            ('ignore = ["re:.*mlp.gate$"]', r"'re:\.\*mlp\.gate\$'.*matches no"),
            ("wieghts = 1", r"'wieghts'.*did you mean 'weights'"),
            ('ignore = ["Linear"]', r"'Linear'.*matches no"),
        ],
    )
    def test_b32_an_entry_that_fits_nothing_is_quoted(
        self, tiny_llama: Path, run: Run, tmp_path: Path, toml: str, words: str
    ) -> None:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(f"{toml}\n{self.WEIGHTS}")
        with pytest.raises(RecipeError, match=words):
            run(tiny_llama, recipe=recipe)

    def test_b32_an_empty_recipe_is_refused(
        self, tiny_llama: Path, run: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "empty.toml").touch()
        with pytest.raises(RecipeError, match=r"empty\.toml has no \[weights\]"):
            run(tiny_llama, recipe=tmp_path / "empty.toml")

    @pytest.mark.parametrize("ignore", [[], ["mlp"], ["layers.1"], ["re:.*o_proj", "lm_head"]])
    def test_b32_ignore_is_the_complement_of_what_has_scales(
        self, tiny_llama: Path, run: Run, ignore: list[str]
    ) -> None:
        out = run(tiny_llama, ignore=ignore)
        names = tensors_of(out)
        linears = {
            n.removesuffix(".weight") for n in names if n.endswith(("proj.weight", "head.weight"))
        }
        scaled = {
            name.removesuffix("_scale")[: -len(".weight")]
            for name in names
            if name.endswith("weight_scale")
        }
        listed = config_of(out)["quantization_config"]["ignore"]
        assert len(listed) == len(set(listed))
        assert set(listed) == linears - scaled
        assert_loads_everywhere(out)


class TestOtherReaders:
    """The written folder is what compressed-tensors and transformers read."""

    @pytest.fixture(params=RECIPES)
    def checkpoint(self, request: pytest.FixtureRequest, tmp_path: Path, run: Run) -> Path:
        source = build(tmp_path / "model", hidden_size=128, intermediate_size=256)
        return run(source, recipe=request.param)

    @pytest.mark.parametrize("kv", ["fp8", "fp8-head", "none"])
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_quantization_config_parses_with_compressed_tensors(
        self, tiny_llama: Path, run: Run, recipe: str, kv: str
    ) -> None:
        quantization = pytest.importorskip("compressed_tensors.quantization")
        block = config_of(run(tiny_llama, recipe=recipe, kv=kv, samples=2))["quantization_config"]
        parsed = quantization.QuantizationConfig.model_validate(block)
        spec = load_recipe(recipe)
        group = parsed.config_groups["group_0"]
        assert group.weights.strategy == spec.weights.granularity
        assert group.input_activations.strategy == spec.inputs.granularity
        assert group.input_activations.dynamic == spec.inputs.dynamic
        assert parsed.ignore == ["lm_head"]
        assert (parsed.kv_cache_scheme is None) == (kv == "none")

    def test_transformers_gives_the_logits_of_our_dequantized_weights(
        self, checkpoint: Path
    ) -> None:
        assert_loads_everywhere(checkpoint)

    def test_transformers_quantizes_inputs_by_default_and_so_does_the_reference(
        self, checkpoint: Path
    ) -> None:
        """Loaded without options, transformers keeps decompressed weights and quantizes the input
        of every linear, with scales that are not rounded to bfloat16. On the reference with those
        inputs the result is the same to the last bit; on exact inputs it is not."""
        pytest.importorskip("compressed_tensors")
        model, opened = reference_model(checkpoint), open_checkpoint(checkpoint)
        exact = logits(model)
        inputs = opened.scheme.inputs
        for module in opened.quantized:
            static = opened.weight(module).input_scale

            def convert(_: Any, args: tuple[Tensor], static: Tensor | None = static) -> Any:
                return (unrounded_fake_quantize(args[0], inputs, static),)

            model.get_submodule(module).register_forward_pre_hook(convert)
        found = logits(through_compressed_tensors(checkpoint))
        assert torch.equal(found, logits(model))
        assert not torch.equal(found, exact)

    def test_our_runtime_quantizes_inputs_on_request_as_accurately(self, checkpoint: Path) -> None:
        """Ours rounds dynamic scales up to bfloat16, so single codes differ from transformers'.

        What must not differ is the size of the error; 1.5 leaves room for chance in a tiny model.
        """
        exact = logits(reference_model(checkpoint))
        theirs = logits(through_compressed_tensors(checkpoint))
        model = load_fp8(checkpoint, dtype="float32", kv="none", activations="quantized")
        ours = model.logits(IDS)
        assert not torch.equal(ours, exact)
        assert relative_error(exact, ours) <= 1.5 * relative_error(exact, theirs)


def unrounded_fake_quantize(x: Tensor, spec: Any, static: Tensor | None) -> Tensor:
    """Quantize and dequantize an input with scale = amax / 448, as engines do at run time."""
    runs = x.unflatten(-1, (-1, spec.group_size or x.shape[-1]))
    scale = static if static is not None else runs.abs().amax(dim=-1, keepdim=True) / 448
    codes = (runs / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).view(x.shape)


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "smollm3", "phi3", "gemma2", "gpt-neox"])
def test_other_families_calibrate_and_load(kind: str, tmp_path: Path, run: Run) -> None:
    config = (checkpoints.FAMILIES | checkpoints.OTHERS)[kind]()
    out = run(tiny.save_model(tmp_path / "model", config, torch.float32))
    expected = logits(reference_model(out))
    ours = load_fp8(out, dtype="float32", kv="none").logits(IDS)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    [completion] = load_fp8(out).generate_ids([tiny.random_ids(5).tolist()], max_new_tokens=4)
    assert 1 <= len(completion.ids) <= 4


def test_read_checkpoint_gives_a_state_dict_for_transformers(tiny_llama: Path, run: Run) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(read_checkpoint(run(tiny_llama)), strict=True)
    assert not missing
    assert not unexpected


def test_an_error_of_any_kind_is_one_of_ours(tiny_llama: Path, run: Run) -> None:
    for options in ({"recipe": "x"}, {"data": ["x"]}, {"kv": "x"}, {"dtype": "x"}, {"samples": -1}):
        with pytest.raises(QuantKitError):
            run(tiny_llama, **options)


PEAK_SCRIPT = """
import re, sys, threading, time
from pathlib import Path
from quantkit.calibrate import calibrate

peak, done = 0, False

def watch():
    global peak
    while not done:
        status = Path("/proc/self/status").read_text()
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]) * 1024)
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
calibrate(sys.argv[1], sys.argv[2], recipe="fp8-static", data=[sys.argv[3]], samples=2, seq_len=32,
          max_shard_bytes=int(sys.argv[4]), progress=False)
done = True
thread.join()
print(peak)
"""
"""Prints the peak of memory that belongs to no file: pages of the mapped source do not count."""


WIDE, NARROW = (512, 1408, 24, 12e6), (256, 704, 10, 3e6)
"""Hidden and intermediate size, layers, and how many bytes a layer has in float32, rounded."""


@pytest.mark.parametrize(
    "sizes", [NARROW, pytest.param(WIDE, marks=pytest.mark.slow)], ids=["narrow", "wide"]
)
def test_b27_memory_does_not_grow_with_the_number_of_layers(
    sizes: tuple[int, int, int, float], tmp_path: Path, calibration_file: Path
) -> None:
    """6 more narrow layers are 19 MB of source, 20 more wide ones 236 MB; less than one may stay.

    The heap is told to give memory back at once, or its gaps would be measured.
    """
    hidden, intermediate, many, layer_bytes = sizes
    heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = os.environ | heap | {"MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}

    def peak(layers: int) -> int:
        folder, out = tmp_path / f"model-{layers}", tmp_path / f"out-{layers}"
        given = {"hidden_size": hidden, "intermediate_size": intermediate}
        config = transformers.LlamaConfig(**{**tiny.LLAMA, **given, "num_hidden_layers": layers})
        tiny.save_model(folder, config, torch.float32)
        shard_bytes = int(layer_bytes * 2 / 3)
        arguments = [folder, out, calibration_file, shard_bytes]
        command = [sys.executable, "-c", PEAK_SCRIPT, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        shards = sorted(out.glob("model-*.safetensors"))
        assert sorted(set(index["weight_map"].values())) == [shard.name for shard in shards]
        assert all(shard.stat().st_size < shard_bytes + 100_000 for shard in shards)
        shutil.rmtree(folder)
        shutil.rmtree(out)
        return int(done.stdout)

    few = peak(4)
    # Beside other processes a peak is some MB higher once in a while; what grows does so always.
    assert any(peak(many) - few < layer_bytes for _ in range(3))
