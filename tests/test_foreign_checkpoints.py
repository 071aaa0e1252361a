"""Checkpoints that other tools wrote, read by `load_fp8`.

tests/fixtures/foreign holds what `tests/peers/make_checkpoints.py` made with llm-compressor,
NVIDIA Model Optimizer, AMD Quark and transformers (made_by.json says which version); the one of
AutoFP8 was written by hand after that tool's source. The oracle dequantizes in float64, from the
tensors alone, and runs transformers' own model in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from quantkit import load_fp8
from quantkit.checkpoint import open_checkpoint, read_checkpoint
from quantkit.inspection import inspect
from quantkit.inspection.tables import make_tables
from quantkit.runtime.loading import load_engine
from quantkit.scheme import Granularity, QuantSpec
from tests.foreign import (
    AUTO,
    BLOCKS,
    E4M3,
    FOREIGN,
    KV,
    KV_NAMES,
    LLMC,
    MODELOPT,
    NAMES,
    QUARK,
    Tensors,
    config_of,
    ids,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle_weights(name: str) -> Tensors:
    """Every weight in float64, from the names and shapes in the file and the size of blocks."""
    stored = load_file(FOREIGN / name / "model.safetensors")
    weights = {}
    for key, tensor in stored.items():
        if "scale" in key:
            continue
        weights[key] = tensor.double()
        if tensor.dtype != E4M3:
            continue
        scale = next(stored[k] for k in (f"{key}_scale", f"{key}_scale_inv") if k in stored)
        scale = scale.float().double()
        rows, columns = tensor.shape
        if scale.numel() == 1:
            weights[key] *= scale.item()
        elif name in BLOCKS:
            high, wide = BLOCKS[name]
            grid = scale.reshape(ceil(rows / high), ceil(columns / wide))
            for row in range(rows):
                for column in range(0, columns, wide):
                    weights[key][row, column : column + wide] *= grid[row // high, column // wide]
        else:
            assert scale.numel() == rows
            weights[key] *= scale.reshape(rows, 1)
    return weights


def oracle_model(name: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(FOREIGN / name)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = {key: weight.float() for key, weight in oracle_weights(name).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return model


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert bool(found.isfinite().all())
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_every_fixture_is_there_and_says_who_wrote_it() -> None:
    assert len(NAMES) == 11
    for name in NAMES:
        made_by = json.loads((FOREIGN / name / "made_by.json").read_text())
        assert made_by["tool"]
        assert made_by["how"]
        assert sum(file.stat().st_size for file in (FOREIGN / name).iterdir()) < 200_000


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_those_of_the_weights_dequantized_by_hand(name: str) -> None:
    tokens = ids(config_of(name)["vocab_size"])
    model = load_fp8(FOREIGN / name, dtype="float32", kv="none", activations="full")
    assert_close(model.logits(tokens), oracle_model(name)(tokens).logits)


@pytest.mark.parametrize("name", NAMES)
def test_read_checkpoint_gives_the_weights_dequantized_by_hand(name: str) -> None:
    plain, expected = read_checkpoint(FOREIGN / name), oracle_weights(name)
    assert plain.keys() == expected.keys()
    for key, weight in plain.items():
        # One product of two float32 numbers: equal to the float64 product, rounded.
        assert torch.equal(weight.float(), expected[key].float()), key


def through_transformers(name: str) -> Any:
    """Load a fixture with the reader of its format that transformers has, in float32."""
    options = {}
    if name.startswith("llmcompressor"):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        FOREIGN / name, dtype=torch.float32, **options
    ).eval()


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n.startswith(("llmcompressor", "transformers"))]
)
def test_weights_are_what_transformers_own_readers_make_of_them(name: str) -> None:
    theirs, checkpoint = through_transformers(name).state_dict(), open_checkpoint(FOREIGN / name)
    # compressed-tensors multiplies in the dtype of the scale, which llm-compressor stores in bf16.
    dtype = torch.bfloat16 if name.startswith("llmcompressor") else torch.float32
    for module in checkpoint.quantized:
        ours = checkpoint.weight(module).dequantize(dtype).float()
        assert torch.equal(theirs[f"{module}.weight"].float(), ours), module


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("transformers")])
@torch.no_grad()
def test_logits_are_those_of_transformers_own_reader(name: str) -> None:
    tokens = ids(config_of(name)["vocab_size"])
    ours = load_fp8(FOREIGN / name, dtype="float32", activations="full")
    assert_close(ours.logits(tokens), through_transformers(name)(tokens).logits)


SCHEMES = {
    "autofp8-static-kv": (Granularity.TENSOR, QuantSpec(Granularity.TENSOR)),
    "llmcompressor-block-odd": (
        Granularity.BLOCK,
        QuantSpec(Granularity.GROUP, dynamic=True, group_size=128),
    ),
    "llmcompressor-dynamic-kv-heads": (
        Granularity.CHANNEL,
        QuantSpec(Granularity.TOKEN, dynamic=True),
    ),
    "llmcompressor-static-kv": (Granularity.TENSOR, QuantSpec(Granularity.TENSOR)),
    "modelopt-block": (Granularity.BLOCK, None),
    "modelopt-fp8-kv": (Granularity.TENSOR, QuantSpec(Granularity.TENSOR)),
    "modelopt-per-channel": (Granularity.CHANNEL, QuantSpec(Granularity.TOKEN, dynamic=True)),
    "quark-fp8-kv": (Granularity.TENSOR, QuantSpec(Granularity.TENSOR)),
    "transformers-block": (
        Granularity.BLOCK,
        QuantSpec(Granularity.GROUP, dynamic=True, group_size=128),
    ),
    "transformers-tensor": (Granularity.TENSOR, QuantSpec(Granularity.TENSOR, dynamic=True)),
    "transformers-ue8m0": (
        Granularity.BLOCK,
        QuantSpec(Granularity.GROUP, dynamic=True, group_size=32),
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_scheme_is_what_the_tool_was_asked_for(name: str) -> None:
    checkpoint = open_checkpoint(FOREIGN / name)
    granularity, inputs = SCHEMES[name]
    assert (checkpoint.scheme.weights.granularity, checkpoint.scheme.inputs) == (
        granularity,
        inputs,
    )
    assert (checkpoint.scheme.kv is not None) == (name in KV)
    assert len(checkpoint.quantized) == 7 * config_of(name)["num_hidden_layers"]
    for module in checkpoint.quantized:
        has_scale = checkpoint.weight(module).input_scale is not None
        assert has_scale == (inputs is not None and not inputs.dynamic)


FUSED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",)]


@pytest.mark.parametrize("name", [AUTO, LLMC, MODELOPT, QUARK])
@torch.no_grad()
def test_static_inputs_are_rounded_with_the_scales_of_the_file(name: str) -> None:
    tokens, stored = ids(64), load_file(FOREIGN / name / "model.safetensors")
    model = oracle_model(name)
    full = model(tokens).logits
    for module, linear in model.named_modules():
        parent, _, leaf = module.rpartition(".")
        group = next((g for g in FUSED if leaf in g), ())
        if group:
            scales = [stored[f"{parent}.{member}.input_scale"].float() for member in group]
            linear.register_forward_pre_hook(rounding_hook(max(scales)))
    expected = model(tokens).logits
    ours = load_fp8(FOREIGN / name, dtype="float32", kv="none", activations="quantized")
    # A value between two codes may go either way; a wrong scale would show as the whole effect.
    assert (ours.logits(tokens) - expected).norm() < 0.1 * (expected - full).norm()


def rounding_hook(scale: Tensor) -> Callable[[Any, tuple[Tensor]], Tensor]:
    return lambda _, args: (args[0] / scale).clamp(-448, 448).to(E4M3).float() * scale


@pytest.mark.parametrize(
    "name", [n for n in NAMES if (inputs := SCHEMES[n][1]) is not None and inputs.dynamic]
)
def test_dynamic_inputs_can_be_rounded(name: str) -> None:
    tokens = ids(config_of(name)["vocab_size"])
    rounded = load_fp8(FOREIGN / name, dtype="float32", kv="none", activations="quantized")
    full = load_fp8(FOREIGN / name, dtype="float32", kv="none", activations="full")
    expected = full.logits(tokens)
    assert 0 < (rounded.logits(tokens) - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("name", KV)
def test_kv_scales_are_those_of_the_file(name: str) -> None:
    checkpoint = open_checkpoint(FOREIGN / name)
    stored = load_file(FOREIGN / name / "model.safetensors")
    for layer in range(config_of(name)["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        assert checkpoint.kv_modules()[layer] == attention
        for found, leaf in zip(checkpoint.kv_scales(layer), KV_NAMES[name], strict=True):
            expected = stored[f"{attention}.{leaf}"].float().flatten()
            assert torch.equal(found, expected)
            assert len(expected) == (2 if name.endswith("heads") else 1)


class RoundingCache(transformers.DynamicCache):
    """Keeps what E4M3 leaves of keys and values, with scales [heads] or [1] for each layer."""

    def __init__(self, config: Any, scales: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(config=config)
        self.scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **rest: Any
    ) -> tuple[Tensor, Tensor]:
        pairs = zip((key_states, value_states), self.scales[layer_idx], strict=True)
        rounded = [
            (x / s.view(1, -1, 1, 1)).clamp(-448, 448).to(E4M3).float() * s.view(1, -1, 1, 1)
            for x, s in pairs
        ]
        return super().update(*rounded, layer_idx, *args, **rest)


@pytest.mark.parametrize("name", KV)
@torch.no_grad()
def test_an_fp8_kv_cache_is_that_of_the_scales_in_the_file(name: str) -> None:
    tokens, stored = ids(64)[0], load_file(FOREIGN / name / "model.safetensors")
    model = oracle_model(name)
    leaves = [
        tuple(f"model.layers.{n}.self_attn.{leaf}" for leaf in KV_NAMES[name])
        for n in range(model.config.num_hidden_layers)
    ]
    scales = [
        (stored[key].float().flatten(), stored[value].float().flatten()) for key, value in leaves
    ]
    cache = RoundingCache(model.config, scales)
    expected = model(tokens[None], past_key_values=cache).logits[0, -1]
    engine = load_engine(FOREIGN / name, dtype="float32", kv="fp8", activations="full")
    found = engine.forward(tokens, [0], [len(tokens)], engine.new_cache(1, len(tokens)))[0]
    effect = (expected - model(tokens[None]).logits[0, -1]).norm()
    # A value between two codes may go either way; a wrong scale would show as the whole effect.
    assert (found - expected).norm() < 0.1 * effect


@pytest.mark.parametrize("name", NAMES)
def test_inspect_shows_what_is_stored(name: str) -> None:
    inspection = inspect(FOREIGN / name)
    checkpoint, value = open_checkpoint(FOREIGN / name), inspection.to_json()
    modules = [m["name"] for layer in value["layers"] for m in layer["modules"]]
    assert sorted(modules) == checkpoint.quantized
    assert [layer["number"] for layer in value["layers"]] == list(
        range(config_of(name)["num_hidden_layers"])
    )
    assert value["recipe"].startswith(f"{checkpoint.container.method}, weights per ")
    assert 1.0 <= value["bytes_per_weight"] < 1.2
    assert any("no quantkit.json" in warning for warning in value["warnings"])
    for table in make_tables(inspection):
        assert table.row_count
