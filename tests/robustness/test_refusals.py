"""What the sweeps found, each kind by its name: refused with the file and the value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import load_fp8
from quantkit.calibrate.source import open_source
from quantkit.errors import (
    CheckpointError,
    GenerationError,
    QuantKitError,
    SourceError,
    first_line,
)
from quantkit.inspection.inspection import inspect
from quantkit.shards import ShardReader
from tests import checkpoints, tiny
from tests.checkpoints import FAMILIES


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an intact checkpoint; its source lies beside it."""
    return checkpoints.build(tmp_path_factory.mktemp("built"), FAMILIES["llama"](), kv="fp8")


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the checkpoint or its source with a changed config.json."""

    def copy(folder: Path = good, text: str | None = None, **changes: Any) -> Path:
        for path in folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = json.loads((folder / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config) if text is None else text)
        return tmp_path

    return copy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**40),
        ("num_hidden_layers", [64]),
        ("num_hidden_layers", "2"),
        ("num_attention_heads", 0),
        ("head_dim", 2**62),
        ("vocab_size", -1),
        ("hidden_size", 1e9),
        ("text_config", "x"),
        ("layer_types", [[]]),
        ("num_kv_shared_layers", "x"),
    ],
)
def test_a_size_that_no_model_has(damaged: Callable[..., Path], key: str, value: Any) -> None:
    folder = damaged(**{key: value})
    for way in (load_fp8, inspect):
        with pytest.raises(CheckpointError, match=rf"config\.json has {key}="):
            way(folder)


def test_a_head_that_is_too_wide(damaged: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"head_dim=1048576, expected .* to 65536"):
        load_fp8(damaged(head_dim=2**20), device="cpu")


@pytest.mark.parametrize("changes", [{"vocab_size": "64"}, {"hidden_size": 65}])
def test_a_config_that_transformers_refuses(
    good: Path, damaged: Callable[..., Path], changes: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is not a valid llama config: ."):
        load_fp8(damaged(**changes), device="cpu")
    with pytest.raises(SourceError, match=r"config\.json cannot be used: ."):
        open_source(damaged(good.parent / "source", **changes)).config()


def test_rotary_parameters_that_give_no_frequencies(damaged: Callable[..., Path]) -> None:
    wrong = {"rope_type": "default", "rope_theta": "x"}
    with pytest.raises(CheckpointError, match=r"rope_parameters .*'x'.* give no rotary embedding"):
        load_fp8(damaged(rope_parameters=wrong), device="cpu")


def test_an_activation_that_nobody_knows(damaged: Callable[..., Path]) -> None:
    with pytest.raises(QuantKitError, match=r"with this config\.json: KeyError 'wavy'"):
        load_fp8(damaged(hidden_act="wavy"), device="cpu")


@pytest.mark.parametrize(
    "text", ['{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["nested", "long number"]
)
def test_json_that_is_hard_on_parsers(good: Path, damaged: Callable[..., Path], text: str) -> None:
    folder = damaged(text=text)
    for way in (load_fp8, open_source):
        with pytest.raises(QuantKitError, match=r"config\.json"):
            way(folder)


def test_a_quantization_that_is_no_object(good: Path, damaged: Callable[..., Path]) -> None:
    folder = damaged(good.parent / "source", quantization_config=7)
    with pytest.raises(SourceError, match="quant_method 'an unnamed method'"):
        open_source(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_plain_weight_that_is_no_float(damaged: Callable[..., Path], name: str) -> None:
    folder = damaged()
    checkpoints.add(folder, name, checkpoints.tensor(folder, name) > 0)
    with pytest.raises(CheckpointError, match=rf"{name} of .* is torch\.bool, expected floating"):
        load_fp8(folder, device="cpu")


def test_a_checkpoint_that_says_no_dtype(damaged: Callable[..., Path]) -> None:
    folder = damaged(dtype=None, torch_dtype=None)
    assert load_fp8(folder, device="cpu").engine.dtype == torch.float32
    plain = [
        f"model.layers.{n}.{leaf}_layernorm" for n in (0, 1) for leaf in ("input", "post_attention")
    ]
    for module in (*plain, "model.norm", "model.embed_tokens", "lm_head"):
        checkpoints.rename(folder, f"{module}.weight", None)
    with pytest.raises(CheckpointError, match="says nowhere what dtype it runs in"):
        load_fp8(folder, device="cpu")


def test_what_another_library_says_is_one_line() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(ValueError("of field:\n  no number\nmore")) == "of field: no number"
    assert first_line(KeyError("x")) == "KeyError 'x'"
    assert first_line(MemoryError()) == "MemoryError"
    assert first_line(ValueError("a" * 500)) == "a" * 200 + "..."


class TestPickles:
    @pytest.fixture
    def folder(self, good: Path, tmp_path: Path) -> Path:
        """Return the source, its weights being pickled."""
        for path in (good.parent / "source").iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        weights = ShardReader(tmp_path)
        tensors = {name: weights.tensor(name).clone() for name in weights.names}
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        assert open_source(tmp_path).names == sorted(tensors)
        return tmp_path

    @pytest.mark.parametrize("file", ["../x.bin", "/etc/passwd", "..", "", 7, None, []])
    def test_an_index_that_leads_elsewhere(self, folder: Path, file: Any) -> None:
        table = {"model.norm.weight": file}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
        with pytest.raises(CheckpointError, match=r"maps tensor model.norm.weight to .*, outside"):
            open_source(folder)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (torch.ones(1).expand(2**20, 2**10), "x of 4294967296 bytes; it holds less"),
            (torch.ones(2, 2).to_sparse(), "x in a form that is no plain array"),
            (torch.empty(2, 2, device="meta"), "x in a form that is no plain array"),
        ],
        ids=["expanded", "sparse", "meta"],
    )
    def test_a_tensor_that_is_no_array(self, folder: Path, value: Tensor, message: str) -> None:
        torch.save({"x": value}, folder / "pytorch_model.bin")
        with pytest.raises(SourceError, match=rf"pytorch_model\.bin has tensor {message}"):
            open_source(folder)

    def test_a_name_that_is_no_text(self, folder: Path) -> None:
        torch.save({7: torch.ones(2)}, folder / "pytorch_model.bin")
        with pytest.raises(SourceError, match=r"names a tensor 7, expected text"):
            open_source(folder)

    def test_a_program_that_makes_no_sense(self, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x02h\x07.")  # gets what was never put
        with pytest.raises(SourceError, match=r"cannot be read as plain weights .*nothing in it"):
            open_source(folder)


class TestTokenizers:
    @pytest.fixture
    def folder(self, damaged: Callable[..., Path]) -> Path:
        return tiny.save_tokenizer(damaged(), tiny.CHAT_TEMPLATE)

    def change(self, folder: Path, **values: Any) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def test_a_length_that_is_no_number(self, good: Path, folder: Path) -> None:
        self.change(folder, model_max_length="x")
        with pytest.raises(CheckpointError, match=r"cannot load the tokenizer .*length is 'x'"):
            load_fp8(folder, device="cpu").encode("a")
        source = good.parent / "source"
        for name in ("model.safetensors", "config.json"):
            (folder / name).write_bytes((source / name).read_bytes())
        with pytest.raises(SourceError, match="no usable tokenizer: model_max_length is 'x'"):
            open_source(folder).tokenizer()

    def test_a_special_token_without_text(self, folder: Path) -> None:
        self.change(folder, unk_token="")
        with pytest.raises(CheckpointError, match="cannot load the tokenizer"):
            _ = load_fp8(folder, device="cpu").tokenizer

    @pytest.mark.parametrize(
        ("template", "reason"),
        [
            ("{% for x in range(10**9) %}x{% endfor %}", "Range too big"),
            ("{{ 1/0 }}", "division by zero"),
            ("{% if", "unexpected|end of template"),
            ("{{ raise_exception('no') }}", "no"),
        ],
    )
    def test_a_chat_template_that_fails(self, folder: Path, template: str, reason: str) -> None:
        (folder / "chat_template.jinja").write_text(template)
        model = load_fp8(folder, device="cpu")
        with pytest.raises(GenerationError, match=rf"the chat template of .*: .*({reason})"):
            model.encode_chat([{"role": "user", "content": "a"}])
