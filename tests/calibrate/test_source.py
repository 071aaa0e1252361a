"""What cannot be quantized is refused early, naming the object; what can be is read exactly."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.calibrate import calibrate
from quantkit.calibrate.source import check_finite, fingerprint, open_source
from quantkit.errors import QuantKitError, SourceError
from quantkit.shards import ShardWriter
from tests import tiny

UP = "model.layers.1.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama to break."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = weights(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def to_bin(folder: Path, parts: int = 1, **options: Any) -> None:
    """Replace the safetensors file by pickles, with an index if there are several."""
    tensors = weights(folder)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    files = {}
    for number in range(parts):
        file = f"pytorch_model-{number + 1:05d}-of-{parts:05d}.bin"
        file = "pytorch_model.bin" if parts == 1 else file
        part = {name: tensors[name] for name in names[number::parts]}
        torch.save(part, folder / file, **options)
        files |= dict.fromkeys(part, file)
    if parts > 1:
        index = {"metadata": {}, "weight_map": files}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def to_shards(folder: Path) -> None:
    """Replace the safetensors file by several and an index."""
    tensors = weights(folder)
    (folder / "model.safetensors").unlink()
    writer = ShardWriter(folder, max_shard_bytes=20_000)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()


class TestReading:
    @pytest.mark.parametrize(
        "form",
        [
            lambda folder: None,
            to_shards,
            to_bin,
            lambda folder: to_bin(folder, parts=3),
            lambda folder: to_bin(folder, _use_new_zipfile_serialization=False),
        ],
        ids=["safetensors", "sharded", "bin", "sharded-bin", "bin-of-old-torch"],
    )
    def test_every_form_gives_the_same_tensors(
        self, tiny_llama: Path, folder: Path, form: Callable[[Path], None]
    ) -> None:
        form(folder)
        expected, source = weights(tiny_llama), open_source(folder)
        assert source.names == sorted(expected)
        for name, tensor in expected.items():
            assert torch.equal(source.tensor(name), tensor)
            assert source.dtype(name) == tensor.dtype
            assert source.shape(name) == tuple(tensor.shape)

    def test_b11_safetensors_win_over_bin_and_this_is_logged(
        self, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = {name: tensor + 1 for name, tensor in weights(folder).items()}
        torch.save(other, folder / "pytorch_model.bin")
        monkeypatch.setattr(logging.getLogger("quantkit"), "propagate", True)
        with caplog.at_level(logging.INFO, "quantkit"):
            source = open_source(folder)
        assert torch.equal(source.tensor(Q), weights(folder)[Q])
        assert ".safetensors and .bin" in caplog.text

    def test_the_name_of_a_source_is_its_folder_not_its_path(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert open_source(folder).name == "model"
        monkeypatch.chdir(folder)
        assert open_source(".").name == "model"


class TestFingerprint:
    def test_depends_on_the_weights_only(self, folder: Path, tiny_llama: Path) -> None:
        to_shards(folder)
        assert fingerprint(open_source(folder)) == fingerprint(open_source(tiny_llama))

    def test_changes_with_one_value(self, folder: Path) -> None:
        before = fingerprint(open_source(folder))
        rewrite(folder, lambda t: t[UP][0, 0].add_(1))
        assert fingerprint(open_source(folder)) != before


class TestQuantizedInputIsRefused:
    def test_by_its_config(self, folder: Path) -> None:
        edit_config(folder, quantization_config={"quant_method": "fp8"})
        with pytest.raises(SourceError, match=r"config.json .*'fp8'.*already quantized"):
            open_source(folder)

    def test_by_a_nested_config(self, folder: Path) -> None:
        edit_config(folder, text_config={"quantization_config": {"quant_method": "gptq"}})
        with pytest.raises(SourceError, match=r"'gptq'"):
            open_source(folder)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_by_the_dtype_of_one_tensor(self, folder: Path, dtype: torch.dtype) -> None:
        rewrite(folder, lambda t: t.update({Q: t[Q].to(dtype)}))
        kind = str(dtype).removeprefix("torch.")
        with pytest.raises(SourceError, match=rf"{Q} \({kind}\).*already quantized"):
            open_source(folder)

    @pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "qweight"])
    def test_by_the_name_of_one_tensor(self, folder: Path, leaf: str) -> None:
        name = f"model.layers.0.self_attn.q_proj.{leaf}"
        rewrite(folder, lambda t: t.update({name: torch.ones(4)}))
        with pytest.raises(SourceError, match=rf"{name}.*already quantized"):
            open_source(folder)

    def test_when_it_is_our_own_output(
        self, calibrated: Callable[[str], Path], tmp_path: Path
    ) -> None:
        with pytest.raises(SourceError, match=r"'compressed-tensors'.*use the original"):
            calibrate(calibrated("fp8-dynamic"), tmp_path / "out", data=["/no/such/file.txt"])


class TestBrokenFoldersAreRefused:
    def test_without_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(SourceError, match=r"has no model.safetensors.* or pytorch_model.bin"):
            open_source(folder)

    def test_without_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        with pytest.raises(QuantKitError, match=r"config.json does not exist"):
            open_source(folder)

    def test_with_a_missing_shard(self, folder: Path) -> None:
        to_shards(folder)
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(QuantKitError, match=rf"{shard.name} is missing"):
            open_source(folder)

    def test_with_a_truncated_file(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(QuantKitError, match=r"model.safetensors .*truncated"):
            open_source(folder)

    def test_with_an_index_that_names_a_tensor_no_shard_has(self, folder: Path) -> None:
        to_shards(folder)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.layers.9.ghost"] = next(iter(index["weight_map"].values()))
        path.write_text(json.dumps(index))
        with pytest.raises(QuantKitError, match=r"model.layers.9.ghost"):
            open_source(folder)

    def test_with_a_bin_index_that_names_a_tensor_no_file_has(self, folder: Path) -> None:
        to_bin(folder, parts=2)
        path = folder / "pytorch_model.bin.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.layers.9.ghost"] = "pytorch_model-00001-of-00002.bin"
        path.write_text(json.dumps(index))
        with pytest.raises(SourceError, match=r"model.layers.9.ghost is in pytorch_model-00001"):
            open_source(folder)

    def test_with_a_missing_bin_file(self, folder: Path) -> None:
        to_bin(folder, parts=2)
        (folder / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(SourceError, match=r"00002-of-00002.bin is missing"):
            open_source(folder)

    @pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 garbage"])
    def test_with_a_bin_that_is_no_pickle(self, folder: Path, content: bytes) -> None:
        to_bin(folder)
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(SourceError, match=r"pytorch_model.bin cannot be read"):
            open_source(folder)

    def test_with_a_bin_that_holds_no_dict(self, folder: Path) -> None:
        to_bin(folder)
        torch.save([torch.ones(2)], folder / "pytorch_model.bin")
        with pytest.raises(SourceError, match=r"holds list"):
            open_source(folder)

    def test_where_a_tensor_has_another_shape_than_the_config(
        self, folder: Path, tmp_path: Path
    ) -> None:
        rewrite(folder, lambda t: t.update({UP: t[UP][:, :32].contiguous()}))
        with pytest.raises(SourceError, match=rf"{UP} has shape \[96, 32\].*\[96, 64\]"):
            calibrate(folder, tmp_path / "out", samples=2, progress=False)

    def test_where_the_config_is_of_no_known_kind(self, folder: Path) -> None:
        edit_config(folder, model_type="no_such_kind")
        with pytest.raises(SourceError, match=r"config.json cannot be used.*no_such_kind"):
            open_source(folder).config()


class Bomb:
    """Unpickling it creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain-pickle"])
def test_b11_a_malicious_pickle_is_refused_and_not_run(
    folder: Path, tmp_path: Path, zipped: bool
) -> None:
    to_bin(folder)
    state = {"a": torch.ones(2), "b": Bomb(tmp_path / "boom")}
    path = folder / "pytorch_model.bin"
    if zipped:
        torch.save(state, path)
    else:
        path.write_bytes(pickle.dumps(state))
    with pytest.raises(SourceError, match=r"pytorch_model.bin .*nothing in it was run.*[Cc]onvert"):
        open_source(folder)
    assert not (tmp_path / "boom").exists()


class TestNotFinite:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize(
        ("values", "counts"),
        [([torch.nan], "1 NaN and 0 Inf"), ([torch.inf, torch.nan, -torch.inf], "1 NaN and 2 Inf")],
        ids=["nan", "both"],
    )
    def test_is_counted_and_the_first_is_located(
        self, dtype: torch.dtype, values: list[float], counts: str
    ) -> None:
        tensor = torch.ones(5, 6)
        tensor[3, 4 : 4 + len(values)] = torch.tensor(values[:2])
        tensor[4, 0] = values[-1] if len(values) == 3 else 1
        with pytest.raises(SourceError, match=rf"tensor w has {counts} of 30 .* \[3, 4\]"):
            check_finite("w", tensor.to(dtype))

    @pytest.mark.parametrize("tensor", [torch.ones(3, 2), torch.zeros(0), torch.ones(2).int()])
    def test_other_tensors_pass(self, tensor: Tensor) -> None:
        check_finite("w", tensor)

    def test_the_largest_finite_values_pass(self) -> None:
        check_finite("w", torch.tensor([torch.finfo(torch.bfloat16).max]).bfloat16())

    def test_no_weight_is_left_unchecked(self, folder: Path) -> None:
        for name in weights(folder):
            rewrite(folder, lambda t, name=name: t[name].view(-1)[-1:].fill_(torch.nan))
            with pytest.raises(SourceError, match=rf"tensor {name} has 1 NaN"):
                open_source(folder).scan(lambda: None)
            rewrite(folder, lambda t, name=name: t[name].view(-1)[-1:].fill_(1))


class TestNames:
    def test_a_file_that_is_no_gguf_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "model.bin"
        path.write_bytes(b"x")
        with pytest.raises(SourceError, match=r"expected a model folder or a .gguf file"):
            open_source(path)

    @pytest.mark.parametrize("name", ["/no/such/model", "./model", "a/b/c", "absent.gguf"])
    def test_what_cannot_be_a_hub_id_is_not_asked_for(self, name: str) -> None:
        with pytest.raises(SourceError, match=rf"{name} does not exist"):
            open_source(name)

    def test_a_folder_wins_over_a_hub_id_and_this_is_logged(
        self,
        folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "org").mkdir()
        folder.rename(tmp_path / "org" / "name")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(logging.getLogger("quantkit"), "propagate", True)
        with caplog.at_level(logging.INFO, "quantkit"):
            assert open_source("org/name").name == "name"
        assert "org/name" in caplog.text
        assert "folder" in caplog.text


class TestSideFiles:
    def test_are_copied_byte_for_byte_with_subfolders(self, folder: Path, tmp_path: Path) -> None:
        extras = {
            "README.md": b"# hi\r\n",
            "chat_template.jinja": b"{{ x }}\n\n",
            "additional_chat_templates/tool_use.jinja": b"{{ y }}",
            "generation_config.json": b'{"temperature":0.6,  "do_sample": false}',
            "assets/logo.png": bytes(range(256)),
            "modeling_custom.py": b"print('no')",
        }
        for name, content in extras.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        target = tmp_path / "target"
        target.mkdir()
        open_source(folder).write_side_files(target)
        for name, content in extras.items():
            assert (target / name).read_bytes() == content
        assert (target / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()

    def test_are_no_weights_in_any_form(self, folder: Path, tmp_path: Path) -> None:
        names = ["pytorch_model.bin", "model.gguf", "onnx/model.onnx", "original/consolidated.pth"]
        for name in [*names, "tf_model.h5", "flax_model.msgpack", "consolidated.00.pth"]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"weights")
        target = tmp_path / "target"
        target.mkdir()
        open_source(folder).write_side_files(target)
        copied = [path for path in target.rglob("*") if path.is_file()]
        assert copied
        assert not [path for path in copied if path.read_bytes() == b"weights"]
        assert not (target / "model.safetensors").exists()
        assert not (target / "config.json").exists()

    def test_are_followed_through_links(self, folder: Path, tmp_path: Path) -> None:
        """The Hub's cache is a folder of links."""
        (tmp_path / "blob").write_bytes(b"content")
        (folder / "vocab.txt").symlink_to(tmp_path / "blob")
        target = tmp_path / "target"
        target.mkdir()
        open_source(folder).write_side_files(target)
        assert (target / "vocab.txt").read_bytes() == b"content"
        assert not (target / "vocab.txt").is_symlink()


def test_a_model_without_tokenizer_is_said(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(SourceError, match=r"has no usable tokenizer"):
        open_source(folder).tokenizer()


def test_weights_alone_need_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    calibrate(folder, tmp_path / "out", kv="none", tiers="none", progress=False)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert weights(tmp_path / "out")["lm_head.weight"].shape[0] == tiny.VOCAB_SIZE
