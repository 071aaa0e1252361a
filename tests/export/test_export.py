"""Whole exports: what is in the folder, what other readers make of it, and what is refused."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quantkit import load_fp8
from quantkit.checkpoint import open_checkpoint, read_checkpoint
from quantkit.errors import CheckpointError, DataError, QuantKitError, UnsupportedError
from quantkit.export import ExportRefusedError, export
from quantkit.export.target import FORMATS
from quantkit.shards import ShardReader, read_json, write_json
from tests import checkpoints, tiny
from tests.checkpoints import SCHEMES, reference_model

IDS = tiny.random_ids(20).unsqueeze(0)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
"""Whole blocks, so that every format is loadable everywhere."""


def make(folder: Path, scheme: str = "dynamic", kv: str = "fp8", **changes: Any) -> Path:
    """Build a checkpoint with a tokenizer, a card, and the inputs' ranges in quantkit.json."""
    config = transformers.LlamaConfig(**{**tiny.LLAMA, **SIZES, **changes})
    path = checkpoints.build(folder, config, SCHEMES[scheme], kv, dtype=torch.bfloat16)
    tiny.save_tokenizer(path)
    modules = [
        {"name": name, "shape": [1, 1], "input_amax": 3.5}
        for name in open_checkpoint(path).quantized
    ]
    layers = [{"name": "model.layers.0", "modules": modules}]
    write_json(path / "quantkit.json", {"source": {"name": "org/tiny"}, "layers": layers})
    return path


def run(checkpoint: Path, output: Path, **options: Any) -> Any:
    return export(checkpoint, output, progress=False, **options)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits.float()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("format_name", FORMATS)
def test_weights_are_those_of_the_checkpoint_up_to_the_loss_that_is_told(
    tmp_path: Path, scheme: str, format_name: str
) -> None:
    source = make(tmp_path, scheme)
    result = run(source, tmp_path / "out", format=format_name)
    before, after = read_checkpoint(source), read_checkpoint(tmp_path / "out")
    assert before.keys() == after.keys()
    signal_power = error = 0.0
    quantized = {f"{name}.weight" for name in open_checkpoint(source).quantized}
    for name, tensor in before.items():
        old, new = tensor.double(), after[name].double()
        if name not in quantized:
            assert torch.equal(old, new), name
            continue
        if torch.equal(old, new):
            continue  # not rounded again, so no part of the loss
        signal_power += float(old.square().sum())
        error += float((new - old).square().sum())
    if result.loss.num_modules == 0:
        assert error == 0.0
        assert result.codes == "codes as in the checkpoint"
    else:
        found = 10 * np.log10(signal_power / error)
        assert found == pytest.approx(result.loss.sqnr_db, abs=1e-6)
        assert found > 25.0  # three bits of mantissa, twice
        assert f"{found:.1f} dB" in result.codes


LOSSLESS = {
    ("dynamic", "compressed-tensors"), ("static", "compressed-tensors"),
    ("static", "fp8-block"), ("block", "compressed-tensors"), ("block", "fp8-block"),
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "format_name"), sorted(LOSSLESS))
def test_codes_stay_where_the_format_holds_them(
    tmp_path: Path, scheme: str, format_name: str
) -> None:
    source = make(tmp_path, scheme)
    assert run(source, tmp_path / "out", format=format_name).loss.num_modules == 0


@pytest.mark.parametrize("scheme", ["dynamic", "static", "block"])
def test_an_export_of_an_export_is_the_same(tmp_path: Path, scheme: str) -> None:
    run(make(tmp_path, scheme), tmp_path / "one")
    run(tmp_path / "one", tmp_path / "two")
    for file in sorted(path.name for path in (tmp_path / "one").iterdir()):
        if file != "README.md":  # which names its folder
            one, two = (tmp_path / name / file for name in ("one", "two"))
            assert one.read_bytes() == two.read_bytes(), file


def test_two_exports_write_the_same_bytes(tmp_path: Path) -> None:
    source = make(tmp_path, "native")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(source, tmp_path / "a" / "out")
    run(source, tmp_path / "b" / "out")
    for file in (tmp_path / "a" / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / "out" / file.name).read_bytes()


class TestNames:
    """What the formats call things; each by its specification, not by our reader."""

    MODULE = "model.layers.1.mlp.down_proj"
    ATTENTION = "model.layers.1.self_attn"

    def export(self, tmp_path: Path, scheme: str, format_name: str) -> ShardReader:
        run(make(tmp_path, scheme), tmp_path / "out", format=format_name)
        return ShardReader(tmp_path / "out")

    def test_compressed_tensors(self, tmp_path: Path) -> None:
        found = self.export(tmp_path, "dynamic", "compressed-tensors")
        assert found.shape(f"{self.MODULE}.weight_scale") == (128, 1)
        assert found.dtype(f"{self.MODULE}.weight_scale") == "F32"
        assert found.dtype(f"{self.MODULE}.weight") == "F8_E4M3"
        assert found.shape(f"{self.ATTENTION}.k_scale") == (1,)

    def test_fp8_block(self, tmp_path: Path) -> None:
        found = self.export(tmp_path, "dynamic", "fp8-block")
        assert found.shape(f"{self.MODULE}.weight_scale_inv") == (1, 2)
        assert f"{self.MODULE}.weight_scale" not in found
        block = read_json(tmp_path / "out" / "config.json")["quantization_config"]
        assert block["quant_method"] == "fp8"
        assert block["weight_block_size"] == [128, 128]
        assert block["activation_scheme"] == "dynamic"
        assert block["modules_to_not_convert"] == ["lm_head"]

    def test_modelopt(self, tmp_path: Path) -> None:
        found = self.export(tmp_path, "static", "modelopt")
        assert found.shape(f"{self.MODULE}.weight_scale") == ()
        assert found.shape(f"{self.MODULE}.input_scale") == ()
        assert found.shape(f"{self.ATTENTION}.k_proj.k_scale") == ()
        assert found.shape(f"{self.ATTENTION}.v_proj.v_scale") == ()
        assert f"{self.ATTENTION}.k_scale" not in found
        side = read_json(tmp_path / "out" / "hf_quant_config.json")["quantization"]
        assert side["quant_algo"] == side["kv_cache_quant_algo"] == "FP8"
        assert side["exclude_modules"] == ["lm_head"]

    def test_modelopt_shares_scales_in_fused_groups(self, tmp_path: Path) -> None:
        found = self.export(tmp_path, "dynamic", "modelopt")
        for group in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            for kind in ("weight_scale", "input_scale"):
                names = [f"model.layers.0.{group[0]}.{part}_proj.{kind}" for part in group[1]]
                assert len({float(found.tensor(name)) for name in names}) == 1
        # 3.5 / 448 is a power of two, so its scale is exact.
        assert float(found.tensor(f"{self.MODULE}.input_scale")) == 3.5 / 448

    def test_nothing_of_another_format_is_left(self, tmp_path: Path) -> None:
        run(make(tmp_path, "dynamic"), tmp_path / "one", format="modelopt")
        run(tmp_path / "one", tmp_path / "two", format="compressed-tensors")
        assert not (tmp_path / "two" / "hf_quant_config.json").exists()
        names = ShardReader(tmp_path / "two").names
        assert not [name for name in names if "k_proj.k_scale" in name]


class TestOtherReaders:
    """transformers reads what we wrote, and computes what our weights say."""

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_compressed_tensors_in_transformers(self, tmp_path: Path, scheme: str) -> None:
        quantization = pytest.importorskip("compressed_tensors.quantization")
        out = tmp_path / "out"
        run(make(tmp_path, scheme), out)
        quantization.QuantizationConfig.model_validate(
            read_json(out / "config.json")["quantization_config"]
        )
        weights_only = transformers.CompressedTensorsConfig(run_compressed=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, quantization_config=weights_only
        )
        assert torch.equal(logits(model), logits(reference_model(out)))

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_fp8_blocks_in_transformers(self, tmp_path: Path, scheme: str) -> None:
        out = tmp_path / "out"
        run(make(tmp_path, scheme), out, format="fp8-block")
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert torch.equal(logits(model), logits(reference_model(out)))

    @pytest.mark.parametrize("format_name", FORMATS)
    def test_our_runtime(self, tmp_path: Path, format_name: str) -> None:
        out = tmp_path / "out"
        run(make(tmp_path), out, format=format_name)
        ours = load_fp8(out, dtype="float32", kv="none").logits(IDS)
        expected = logits(reference_model(out))
        # Other kernels; sums of at most 256 float32 terms.
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
        [completion] = load_fp8(out).generate_ids([[1, 5, 7]], max_new_tokens=4)
        assert completion.ids

    def test_shards(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        run(make(tmp_path), out, max_shard_bytes=100_000)
        assert (out / "model.safetensors.index.json").is_file()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            out,
            dtype=torch.float32,
            quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
        )
        assert torch.equal(logits(model), logits(reference_model(out)))


class TestSideFiles:
    def test_b30_generation_config_and_tokenizer_stay_as_they_are(self, tmp_path: Path) -> None:
        source = make(tmp_path)
        text = '{"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": false}'
        (source / "generation_config.json").write_text(text)
        (source / "code").mkdir()
        (source / "code" / "modeling.py").write_text("# theirs\n")
        run(source, tmp_path / "out")
        for name in ("generation_config.json", "tokenizer.json", "code/modeling.py"):
            assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()

    def test_b32_ignore_is_the_complement_of_what_has_scales(self, tmp_path: Path) -> None:
        run(make(tmp_path), tmp_path / "out")
        opened = open_checkpoint(tmp_path / "out")
        linears = {name for name in opened.names if name.endswith(("_proj.weight", "head.weight"))}
        assert {f"{name}.weight" for name in opened.quantized} == linears - {"lm_head.weight"}
        assert opened.scheme.ignore == ("lm_head",)

    def test_the_report_says_what_was_exported(self, tmp_path: Path) -> None:
        result = run(make(tmp_path, "native"), tmp_path / "out")
        report = read_json(tmp_path / "out" / "quantkit.json")
        assert report["profile"] == "portable"
        assert report["source"] == {"name": "org/tiny"}
        assert report["export"]["rounded_again"] == result.num_modules
        assert report["export"]["format"] == "compressed-tensors"

    def test_a_folder_without_a_report_can_be_exported(self, tmp_path: Path) -> None:
        source = make(tmp_path)
        (source / "quantkit.json").unlink()
        run(source, tmp_path / "out")
        assert open_checkpoint(tmp_path / "out").quantized == open_checkpoint(source).quantized


class TestRefusals:
    def assert_untouched(self, folder: Path) -> None:
        left = [path.name for path in folder.iterdir() if path.name not in ("source", "fp8")]
        assert left == []

    def test_static_inputs_of_unknown_size(self, tmp_path: Path) -> None:
        source = make(tmp_path)
        (source / "quantkit.json").unlink()
        with pytest.raises(UnsupportedError, match=r"input of model\.layers.*--recipe fp8-static"):
            run(source, tmp_path / "out", format="modelopt")
        self.assert_untouched(tmp_path)

    def test_an_engine_that_would_not_load_it(self, tmp_path: Path) -> None:
        source = make(tmp_path, "static")
        with pytest.raises(ExportRefusedError, match="tensorrt-llm would not load this") as refused:
            run(source, tmp_path / "out", engines=["tensorrt-llm"])
        assert refused.value.findings
        self.assert_untouched(tmp_path)

    def test_an_unknown_engine(self, tmp_path: Path) -> None:
        source = make(tmp_path)
        with pytest.raises(UnsupportedError, match=r"'vlm' is not known.*'vllm'"):
            run(source, tmp_path / "out", engines=["vlm"])

    def test_the_checkpoint_itself(self, tmp_path: Path) -> None:
        source = make(tmp_path)
        before = (source / "model.safetensors").read_bytes()
        with pytest.raises(CheckpointError, match="is the checkpoint itself"):
            run(source, source)
        assert (source / "model.safetensors").read_bytes() == before

    def test_a_folder_of_others(self, tmp_path: Path) -> None:
        source = make(tmp_path)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("years of work")
        with pytest.raises(CheckpointError, match="choose another output folder"):
            run(source, tmp_path / "mine")
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"

    @pytest.mark.parametrize(
        "text", ["[]", "{}", '{"measurements": {"none": {}}, "count": 1}', "not json"]
    )
    def test_a_quality_file_that_is_none(self, tmp_path: Path, text: str) -> None:
        source = make(tmp_path)
        file = tmp_path / "source" / "quality.json"
        file.write_text(text)
        with pytest.raises(QuantKitError, match=r"quality\.json"):
            run(source, tmp_path / "out", quality=file)
        self.assert_untouched(tmp_path)

    def test_quality_that_was_not_compared_with_an_original(self, tmp_path: Path) -> None:
        source, file = make(tmp_path), tmp_path / "source" / "quality.json"
        keys = ("count", "data", "window", "stride", "dtype", "activations")
        entry = {"none": {"perplexity": 3.0}}
        file.write_text(json.dumps({**dict.fromkeys(keys, 1), "measurements": entry}))
        with pytest.raises(DataError, match="has no mean_kl"):
            run(source, tmp_path / "out", quality=file)


SCRIPT = """
import sys
from quantkit.export import export
export(sys.argv[1], sys.argv[2], progress=False)
"""


def start(source: Path, output: Path, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, str(source), str(output)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


def test_a_full_disk_leaves_the_earlier_result(tmp_path: Path) -> None:
    source = make(tmp_path)
    run(source, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    process = start(source, tmp_path / "out", preexec_fn=limit)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert b"CheckpointError: cannot write" in errors
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_killed_export_leaves_the_old_result_or_the_new_one(tmp_path: Path) -> None:
    source = make(tmp_path)
    command = [sys.executable, "-m", "tests.export.killing", str(source), str(tmp_path / "kill")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["points"] > 20
    changes = found["seen"].index("new")
    assert found["seen"] == ["old"] * changes + ["new"] * (len(found["seen"]) - changes)
    assert found["left"] == ["out"]
