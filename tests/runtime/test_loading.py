"""load_engine: options, what it refuses, and what it says then."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError, QuantKitError, UnsupportedError
from quantkit.ops import CUDA_FEW_ROWS
from quantkit.runtime import loading
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.loading import load_engine, resolve_device
from quantkit.runtime.scaled_linear import ScaledLinear
from quantkit.runtime.weights import WeightReader
from tests import checkpoints, tiny

Q_PROJ = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.build(tmp_path, checkpoints.FAMILIES["llama"](), kv="fp8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "fp16"}, r"kv 'fp16' is not known \(did you mean 'fp8'\?\)"),
        ({"dtype": "float8"}, r"dtype 'float8' is not known"),
        ({"activations": "int8"}, r"activations 'int8' is not known"),
        ({"device": "gpu"}, r"device 'gpu' is not known"),
        ({"device": "cuda:x"}, r"device"),
        ({"threads": 0}, r"threads must be at least 1, got 0"),
    ],
    ids=str,
)
def test_an_unknown_option_is_quoted(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load_engine(folder, **options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused_and_auto_takes_the_cpu() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="torch sees no GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize(("dtype", "size"), [("auto", 4), ("bfloat16", 2), ("float16", 2)])
def test_dtype_is_that_of_the_checkpoint_unless_given(folder: Path, dtype: str, size: int) -> None:
    engine = load_engine(folder, dtype=dtype)
    assert engine.dtype.itemsize == size
    assert engine.logits(tiny.random_ids(5)[None]).dtype == torch.float32


def test_a_config_without_dtype_follows_the_tensors(folder: Path) -> None:
    checkpoints.edit_config(folder, dtype=None)
    assert load_engine(folder).dtype == torch.float32


def test_kv_none_ignores_the_scales_and_fp8_needs_them(tmp_path: Path, folder: Path) -> None:
    ids = tiny.random_ids(20)
    full, none = load_engine(folder), load_engine(folder, kv="none")
    exact = none.logits(ids[None])[0]
    assert torch.allclose(
        none.forward(ids, [0], [20], none.new_cache(1, 1), False), exact, atol=1e-4
    )
    assert not torch.allclose(
        full.forward(ids, [0], [20], full.new_cache(1, 1), False), exact, atol=1e-2
    )
    plain = checkpoints.build(tmp_path / "plain", checkpoints.FAMILIES["llama"]())
    assert isinstance(load_engine(plain), Decoder)
    with pytest.raises(CheckpointError, match="has no KV scales; load with kv='none'"):
        load_engine(plain, kv="fp8")


@pytest.mark.parametrize("scheme", ["dynamic", "static", "block"])
def test_quantized_activations_change_logits_a_little(tmp_path: Path, scheme: str) -> None:
    config = checkpoints.FAMILIES["llama-wide-block"]()
    folder = checkpoints.build(tmp_path, config, checkpoints.SCHEMES[scheme])
    ids = tiny.random_ids(40).view(2, 20)
    full = load_engine(folder).logits(ids)
    rounded = load_engine(folder, activations="quantized").logits(ids)
    error = (rounded - full).norm() / full.norm()
    assert 0.01 < error < 0.2  # a rounding to 3 bits of mantissa is 2.5 %, several in a row


def test_quantized_activations_of_a_row_do_not_depend_on_others(folder: Path) -> None:
    engine = load_engine(folder, activations="quantized")
    ids = tiny.random_ids(24)
    alone = engine.forward(ids[:12], [0], [12], engine.new_cache(1, 12))
    both = engine.forward(ids, [0, 1], [12, 12], engine.new_cache(2, 12))
    torch.testing.assert_close(both[0], alone[0], rtol=0, atol=1e-4)


def test_a_weight_only_checkpoint_cannot_quantize_activations(tmp_path: Path) -> None:
    from quantkit.scheme import Scheme

    scheme = Scheme(checkpoints.DYNAMIC.weights)
    folder = checkpoints.build(tmp_path, checkpoints.FAMILIES["llama"](), scheme)
    with pytest.raises(UnsupportedError, match="quantizes weights only"):
        load_engine(folder, activations="quantized")


@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    checkpoints.rename(folder, name, None)
    with pytest.raises(CheckpointError, match=f"has no tensor {name}"):
        load_engine(folder)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path, checkpoints.FAMILIES["qwen2"]())
    checkpoints.rename(folder, "model.layers.0.self_attn.k_proj.bias", None)
    with pytest.raises(CheckpointError, match=r"has no model\.layers\.0\.self_attn\.k_proj\.bias"):
        load_engine(folder)


def test_a_bias_that_the_config_does_not_mention_is_refused(folder: Path) -> None:
    checkpoints.add(folder, f"{UP}.bias", torch.ones(96))
    with pytest.raises(CheckpointError, match=rf"1 tensors .* the first being {UP}\.bias"):
        load_engine(folder)


def test_a_shape_that_the_config_contradicts_is_named(folder: Path) -> None:
    checkpoints.edit_config(folder, intermediate_size=100)
    with pytest.raises(
        CheckpointError, match=r"gate_proj\.weight has shape \[96, 64\].*\[100, 64\]"
    ):
        load_engine(folder)


def test_a_nan_code_is_refused(folder: Path) -> None:
    codes = checkpoints.tensor(folder, f"{UP}.weight").view(torch.uint8)
    codes[3, 4] = 0xFF
    checkpoints.add(folder, f"{UP}.weight", codes.view(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight has a NaN at \[3, 4\]"):
        load_engine(folder)


def test_values_beyond_float16_are_refused_there_only(folder: Path) -> None:
    checkpoints.add(folder, NORM, torch.full((64,), 1e5))
    load_engine(folder, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=rf"{NORM} reaches 100000, beyond float16"):
        load_engine(folder, dtype="float16")


@torch.inference_mode()
def test_ignored_groups_stay_plain_and_split_groups_are_refused(tmp_path: Path) -> None:
    config = checkpoints.FAMILIES["llama-biases"]()
    ignore = ("lm_head", "0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj",
              "1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj")  # fmt: skip
    folder = checkpoints.build(tmp_path / "whole", config, ignore=ignore)
    ids = tiny.random_ids(20).view(1, 20)
    expected = checkpoints.reference_model(folder)(ids).logits
    torch.testing.assert_close(load_engine(folder).logits(ids), expected, rtol=0, atol=1e-4)
    split = checkpoints.build(tmp_path / "split", config, ignore=ignore[:2])
    with pytest.raises(CheckpointError, match=r"k_proj is quantized and .*q_proj is not"):
        load_engine(split)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
    ],
    ids=["activation", "rope"],
)
def test_an_option_the_decoder_lacks_goes_to_transformers(
    folder: Path, changes: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.edit_config(folder, **changes)
    with caplog.at_level(logging.WARNING):
        assert not isinstance(load_engine(folder), Decoder)
    assert reason in caplog.text


@pytest.mark.parametrize("model_type", ["llamma", None])
def test_an_unknown_model_type_is_quoted(folder: Path, model_type: str | None) -> None:
    checkpoints.edit_config(folder, model_type=model_type)
    with pytest.raises(UnsupportedError, match=f"model_type {model_type!r}"):
        load_engine(folder)


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
    ids=["theta", "scaling"],
)
def test_rope_keys_of_older_configs_are_understood(folder: Path, old: dict[str, object]) -> None:
    ids = tiny.random_ids(20).view(1, 20)
    scaling = old.get("rope_scaling")
    new = {"rope_type": "linear", "factor": 2.0} if scaling else {"rope_type": "default"}
    checkpoints.edit_config(folder, rope_parameters={"rope_theta": 500.0, **new})
    expected = load_engine(folder).logits(ids)
    checkpoints.edit_config(folder, rope_parameters=None, **old)
    assert torch.equal(load_engine(folder).logits(ids), expected)


def test_unstacked_weights_stay_in_the_file(folder: Path) -> None:
    engine = load_engine(folder)
    assert isinstance(engine, Decoder)
    mapped = Path("/proc/self/maps").read_text()
    assert str(folder) in mapped


def test_every_refusal_is_one_of_ours(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(QuantKitError, match=r"model\.safetensors"):
        load_engine(folder)


@pytest.mark.parametrize(
    ("activations", "dtype", "capability", "few_rows"),
    [
        ("auto", torch.bfloat16, (9, 0), CUDA_FEW_ROWS),
        ("quantized", torch.float16, (8, 9), 0),
        ("auto", torch.float32, (9, 0), None),  # no kernel gives float32
        ("quantized", torch.bfloat16, (8, 0), None),  # no 8-bit matrix instruction
        ("full", torch.bfloat16, (9, 0), CUDA_FEW_ROWS),
    ],
)
def test_inputs_are_multiplied_in_8_bits_where_a_gpu_can(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    activations: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    few_rows: int | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(loading, "load_cuda_kernels", lambda: True)
    in_8_bits = loading._multiplies_8_bits(torch.device("cuda"), dtype)
    assert in_8_bits == (few_rows is not None)
    checkpoint = open_checkpoint(folder)
    spec = loading._input_spec(checkpoint, activations, in_8_bits)
    rounds = activations == "quantized" or (activations == "auto" and in_8_bits)
    assert spec == (checkpoint.scheme.inputs if rounds else None)
    reader = WeightReader(checkpoint, torch.device("cpu"), dtype, spec, few_rows)
    rows = [reader.checkpoint.shape(f"{Q_PROJ}.weight")[0]]
    columns = reader.checkpoint.shape(f"{Q_PROJ}.weight")[1]
    layer = reader.linear([Q_PROJ], rows, columns, bias=False)
    assert isinstance(layer, ScaledLinear) == (rounds and in_8_bits)
    if isinstance(layer, ScaledLinear):
        assert layer.few_rows == (CUDA_FEW_ROWS if activations == "auto" else 0)
