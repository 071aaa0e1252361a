"""Pairs are found in layers of any kind, and only those that keep the model's function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.smoothing import HeadGroups, SmoothingPair, fold
from quantkit.calibrate.smoothing_pairs import SkippedPair, find_pairs, leak, norm_offset
from quantkit.experts import find_fused, split_experts
from tests import tiny
from tests.calibrate import models

ModelOf = Callable[[str], Path]
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class Layers:
    """A tiny model whose layers can be run one at a time on a few tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.skeleton = models.open_skeleton(folder, dtype)
        self.model = LayerwiseModel(self.skeleton)
        (self.batch,) = self.model.prepare([tiny.random_ids(12, seed=5)[None]])
        self.config = self.skeleton.model.config

    def load(self, number: int = 0) -> nn.Module:
        self.skeleton.load(self.skeleton.layer_names[number])
        self.number = number
        return self.skeleton.layers[number]

    def run(self) -> Tensor:
        ((_, output),) = self.model.run(self.number, [self.batch])
        return output

    def find(self, number: int = 0) -> tuple[list[SmoothingPair], list[SkippedPair]]:
        return find_pairs(self.load(number), self.config, self.run)


def found(folder: Path) -> tuple[dict[str, SmoothingPair], dict[str, str]]:
    """Return the pairs of the first layer by name, and the reasons of the skipped ones."""
    pairs, skipped = Layers(folder).find()
    return {pair.name: pair for pair in pairs}, {skip.name: skip.reason for skip in skipped}


def random_factors(channels: int, seed: int, power_of_two: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if power_of_two:
        return torch.exp2(torch.randint(-3, 4, (channels,), generator=generator).float())
    return torch.randn(channels, generator=generator).exp()


def num_factors(layer: nn.Module, pair: SmoothingPair) -> int:
    start, stop = pair.rows or (0, layer.get_parameter(f"{pair.source}.weight").shape[0])
    return stop - start


@torch.no_grad()
def fold_everything(folder: Path, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return the whole model's logits without, and with random factors in all pairs it has."""
    layers = Layers(folder, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = tiny.random_ids(24)[None]
    before = model(ids).logits.float()
    split_experts(model, find_fused(model))
    for number, name in enumerate(layers.skeleton.layer_names):
        pairs, _ = layers.find(number)
        layers.batch.hidden = layers.run()
        layer = model.get_submodule(name)
        for seed, pair in enumerate(pairs):
            factors = random_factors(num_factors(layer, pair), 10 * number + seed, power_of_two)
            fold(layer, pair, factors)
    return before, model(ids).logits.float()


@pytest.mark.parametrize("power_of_two", [True, False], ids=["powers", "any"])
@pytest.mark.parametrize("kind", models.CONFIGS)
def test_folding_all_pairs_keeps_the_models_function(
    model_of: ModelOf, kind: str, power_of_two: bool
) -> None:
    before, after = fold_everything(model_of(kind), torch.float32, power_of_two)
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


@pytest.mark.parametrize("kind", ["llama", "llama-biases", "qwen3", "phi3", "opt", "mpt"])
def test_powers_of_two_change_no_bit_of_a_bfloat16_model(model_of: ModelOf, kind: str) -> None:
    before, after = fold_everything(model_of(kind), torch.bfloat16, power_of_two=True)
    assert torch.equal(after, before)


def test_gemma_in_bfloat16_changes_by_roundings_only(model_of: ModelOf) -> None:
    before, after = fold_everything(model_of("gemma3"), torch.bfloat16, power_of_two=True)
    assert (after - before).norm() < 0.02 * before.norm()


@pytest.mark.parametrize(
    "kind", ["llama", "llama-biases", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
)
def test_the_usual_four_pairs_are_found(model_of: ModelOf, kind: str) -> None:
    pairs, skipped = found(model_of(kind))
    gemma = kind.startswith("gemma")
    before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    assert skipped == {}
    assert list(pairs) == [
        f"input_layernorm -> {', '.join(QKV)}",
        "self_attn.v_proj -> self_attn.o_proj",
        f"{before_mlp} -> mlp.gate_proj, mlp.up_proj",
        "mlp.up_proj -> mlp.down_proj",
    ]
    assert pairs[f"input_layernorm -> {', '.join(QKV)}"].norm_offset == (1.0 if gemma else 0.0)
    heads = pairs["self_attn.v_proj -> self_attn.o_proj"].heads
    assert heads == HeadGroups(4, 2, 24 if kind in ("mistral", "qwen3") else 16)


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("fused", [False, True], ids=["llama", "phi3"])
def test_values_to_output_under_grouped_heads(tmp_path: Path, kv_heads: int, fused: bool) -> None:
    kind = transformers.Phi3Config if fused else transformers.LlamaConfig
    folder = models.save(tmp_path, kind(**{**tiny.LLAMA, "num_key_value_heads": kv_heads}))
    pairs, skipped = found(folder)
    assert skipped == {}
    source = "self_attn.qkv_proj" if fused else "self_attn.v_proj"
    pair = pairs[f"{source} -> self_attn.o_proj"]
    assert pair.heads == HeadGroups(4, kv_heads, 16)
    assert pair.rows == ((64 + 16 * kv_heads, 64 + 32 * kv_heads) if fused else None)
    before, after = fold_everything(folder, torch.float32, power_of_two=False)
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


def test_fused_gate_and_up_are_divided_in_their_second_half(model_of: ModelOf) -> None:
    pairs, _ = found(model_of("phi3"))
    assert pairs["mlp.gate_up_proj -> mlp.down_proj"].rows == (96, 192)


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("gpt-neox", "attention.dense", "interleaved"),
        ("gpt-neox", "mlp.dense_h_to_4h -> mlp.dense_4h_to_h", "not linear"),
        ("bloom", "self_attention.dense", "interleaved"),
        ("opt", ", ".join(QKV), "no norm"),
        ("opt", "self_attn_layer_norm -> fc1", "something else reads self_attn_layer_norm"),
        ("mixtral", "post_attention_layernorm -> mlp.gate", "not linear modules"),
        ("gemma4-shared-kv", "self_attn.v_proj -> self_attn.o_proj", "that others cached"),
        ("mamba", "mixer.out_proj", "no linear beside it"),
        ("falcon-h1", ", ".join(QKV), "no norm"),
    ],
)
def test_what_cannot_be_smoothed_is_listed_with_the_reason(
    model_of: ModelOf, kind: str, name: str, reason: str
) -> None:
    pairs, skipped = found(model_of(kind))
    assert name not in pairs
    assert reason in skipped[name]


@pytest.mark.parametrize("kind", models.CONFIGS)
def test_every_linear_is_accounted_for(model_of: ModelOf, kind: str) -> None:
    layers = Layers(model_of(kind))
    pairs, skipped = layers.find()
    targets = [target for pair in pairs for target in pair.targets]
    for skip in skipped:
        targets += skip.name.split(" -> ")[-1].split(", ")
    for name, module in layers.load().named_modules():
        if isinstance(module, nn.Linear):
            assert targets.count(name) == 1, name


def test_parallel_branches_that_read_one_norm_are_smoothed_together(model_of: ModelOf) -> None:
    pairs, _ = found(model_of("phi"))
    assert f"input_layernorm -> {', '.join(QKV)}, mlp.fc1" in pairs


@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi3"])
def test_finding_pairs_leaves_the_layer_as_it_was(model_of: ModelOf, kind: str) -> None:
    layers = Layers(model_of(kind), torch.bfloat16)
    layer = layers.load()
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    layers.find()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert not any(module._forward_pre_hooks for module in layer.modules())


def wrong_pairs() -> dict[str, SmoothingPair]:
    return {
        "order of heads": SmoothingPair(
            "self_attn.v_proj", ("self_attn.o_proj",), HeadGroups(8, 4, 8)
        ),
        "a reader left out": SmoothingPair("input_layernorm", QKV[:2]),
        "a gate": SmoothingPair("mlp.gate_proj", ("mlp.down_proj",)),
        "no offset": SmoothingPair("input_layernorm", QKV),
    }


@pytest.mark.parametrize("what", wrong_pairs())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_pair_leaks(model_of: ModelOf, what: str, dtype: torch.dtype) -> None:
    layers = Layers(model_of("gemma3" if what == "no offset" else "llama"), dtype)
    layer, pair = layers.load(), wrong_pairs()[what]
    factors = random_factors(num_factors(layer, pair), 1, power_of_two=True)
    with torch.no_grad():
        assert leak(layer, pair, factors, layers.run) > 0.05


class Doubled(nn.Module):
    """A norm whose output is read by a linear and by the layer itself."""

    def __init__(self, extra: float) -> None:
        super().__init__()
        self.norm, self.fc = nn.RMSNorm(8), nn.Linear(8, 8)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.fc(x) + self.extra * x


@pytest.mark.parametrize(("extra", "count"), [(0.0, 1), (0.1, 0)])
def test_a_reader_that_is_no_module_is_noticed(extra: float, count: int) -> None:
    layer, x = Doubled(extra), torch.randn(3, 8)
    pairs, skipped = find_pairs(layer, transformers.LlamaConfig(), lambda: layer(x))
    assert len(pairs) == count
    assert len(skipped) == 1 - count


def test_a_source_without_effect_is_not_taken_for_proven() -> None:
    layer, x = Doubled(0.0), torch.randn(3, 8)
    nn.init.zeros_(layer.fc.weight)
    pairs, (skip,) = find_pairs(layer, transformers.LlamaConfig(), lambda: layer(x))
    assert not pairs
    assert "no effect" in skip.reason


class Squared(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


def gemma_norm() -> Any:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    return Gemma3RMSNorm(8)


@pytest.mark.parametrize(
    ("make", "offset"),
    [
        (lambda: nn.RMSNorm(8), 0.0),
        (lambda: nn.LayerNorm(8), 0.0),
        (gemma_norm, 1.0),
        (lambda: Squared(8), None),
    ],
    ids=["rms", "layer", "gemma", "squared"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_offset_of_a_norm_is_found_by_trying(
    make: Callable[[], Any], offset: float | None, dtype: torch.dtype
) -> None:
    norm = make().to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    before = [parameter.clone() for parameter in norm.parameters()]
    assert norm_offset(norm) == offset
    for parameter, old in zip(norm.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
