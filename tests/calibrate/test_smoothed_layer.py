"""A layer is smoothed where that lowers its error, and computes what it did."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from quantkit.calibrate.smoothed_layer import (
    MAX_OCTAVES,
    Error,
    InputCollector,
    InputStatistics,
    SampledError,
    SmoothedLayer,
    smooth_layer,
)
from quantkit.calibrate.smoothing import HeadGroups, SmoothingPair
from quantkit.errors import CalibrationError
from quantkit.scheme import Granularity, QuantSpec
from tests import checkpoints, reference
from tests.calibrate.test_smoothing_pairs import QKV, Layers

ModelOf = Callable[[str], Path]
CHANNEL, TENSOR = QuantSpec(Granularity.CHANNEL), QuantSpec(Granularity.TENSOR)
TOKEN = QuantSpec(Granularity.TOKEN, dynamic=True)
QKV_PAIR = SmoothingPair("input_layernorm", QKV)


def linears(layer: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}


def observe(layers: Layers, layer: nn.Module) -> InputStatistics:
    collector = InputCollector(linears(layer), rows_per_call=6)
    layers.run()
    return collector.finish()


def smoothed(
    layers: Layers, error: Error | None = None, **options: Any
) -> tuple[nn.Module, SmoothedLayer]:
    """Smooth the first layer; by default, any factors are better than none."""
    layer = layers.load()
    statistics = observe(layers, layer)
    error = error or (lambda pair, factors: float((factors == 1).float().mean()))
    return layer, smooth_layer(layer, layers.config, layers.run, statistics, error, **options)


@pytest.mark.parametrize("kind", ["llama", "llama-biases", "phi3", "gemma3", "opt"])
@pytest.mark.parametrize("power_of_two", [True, False])
@torch.no_grad()
def test_a_smoothed_layer_computes_what_it_did(
    model_of: ModelOf, kind: str, power_of_two: bool
) -> None:
    layers = Layers(model_of(kind))
    layers.load()
    before = layers.run()
    _, result = smoothed(layers, power_of_two=power_of_two)
    assert len(result.applied) >= 2
    assert (layers.run() - before).abs().max() < 1e-4 * before.abs().max()


@torch.no_grad()
def test_the_result_names_what_changed_and_by_how_much(model_of: ModelOf) -> None:
    layers = Layers(model_of("gemma3"), torch.bfloat16)
    layer = layers.load()
    before = {name: parameter.data for name, parameter in layer.named_parameters()}
    inputs = observe(layers, layer).rows
    layer, result = smoothed(layers)
    assert [applied.pair.targets[0] for applied in result.applied] == [
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
    ]
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in result.changed), name
    assert len(set(result.changed)) == len(result.changed)
    assert set(result.input_factors) == set(linears(layer))
    for name, rows in observe(layers, layer).rows.items():
        found, expected = rows.float() * result.input_factors[name], inputs[name].float()
        assert (found - expected).norm() < 0.02 * expected.norm(), name


@torch.no_grad()
def test_a_layer_that_smoothing_does_not_help_stays_as_it_is(model_of: ModelOf) -> None:
    layers = Layers(model_of("llama"))
    layer = layers.load()
    before = {name: parameter.data for name, parameter in layer.named_parameters()}
    layer, result = smoothed(layers, lambda pair, factors: 1.0)
    assert (result.applied, result.changed, result.input_factors) == ([], [], {})
    assert len(result.skipped) == 4
    assert all("no factors lower" in skip.reason for skip in result.skipped)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_pairs_without_proof_stay_in_the_list(model_of: ModelOf) -> None:
    _, result = smoothed(Layers(model_of("gpt-neox")))
    assert any("interleaved" in skip.reason for skip in result.skipped)


def test_static_scales_smooth_behind_norms_only(model_of: ModelOf) -> None:
    _, result = smoothed(Layers(model_of("llama")), norms_only=True)
    assert [applied.pair.source for applied in result.applied] == [
        "input_layernorm",
        "post_attention_layernorm",
    ]
    assert all("static" in skip.reason for skip in result.skipped)
    assert len(result.skipped) == 2


def test_targets_that_nobody_observed_are_left_alone(model_of: ModelOf) -> None:
    layers = Layers(model_of("llama"))
    layer = layers.load()
    seen = observe(layers, layer)
    amax = {name: tensor for name, tensor in seen.amax.items() if name != QKV[1]}
    result = smooth_layer(
        layer,
        layers.config,
        layers.run,
        InputStatistics(amax, seen.mean, seen.rows),
        lambda pair, factors: float((factors == 1).float().mean()),
    )
    assert QKV_PAIR not in [applied.pair for applied in result.applied]
    assert result.skipped[0].reason == "not all of its targets are observed"


def test_broken_activations_are_reported(model_of: ModelOf) -> None:
    layers = Layers(model_of("llama"))
    layer = layers.load()
    seen = observe(layers, layer)
    seen.amax[QKV[0]][3] = torch.nan
    with pytest.raises(CalibrationError, match="NaN or infinite"):
        smooth_layer(layer, layers.config, layers.run, seen, lambda pair, factors: 1.0)


@torch.no_grad()
def test_factors_stay_within_what_float16_holds(model_of: ModelOf) -> None:
    layers = Layers(model_of("llama"))
    layer = layers.load()
    layer.input_layernorm.weight[0] *= 1e6
    _, result = smoothed(layers, power_of_two=False)
    limit = 2.0**MAX_OCTAVES * (1 + 1e-5)
    assert all((f <= limit).all() and (f >= 1 / limit).all() for f in result.input_factors.values())


@torch.no_grad()
def test_smoothing_lowers_the_error_of_a_weight_only_outlier_channel(tmp_path: Path) -> None:
    """Inputs 30 times as large through weights that are small beside their neighbours."""
    layers = Layers(checkpoint_with_outliers(tmp_path))
    layer = layers.load()
    statistics = observe(layers, layer)
    error = SampledError(layer, statistics, CHANNEL, None)
    result = smooth_layer(layer, layers.config, layers.run, statistics, error)
    (applied,) = [a for a in result.applied if a.pair == QKV_PAIR]
    assert applied.gain_db > 3


def checkpoint_with_outliers(folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(checkpoints.FAMILIES["llama"]())
        checkpoints.randomize(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[7] *= 30
    model.save_pretrained(folder)
    return folder


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 24, bias=False), nn.Linear(32, 8, bias=False)


@pytest.mark.parametrize("weights", [CHANNEL, TENSOR], ids=["channel", "tensor"])
@pytest.mark.parametrize("inputs", [None, TOKEN, TENSOR], ids=["none", "token", "static"])
def test_the_sampled_error_is_what_the_definition_says(
    weights: QuantSpec, inputs: QuantSpec | None
) -> None:
    layer, rows = Two(), torch.randn(10, 32)
    amax, factors = rows.abs().amax(dim=0), torch.randn(32).exp()
    statistics = InputStatistics({"a": amax}, {}, {"a": rows})
    error = SampledError(layer, statistics, weights, inputs)
    found = error(SmoothingPair("norm", ("a", "b")), factors)
    weight = torch.cat([layer.a.weight, layer.b.weight]).detach()
    static = inputs is TENSOR
    expected = reference.smoothed_output_error(
        rows.double().numpy(),
        weight.double().numpy(),
        factors.double().numpy(),
        weights.tile(*weight.shape),
        inputs.tile(*rows.shape) if inputs else None,
        (amax / factors).max().item() if static else None,
    )
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_the_sampled_error_of_grouped_heads_uses_expanded_factors() -> None:
    layer, rows = Two(), torch.randn(10, 32)
    statistics = InputStatistics({"a": rows.abs().amax(dim=0)}, {}, {"a": rows})
    error = SampledError(layer, statistics, CHANNEL, TOKEN)
    factors = torch.randn(16).exp()
    grouped = error(SmoothingPair("v", ("a",), HeadGroups(4, 2, 8)), factors)
    expanded = factors.view(2, 1, 8).expand(2, 2, 8).reshape(-1)
    assert grouped == error(SmoothingPair("v", ("a",)), expanded)


def test_large_weights_are_sampled_in_blocks_of_all_targets() -> None:
    layer = nn.ModuleDict({name: nn.Linear(16, 2048, bias=False) for name in "ab"})
    rows = torch.randn(10, 16)
    statistics = InputStatistics({"a": rows.abs().amax(dim=0)}, {}, {"a": rows})
    error = partial(SampledError(layer, statistics, CHANNEL, TOKEN), SmoothingPair("n", ("a", "b")))
    first = error(torch.ones(16))
    layer["b"].weight.data *= 100
    assert error(torch.ones(16)) > 100 * first


def test_the_collector_holds_the_sampled_tokens_out() -> None:
    layer, x = Two(), torch.randn(2, 6, 32)
    collector = InputCollector({"a": layer.a}, rows_per_call=4)
    layer.a(x)
    layer.a(2 * x)
    layer.a(x[:, :0])  # an expert without tokens
    seen = collector.finish()
    layer.a(100 * x)  # not any more
    tokens = torch.cat([x, 2 * x]).view(2, 12, 32)
    held_out = [3, 6, 9]
    kept = [token for token in range(12) if token not in held_out]
    assert torch.equal(seen.rows["a"], tokens[:, [0, *held_out]].flatten(0, 1))
    assert torch.equal(seen.amax["a"], tokens[:, kept].abs().amax(dim=(0, 1)))
    torch.testing.assert_close(seen.mean["a"], tokens[:, kept].abs().mean(dim=(0, 1)))


def test_a_linear_that_never_ran_has_no_statistics() -> None:
    layer = Two()
    collector = InputCollector({"a": layer.a, "b": layer.b})
    layer.a(torch.randn(3, 32))
    assert set(collector.finish().amax) == {"a"}


def test_siblings_share_one_observation() -> None:
    layer, x = Two(), torch.randn(3, 32)
    collector = InputCollector({"a": layer.a, "b": layer.b})
    layer.a(x)
    layer.b(x)
    seen = collector.finish()
    assert torch.equal(seen.rows["a"], seen.rows["b"])
    assert isinstance(seen.amax["a"], Tensor)
