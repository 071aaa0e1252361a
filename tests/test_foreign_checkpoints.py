"""Checkpoints that other tools wrote, read by `load_fp8`.

tests/fixtures/foreign holds what `tests/peers/make_checkpoints.py` made with llm-compressor,
NVIDIA Model Optimizer, AMD Quark and transformers (made_by.json says which version); the one of
AutoFP8 was written by hand after that tool's source. The oracle dequantizes in float64, from the
tensors alone, and runs transformers' own model in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit import load_fp8
from quantkit.checkpoint import open_checkpoint, read_checkpoint
from quantkit.errors import CheckpointError
from quantkit.inspection import inspect
from quantkit.inspection.tables import make_tables
from quantkit.runtime.loading import load_engine
from quantkit.scheme import Granularity, QuantSpec
from tests.checkpoints import edit_config

FOREIGN = Path(__file__).parent / "fixtures" / "foreign"
BLOCKS = {
    "llmcompressor-block-odd": (128, 128),
    "modelopt-block": (128, 128),
    "transformers-block": (128, 128),
    "transformers-ue8m0": (32, 32),
}
NAMES = sorted(path.name for path in FOREIGN.iterdir())
KV = ["autofp8-static-kv", "llmcompressor-dynamic-kv-heads", "llmcompressor-static-kv"]
KV += ["modelopt-fp8-kv", "quark-fp8-kv"]
LLMC, AUTO, BLOCK = "llmcompressor-static-kv", "autofp8-static-kv", "transformers-block"
MODELOPT, QUARK = "modelopt-fp8-kv", "quark-fp8-kv"
LAYER = "model.layers.0"
Q, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj"
E4M3 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]


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


def ids(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, vocab_size, (3, 20), generator=generator)


def config_of(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOREIGN / name / "config.json").read_text())
    return value


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


KV_NAMES = {
    "autofp8-static-kv": ("k_proj.output_scale", "v_proj.output_scale"),
    "llmcompressor-dynamic-kv-heads": ("k_scale", "v_scale"),
    "llmcompressor-static-kv": ("k_scale", "v_scale"),
    "modelopt-fp8-kv": ("k_proj.k_scale", "v_proj.v_scale"),
    "quark-fp8-kv": ("k_scale", "v_scale"),
}


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


# Variants that other releases of the same tools wrote.


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(FOREIGN / name, tmp_path / name))


Copied = Callable[[str], Path]


def edit(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_block(folder: Path, **changes: Any) -> Path:
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config={**block, **changes})
    return folder


def same_logits(folder: Path, name: str) -> bool:
    tokens = ids(config_of(name)["vocab_size"])
    options = {"dtype": "float32", "activations": "full"}
    found, expected = (load_fp8(f, **options).logits(tokens) for f in (folder, FOREIGN / name))
    return torch.equal(found, expected)


def test_modelopt_with_its_own_file_alone_is_read(copied: Copied) -> None:
    folder = copied(MODELOPT)
    edit_config(folder, quantization_config=None)
    assert open_checkpoint(folder).scheme == open_checkpoint(FOREIGN / MODELOPT).scheme
    assert same_logits(folder, MODELOPT)


@pytest.mark.parametrize("key", ["compression_config", "text_config"])
def test_the_block_is_found_where_older_tools_put_it(copied: Copied, key: str) -> None:
    folder = copied(LLMC)
    block = config_of(LLMC)["quantization_config"]
    if key == "text_config":
        edit_config(folder, quantization_config=None, text_config={"quantization_config": block})
    else:
        edit_config(folder, quantization_config=None, compression_config=block)
    assert open_checkpoint(folder, kv=False).scheme.weights.granularity is Granularity.TENSOR


def test_modelopt_without_kv_scales_means_1(copied: Copied) -> None:
    """As its preset fp8_cast writes it: a KV cache is declared, and no tensor belongs to it."""

    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(("k_scale", "v_scale"))]:
            del tensors[key]

    checkpoint = open_checkpoint(edit(copied(MODELOPT), change))
    assert checkpoint.kv_modules() == {n: f"model.layers.{n}.self_attn" for n in range(2)}
    for scale in checkpoint.kv_scales(1):
        assert (scale.shape, scale.item()) == ((1,), 1.0)


def test_an_attention_module_that_has_no_name_of_one_is_said(copied: Copied) -> None:
    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if "self_attn" in key]:
            tensor = tensors.pop(key)
            if not key.endswith(("k_scale", "v_scale")):
                tensors[key.replace("self_attn", "mixer")] = tensor

    checkpoint = open_checkpoint(edit(copied(MODELOPT), change))
    assert checkpoint.kv_scales(0)[0].item() == 1.0
    with pytest.raises(CheckpointError, match="no attention module of layer 0"):
        checkpoint.kv_modules()


def test_one_kv_scale_of_old_serves_both(copied: Copied) -> None:
    def change(tensors: Tensors) -> None:
        for layer in range(2):
            attention = f"model.layers.{layer}.self_attn"
            del tensors[f"{attention}.v_proj.output_scale"]
            tensors[f"{attention}.kv_scale"] = tensors.pop(f"{attention}.k_proj.output_scale")

    checkpoint = open_checkpoint(edit(copied(AUTO), change))
    key, value = checkpoint.kv_scales(0)
    stored = load_file(FOREIGN / AUTO / "model.safetensors")
    assert torch.equal(key, value)
    assert key.item() == stored[f"{LAYER}.self_attn.k_proj.output_scale"].item()


def test_the_names_of_transformers_static_scales_are_read(copied: Copied) -> None:
    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(("weight_scale", "input_scale"))]:
            new = key.replace("weight_scale", "weight_scale_inv")
            tensors[new.replace("input_scale", "activation_scale")] = tensors.pop(key)

    folder = edit(copied(AUTO), change)
    assert same_logits(folder, AUTO)
    expected = open_checkpoint(FOREIGN / AUTO).weight(Q).input_scale
    assert torch.equal(open_checkpoint(folder).weight(Q).input_scale, expected)


def test_blocks_that_the_matrix_does_not_fill_are_read_under_deepseeks_names(
    copied: Copied,
) -> None:
    name = "llmcompressor-block-odd"

    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith("weight_scale")]:
            tensors[f"{key}_inv"] = tensors.pop(key).float()

    folder = edit(copied(name), change)
    block = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    edit_config(folder, quantization_config=block)
    assert open_checkpoint(folder).weight(DOWN).scale.shape == (2, 1)
    assert same_logits(folder, name)


def test_the_shards_of_qkv_have_scales_of_their_own_in_what_is_compared_above() -> None:
    checkpoint = open_checkpoint(FOREIGN / LLMC)
    leaves = ("q_proj", "k_proj", "v_proj")
    scales = {checkpoint.weight(f"{LAYER}.self_attn.{leaf}").scale.item() for leaf in leaves}
    assert len(scales) == 3


def test_experts_are_modules_like_others(copied: Copied) -> None:
    """As DeepSeek and Qwen store them: each expert has its own weights and scales."""

    def change(tensors: Tensors) -> None:
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            for kind in ("weight", "weight_scale_inv"):
                tensor = tensors.pop(f"{LAYER}.mlp.{leaf}.{kind}")
                for expert in range(2):
                    tensors[f"{LAYER}.mlp.experts.{expert}.{leaf}.{kind}"] = tensor.clone()
        tensors[f"{LAYER}.mlp.gate.weight"] = torch.ones(2, 128).bfloat16()

    folder = edit_block(
        edit(copied(BLOCK), change), modules_to_not_convert=[f"{LAYER}.mlp.gate", "lm_head"]
    )
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.quantized) == 4 + 2 * 3
    original = open_checkpoint(FOREIGN / BLOCK).weight(DOWN).dequantize()
    assert torch.equal(read_checkpoint(folder)[f"{LAYER}.mlp.experts.1.down_proj.weight"], original)


def test_groups_that_agree_are_one_scheme(copied: Copied) -> None:
    group = config_of(LLMC)["quantization_config"]["config_groups"]["group_0"]
    groups = {
        "attention": {**group, "targets": [r"re:.*self_attn.*"]},
        "mlp": {**group, "targets": [r"re:.*mlp.*"]},
        "cache": {"targets": ["Qwen2Attention"], "input_activations": group["input_activations"]},
    }
    assert same_logits(edit_block(copied(LLMC), config_groups=groups), LLMC)


def test_an_embedding_in_fp8_is_dequantized(copied: Copied) -> None:
    name = "transformers-tensor"

    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(E4M3)
        tensors["model.embed_tokens.weight_scale"] = torch.tensor([0.5])

    def plain(tensors: Tensors) -> None:
        codes = tensors["model.embed_tokens.weight"].to(E4M3)
        tensors["model.embed_tokens.weight"] = (codes.float() * 0.5).bfloat16()

    folder = edit(copied(name), change)
    expected = edit(Path(shutil.copytree(FOREIGN / name, folder.parent / "plain")), plain)
    found, wanted = (load_fp8(f, dtype="float32").logits(ids(128)) for f in (folder, expected))
    assert torch.equal(found, wanted)


# What must be refused, by name.


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        (AUTO, "weight_scale"),
        (AUTO, "input_scale"),
        (BLOCK, "weight_scale_inv"),
        (LLMC, "weight_scale"),
        (MODELOPT, "weight_scale"),
        (MODELOPT, "input_scale"),
    ],
)
@pytest.mark.parametrize("value", [None, 0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_a_scale_that_is_missing_or_none_is_named(
    copied: Copied, name: str, leaf: str, value: float | None
) -> None:
    key = f"{Q}.{leaf}"

    def change(tensors: Tensors) -> None:
        if value is None:
            del tensors[key]
        else:
            tensors[key] = torch.full_like(tensors[key], value)

    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        open_checkpoint(edit(copied(name), change))


@pytest.mark.parametrize("name", KV)
@pytest.mark.parametrize("value", [None, 0.0, float("nan")], ids=str)
def test_a_kv_scale_that_is_missing_or_none_is_named(
    copied: Copied, name: str, value: float | None
) -> None:
    last = config_of(name)["num_hidden_layers"] - 1
    key = f"model.layers.{last}.self_attn.{KV_NAMES[name][1]}"

    def change(tensors: Tensors) -> None:
        if value is None:
            del tensors[key]
        else:
            tensors[key] = torch.full_like(tensors[key], value)

    folder = edit(copied(name), change)
    expected = key if value is not None else f"model.layers.{last}.self_attn"
    with pytest.raises(CheckpointError, match=expected.replace(".", r"\.")):
        open_checkpoint(folder)
    open_checkpoint(folder, kv=False)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (BLOCK, lambda t: t.update({f"{Q}.weight_scale": torch.ones(1, 1)}), "only one can be"),
        (BLOCK, lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 1)}), r"\[2, 1\]"),
        (BLOCK, lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(1)}), r"\[1\], expected"),
        (MODELOPT, lambda t: t.update({f"{Q}.weight_scale": torch.ones(64)}), r"\[64\]"),
        (
            LLMC,
            lambda t: t.update({f"{LAYER}.self_attn.k_scale": torch.ones(2)}),
            r"k_scale .* \[2\]",
        ),
        (AUTO, lambda t: t.update({"lm_head.weight": torch.ones(128, 64).to(E4M3)}), "'lm_head'"),
        (
            BLOCK,
            lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2).to(E4M3)}),
            "experts.gate_up_proj in FP8 without",
        ),
        (
            AUTO,
            lambda t: t.update({f"{Q}.weight": torch.ones(64, 64).to(torch.float8_e5m2)}),
            "E5M2",
        ),
    ],
    ids=[
        "two scales",
        "another grid",
        "no grid",
        "a scale per row",
        "a KV scale per head",
        "an ignored module",
        "fused experts",
        "another format",
    ],
)
def test_tensors_that_contradict_the_config_are_named(
    copied: Copied, name: str, change: Callable[[Tensors], object], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(edit(copied(name), change))


def test_a_tied_head_in_fp8_is_not_passed_over(copied: Copied) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = torch.ones(128, 64).to(E4M3)
        tensors["lm_head.weight_scale"] = torch.tensor(1.0)
        tensors["lm_head.input_scale"] = torch.tensor(1.0)

    folder = edit_block(edit(copied(AUTO), change), ignored_layers=[])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight; check config\.json"):
        load_fp8(folder)


# Inspection; the command line is in tests/cli/test_foreign.py.


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


def test_inspect_of_a_damaged_folder_names_the_tensor(copied: Copied) -> None:
    folder = edit(copied(BLOCK), lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=f"{Q}.weight_scale_inv".replace(".", r"\.")):
        inspect(folder)
