"""A GGUF file gives the tensors that the model had before it was converted, or a clear refusal."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibrate import calibrate
from quantkit.calibrate.gguf_file import GgufFile
from quantkit.calibrate.gguf_source import GgufSource
from quantkit.calibrate.source import open_source
from quantkit.errors import QuantKitError, SourceError
from quantkit.shards import ShardReader

gguf = pytest.importorskip("gguf")

from tests.gguf_model import write_gguf  # noqa: E402


def source_tensors(folder: Path) -> dict[str, Tensor]:
    reader = ShardReader(folder)
    return {name: reader.tensor(name) for name in reader.names}


@pytest.fixture(scope="module")
def file(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as GGUF in float32, which holds its bfloat16 weights exactly."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", source_tensors(tiny_llama))


class TestTensors:
    def test_are_those_of_the_model_before_conversion(self, tiny_llama: Path, file: Path) -> None:
        source, expected = open_source(file), source_tensors(tiny_llama)
        assert source.names == sorted(expected)
        for name, tensor in expected.items():
            assert source.shape(name) == tuple(tensor.shape)
            assert source.dtype(name) == torch.bfloat16
            assert torch.equal(source.tensor(name), tensor), name

    @pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
    def test_of_other_types_are_dequantized_as_the_gguf_package_does(
        self, tiny_llama: Path, tmp_path: Path, kind: str
    ) -> None:
        expected = source_tensors(tiny_llama)
        source = open_source(write_gguf(tmp_path / "m.gguf", expected, kind))
        for name in ("model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
            ggml = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(expected[name].float().numpy(), ggml)
            values = torch.from_numpy(gguf.quants.dequantize(packed, ggml)).bfloat16()
            assert torch.equal(source.tensor(name), values)

    def test_without_output_matrix_the_head_is_tied(
        self, tiny_llama_tied: Path, tmp_path: Path
    ) -> None:
        path = write_gguf(tmp_path / "m.gguf", source_tensors(tiny_llama_tied))
        assert GgufSource(path).config_dict["tie_word_embeddings"] is True
        assert "lm_head.weight" not in GgufSource(path).names

    def test_that_are_not_finite_are_named(self, tiny_llama: Path, tmp_path: Path) -> None:
        tensors = source_tensors(tiny_llama)
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][3, 4] = torch.inf
        source = open_source(write_gguf(tmp_path / "m.gguf", tensors))
        with pytest.raises(SourceError, match=rf"{name} has 0 NaN and 1 Inf .* \[3, 4\]"):
            source.tensor(name)

    def test_the_architecture_lacks_are_named(self, tiny_llama: Path, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", source_tensors(tiny_llama))
        content = path.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx")
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"blk\.1\.ffn_xx\.weight"):
            _ = open_source(path).names


def test_the_config_is_that_of_the_model(tiny_llama: Path, file: Path) -> None:
    source = open_source(file)
    config, expected = source.config(), open_source(tiny_llama).config()
    fields = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    fields += ["num_key_value_heads", "max_position_embeddings", "vocab_size", "head_dim"]
    fields += ["bos_token_id", "eos_token_id", "tie_word_embeddings", "model_type"]
    fields += ["rms_norm_eps", "architectures"]
    for field in fields:
        assert getattr(config, field) == pytest.approx(getattr(expected, field)), field
    assert source.config_dict["dtype"] == "bfloat16"


@pytest.mark.parametrize("recipe", ["fp8-dynamic", "fp8-block"])
def test_codes_and_scales_are_those_of_the_model_before_conversion(
    tiny_llama: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr(GgufSource, "write_side_files", lambda self, folder: None)
    for name, model in (("folder", tiny_llama), ("gguf", file)):
        calibrate(model, tmp_path / name, recipe=recipe, kv="none", tiers="none", progress=False)
    one, other = (source_tensors(tmp_path / name) for name in ("folder", "gguf"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8)) for n in one)


Edit = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda b: b"", "is empty"),
        (lambda b: b"GGML" + b[4:], "does not start with 'GGUF'"),
        (lambda b: b[:4] + struct.pack("<I", 1) + b[8:], "version 1; versions 2 and 3"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "versions 2 and 3 are read"),
        (lambda b: b[:10], "not a readable GGUF file"),
        (lambda b: b[:60], "truncated|not a readable"),
        (lambda b: b[:-100], r"truncated: tensor .* ends at byte \d+, the file at \d+"),
    ],
    ids=["empty", "magic", "old", "big-endian", "header", "metadata", "tensor"],
)
def test_a_broken_file_is_refused(file: Path, tmp_path: Path, edit: Edit, words: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(edit(file.read_bytes()))
    with pytest.raises(SourceError, match=rf"broken\.gguf .*({words})"):
        open_source(path)


def test_a_tensor_of_unknown_type_is_named(file: Path, tmp_path: Path) -> None:
    name = b"blk.1.ffn_up.weight"
    content = bytearray(file.read_bytes())
    kind = content.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and two
    content[kind : kind + 4] = struct.pack("<I", 999)
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=rf"{name.decode()} has unknown type 999"):
        open_source(path)


def test_an_absurd_length_is_no_crash(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    content[24:32] = struct.pack("<Q", 2**62)  # of the first key
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"truncated inside its header"):
        open_source(path)


Change = Callable[[bytearray], None]


def entry(content: bytearray, name: bytes) -> int:
    """Return where a tensor's entry goes on after its name, or a key's after its own."""
    return content.index(name) + len(name)


def number(name: bytes, offset: int, code: str, value: int) -> Change:
    """Return a change that overwrites a number behind a name."""
    return lambda content: struct.pack_into(
        f"<{code}", content, entry(content, name) + offset, value
    )


HEADS_KEY = b"llama.attention.head_count"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (number(b"blk.1.ffn_up.weight", 0, "I", 2**20), "ffn_up.weight has 1048576 dimensions"),
        (number(b"blk.1.ffn_up.weight", 4, "Q", 2**62), "truncated"),
        (number(b"blk.1.ffn_up.weight", 20, "I", 12), "no whole blocks of 256"),
        (number(b"general.architecture", 4, "Q", 2**62), "truncated inside its header"),
        (number(b"tokenizer.ggml.tokens", 8, "Q", 2**60), "not a readable GGUF file|truncated"),
        (number(HEADS_KEY, 4, "I", 0), "num_attention_heads=0"),
        (number(b"llama.block_count", 4, "I", 2**31), "num_hidden_layers=2147483648"),
        (number(b"llama.embedding_length", 4, "I", 2**32 - 1), "hidden_size=4294967295"),
    ],
)
def test_absurd_numbers_are_refused(file: Path, tmp_path: Path, change: Change, words: str) -> None:
    content = bytearray(file.read_bytes())
    change(content)
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(QuantKitError, match=rf"m\.gguf.*({words})"):
        open_source(tmp_path / "m.gguf").scan(lambda: None)


def test_lists_in_lists_without_end_are_refused(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    nested = struct.pack("<IQ", 9, 1) * 5000
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + nested
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    with pytest.raises(SourceError, match=r"m\.gguf is not a readable GGUF file"):
        open_source(path)


def test_a_file_that_names_no_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(SourceError, match="does not name its architecture"):
        open_source(path)


class TestMetadata:
    def read(self, tmp_path: Path, **values: Any) -> dict[str, Any]:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        for key, value in values.items():
            getattr(writer, f"add_{key}")(f"x.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufFile(tmp_path / "m.gguf").metadata

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            ("uint8", 255),
            ("int8", -128),
            ("uint16", 65535),
            ("int32", -5),
            ("uint64", 2**63),
            ("int64", -(2**62)),
            ("bool", True),
            ("float64", 0.1),
            ("float32", 0.5),
            ("string", "größer"),
            ("array", [1, 2, 3]),
            ("array", ["a", "", "ß"]),
            ("array", [[1, 2], [3]]),
        ],
    )
    def test_of_every_type_is_read(self, tmp_path: Path, kind: str, value: Any) -> None:
        assert self.read(tmp_path, **{kind: value})[f"x.{kind}"] == value
