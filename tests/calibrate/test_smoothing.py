"""Factors move range between layers, and the model computes what it did before (case B06)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from quantkit.calibrate.smoothing import (
    HeadGroups,
    SmoothingPair,
    apply_pair,
    awq_factors,
    choose_factors,
    column_amax,
    fold,
    restore,
    smoothing_factors,
)
from quantkit.errors import CalibrationError
from tests import checkpoints, reference, tiny

HEADS, HEAD_DIM = 4, 16
KV_HEADS = pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])


def random_amax(channels: int, seed: int = 0) -> Tensor:
    return torch.randn(channels, generator=torch.Generator().manual_seed(seed)).mul(2).exp()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_factors_follow_the_formula(alpha: float) -> None:
    inputs, weights = random_amax(50), random_amax(50, seed=1)
    found = smoothing_factors(inputs, weights, alpha, power_of_two=False)
    expected = inputs.double().numpy() ** alpha / weights.double().numpy() ** (1 - alpha)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_at_one_half_both_ends_have_the_same_range() -> None:
    inputs, weights = random_amax(50), random_amax(50, seed=1)
    factors = smoothing_factors(inputs, weights, 0.5, power_of_two=False)
    torch.testing.assert_close(inputs / factors, weights * factors)


@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_powers_of_two_are_the_nearest_in_ratio(alpha: float) -> None:
    inputs, weights = random_amax(50), random_amax(50, seed=1)
    exact = smoothing_factors(inputs, weights, alpha, power_of_two=False)
    rounded = smoothing_factors(inputs, weights, alpha, power_of_two=True)
    mantissa, _ = torch.frexp(rounded)
    assert (mantissa == 0.5).all()
    assert (rounded / exact).log2().abs().max() <= 0.5 + 1e-6


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("make", [smoothing_factors, awq_factors])
def test_b15_dead_channels_keep_factor_one(make: Any, power_of_two: bool) -> None:
    inputs, weights = random_amax(6), random_amax(6, seed=1)
    inputs[[0, 1]], weights[[1, 2]] = 0.0, 0.0
    factors = make(inputs, weights, 0.5, power_of_two)
    assert factors[:3].tolist() == [1.0, 1.0, 1.0]
    assert factors.isfinite().all()
    assert (factors > 0).all()


@pytest.mark.parametrize("make", [smoothing_factors, awq_factors])
def test_all_channels_dead_is_no_smoothing(make: Any) -> None:
    assert (make(torch.zeros(4), torch.ones(4), 0.5) == 1).all()


def test_awq_factors_follow_the_formula() -> None:
    inputs, weights = random_amax(50), random_amax(50, seed=1)
    found = awq_factors(inputs, weights, 0.7, power_of_two=False)
    powers = inputs.double().numpy() ** 0.7
    np.testing.assert_allclose(found, powers / np.sqrt(powers.max() * powers.min()), rtol=1e-6)


@pytest.mark.parametrize("make", [smoothing_factors, awq_factors])
def test_an_alpha_outside_its_range_is_refused(make: Any) -> None:
    with pytest.raises(CalibrationError, match=r"alpha must be in \[0, 1\], got 1.5"):
        make(torch.ones(4), torch.ones(4), 1.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("make", [smoothing_factors, awq_factors])
def test_ranges_that_are_not_finite_are_refused(make: Any, bad: float) -> None:
    with pytest.raises(CalibrationError, match="NaN or infinite"):
        make(torch.tensor([1.0, bad]), torch.ones(2), 0.5)


def test_column_amax_is_over_all_rows_of_all_weights() -> None:
    weights = [torch.randn(3, 5), torch.randn(7, 5)]
    assert torch.equal(column_amax(weights), torch.cat(weights).abs().amax(dim=0))


@KV_HEADS
def test_b06_factors_of_a_kv_head_go_to_the_query_heads_that_read_it(kv_heads: int) -> None:
    heads = HeadGroups(HEADS, kv_heads, HEAD_DIM)
    factors = torch.arange(kv_heads * HEAD_DIM).float()
    expected = reference.repeat_kv_channels(factors.numpy(), HEADS, kv_heads, HEAD_DIM)
    np.testing.assert_array_equal(heads.expand(factors), expected)


@KV_HEADS
def test_expansion_is_in_the_order_of_transformers(kv_heads: int) -> None:
    from transformers.models.llama.modeling_llama import repeat_kv

    values = torch.randn(kv_heads * HEAD_DIM)
    states = repeat_kv(values.view(1, kv_heads, 1, HEAD_DIM), HEADS // kv_heads)
    expected = states.transpose(1, 2).reshape(-1)  # as the attention hands them to o_proj
    assert torch.equal(HeadGroups(HEADS, kv_heads, HEAD_DIM).expand(values), expected)


@KV_HEADS
def test_reduction_covers_every_query_head(kv_heads: int) -> None:
    heads = HeadGroups(HEADS, kv_heads, HEAD_DIM)
    amax = random_amax(HEADS * HEAD_DIM)
    reduced = heads.reduce(amax)
    assert reduced.shape == (kv_heads * HEAD_DIM,)
    assert (heads.expand(reduced) >= amax).all()
    assert set(reduced.tolist()) <= set(amax.tolist())
    assert torch.equal(heads.reduce(heads.expand(reduced)), reduced)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (4, 0), (2, 4)])
def test_heads_that_cannot_be_grouped_are_refused(heads: int, kv_heads: int) -> None:
    with pytest.raises(CalibrationError, match="cannot share"):
        HeadGroups(heads, kv_heads, 8)


def test_the_candidate_with_the_least_error_is_chosen() -> None:
    candidates = {("awq", alpha): torch.full((3,), alpha) for alpha in (0.25, 0.5, 0.75)}
    chosen = choose_factors(candidates, lambda factors: abs(factors[0].item() - 0.6))
    assert chosen.strength == ("awq", 0.5)
    assert torch.equal(chosen.factors, candidates["awq", 0.5])
    assert chosen.plain_error == pytest.approx(0.4)
    assert chosen.error == pytest.approx(0.1)


@pytest.mark.parametrize("error", [1.0, 0.98, float("nan")])
def test_factors_that_do_not_help_enough_are_not_used(error: float) -> None:
    candidates = {("awq", 0.5): torch.full((3,), 2.0)}
    chosen = choose_factors(
        candidates, lambda factors: 1.0 if (factors == 1).all() else error, min_gain_db=0.1
    )
    assert chosen.strength is None
    assert (chosen.factors == 1).all()
    assert chosen.error == chosen.plain_error == 1.0


def test_there_must_be_something_to_choose_from() -> None:
    with pytest.raises(CalibrationError, match="no smoothing factors"):
        choose_factors({}, lambda factors: 0.0)


def llama(kv_heads: int, dtype: torch.dtype) -> Any:
    """Return a tiny Llama with biases, and 50-fold outlier channels in its values and products."""
    config = transformers.LlamaConfig(
        **{**tiny.LLAMA, "num_key_value_heads": kv_heads, "attention_bias": True}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        checkpoints.randomize(model)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[[1, -3]] *= 50
            layer.mlp.up_proj.weight[5] *= 50
    return model.to(dtype).eval()


def pairs(layer: int, kv_heads: int) -> list[SmoothingPair]:
    name = f"model.layers.{layer}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return [
        SmoothingPair(
            f"{name}.input_layernorm",
            tuple(f"{attention}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")),
        ),
        SmoothingPair(
            f"{attention}.v_proj",
            (f"{attention}.o_proj",),
            HeadGroups(HEADS, kv_heads, HEAD_DIM),
        ),
        SmoothingPair(f"{name}.post_attention_layernorm", (f"{mlp}.gate_proj", f"{mlp}.up_proj")),
        SmoothingPair(f"{mlp}.up_proj", (f"{mlp}.down_proj",)),
    ]


def smooth(model: Any, kv_heads: int, power_of_two: bool) -> None:
    """Fold factors for the ranges that random tokens show into all pairs of all layers."""
    modules = dict(model.named_modules())
    amax: dict[str, Tensor] = {}

    def observe(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            amax[name] = args[0].flatten(0, -2).abs().amax(dim=0).float()

        return hook

    hooks = [
        module.register_forward_pre_hook(observe(name))
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
    ]
    model(tiny.random_ids(20, seed=3)[None])
    for hook in hooks:
        hook.remove()
    for layer in range(model.config.num_hidden_layers):
        for pair in pairs(layer, kv_heads):
            weights = dict(model.named_parameters())
            inputs = amax[pair.targets[0]]
            columns = column_amax([weights[f"{target}.weight"] for target in pair.targets])
            if pair.heads is not None:
                inputs, columns = pair.heads.reduce(inputs), pair.heads.reduce(columns)
            factors = smoothing_factors(inputs, columns, 0.5, power_of_two)
            for name, tensor in apply_pair(weights, pair, factors).items():
                assert tensor is not weights[name]
                weights[name].copy_(tensor)


@KV_HEADS
@torch.no_grad()
def test_b06_smoothing_keeps_the_models_function(kv_heads: int) -> None:
    model = llama(kv_heads, torch.float32)
    ids = tiny.random_ids(24)[None]
    before = model(ids).logits
    smooth(model, kv_heads, power_of_two=False)
    after = model(ids).logits
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


@KV_HEADS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_powers_of_two_change_no_bit_of_the_logits(kv_heads: int, dtype: torch.dtype) -> None:
    model = llama(kv_heads, dtype)
    ids = tiny.random_ids(24)[None]
    before = model(ids).logits
    up = model.model.layers[0].mlp.up_proj.weight.clone()
    smooth(model, kv_heads, power_of_two=True)
    assert torch.equal(model(ids).logits, before)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, up)


def test_b06_planted_outliers_are_gone_after_smoothing() -> None:
    model = llama(2, torch.float32)
    attention = model.model.layers[0].self_attn
    spread = []
    for _ in range(2):
        outputs: list[Tensor] = []
        hook = attention.o_proj.register_forward_pre_hook(
            lambda module, args, found=outputs: found.append(args[0])
        )
        with torch.no_grad():
            model(tiny.random_ids(24)[None])
            hook.remove()
            amax = outputs[0].abs().amax(dim=(0, 1))
            spread.append((amax.max() / amax.median()).item())
            smooth(model, 2, power_of_two=True)
    assert spread[0] > 20
    assert spread[1] < spread[0] / 3


def test_the_offset_of_a_norm_is_part_of_what_is_divided() -> None:
    weight, factors = torch.randn(8), random_amax(8)
    weights = {"norm.weight": weight, "fc.weight": torch.randn(3, 8)}
    pair = SmoothingPair("norm", ("fc",), norm_offset=1.0)
    folded = apply_pair(weights, pair, factors)
    torch.testing.assert_close((1 + folded["norm.weight"]) * factors, 1 + weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@torch.no_grad()
def test_targets_get_the_factors_that_the_norm_realized(dtype: torch.dtype, offset: float) -> None:
    stored, weight = torch.randn(50).to(dtype), torch.randn(3, 50).to(dtype)
    stored[0] = -offset  # a channel that the norm switches off
    layer = nn.Module()
    layer.norm, layer.fc = nn.RMSNorm(50), nn.Linear(50, 3, bias=False)
    restore(layer, {"norm.weight": stored, "fc.weight": weight})
    folded = fold(layer, SmoothingPair("norm", ("fc",), norm_offset=offset), random_amax(50))
    used, new = offset + stored.double(), offset + layer.norm.weight.double()
    alive = used != 0
    np.testing.assert_allclose((new * folded.factors)[alive], used[alive], rtol=1e-6)
    expected = weight.float() * folded.factors
    assert torch.equal(layer.fc.weight, expected.to(dtype))


def test_a_norm_channel_that_would_round_to_zero_is_left_alone() -> None:
    weights = {
        "norm.weight": torch.tensor([0.0, 0.0], dtype=torch.bfloat16),
        "fc.weight": torch.ones(1, 2, dtype=torch.bfloat16),
    }
    pair = SmoothingPair("norm", ("fc",), norm_offset=1.0)
    folded = apply_pair(weights, pair, torch.tensor([1e4, 2.0]))
    assert folded["norm.weight"].tolist() == [0.0, -0.5]
    assert folded["fc.weight"].tolist() == [[1.0, 2.0]]


def test_only_the_rows_of_the_pair_are_divided() -> None:
    weights = {
        "gate_up.weight": torch.ones(6, 2),
        "gate_up.bias": torch.ones(6),
        "down.weight": torch.ones(2, 3),
    }
    pair = SmoothingPair("gate_up", ("down",), rows=(3, 6))
    folded = apply_pair(weights, pair, torch.tensor([2.0, 4.0, 8.0]))
    assert folded["gate_up.weight"][:, 0].tolist() == [1, 1, 1, 0.5, 0.25, 0.125]
    assert folded["gate_up.bias"].tolist() == [1, 1, 1, 0.5, 0.25, 0.125]
    assert folded["down.weight"][0].tolist() == [2, 4, 8]


def test_a_fold_can_be_undone_to_the_bit() -> None:
    layer = nn.ModuleDict({"norm": nn.LayerNorm(8), "fc": nn.Linear(8, 3)}).bfloat16()
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    folded = fold(layer, SmoothingPair("norm", ("fc",)), random_amax(8))
    assert set(folded.before) == {"norm.weight", "norm.bias", "fc.weight"}
    assert not torch.equal(layer.get_parameter("fc.weight"), before["fc.weight"])
    restore(layer, folded.before)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_only_the_tensors_of_both_ends_come_back_as_new_ones() -> None:
    weights = {
        "norm.weight": torch.randn(8, dtype=torch.bfloat16),
        "norm.bias": torch.randn(8, dtype=torch.bfloat16),
        "fc.weight": torch.randn(3, 8, dtype=torch.bfloat16),
        "fc.bias": torch.randn(3),
        "other.weight": torch.randn(8, 8),
    }
    before = {name: tensor.clone() for name, tensor in weights.items()}
    folded = apply_pair(weights, SmoothingPair("norm", ("fc",)), torch.full((8,), 4.0))
    assert set(folded) == {"norm.weight", "norm.bias", "fc.weight"}
    assert all(tensor.dtype == torch.bfloat16 for tensor in folded.values())
    assert torch.equal(folded["norm.bias"] * 4, weights["norm.bias"])
    assert torch.equal(folded["fc.weight"], weights["fc.weight"] * 4)
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())


def test_factors_of_another_length_are_refused() -> None:
    weights = {"norm.weight": torch.ones(8), "fc.weight": torch.ones(3, 8)}
    with pytest.raises(CalibrationError, match="norm has 8 output channels"):
        apply_pair(weights, SmoothingPair("norm", ("fc",)), torch.ones(7))


def test_ends_of_different_width_are_refused() -> None:
    weights = {"v.weight": torch.ones(4, 8), "o.weight": torch.ones(8, 8)}
    with pytest.raises(CalibrationError, match=r"o reads 8 channels and v gives 4"):
        apply_pair(weights, SmoothingPair("v", ("o",)), torch.ones(4))
