"""What is stored of a linear layer, and what the layer computes while it is calibrated."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantkit.calibrate.quantized_layer import (
    InputQuantizers,
    fake_quantize_input,
    quantize_weights,
    sqnr_db,
)
from quantkit.calibrate.recipe_file import load_recipe
from quantkit.calibrate.skeleton import Skeleton
from quantkit.scheme import Granularity, QuantSpec
from tests import reference
from tests.calibrate import models
from tests.calibrate.linears import STATIC, block, linears_for

ModelOf = Callable[[str], Path]
RECIPES = ["fp8-dynamic", "fp8-static", "fp8-block"]
TOKEN = QuantSpec(Granularity.TOKEN, dynamic=True)
GROUP = QuantSpec(Granularity.GROUP, group_size=16, dynamic=True)


def layer_of(
    folder: Path, dtype: torch.dtype = torch.bfloat16
) -> tuple[Skeleton, dict[str, nn.Linear]]:
    """Return a skeleton with layer 0 loaded, and the layer's linears."""
    skeleton = models.open_skeleton(folder, dtype)
    prefix = skeleton.layer_names[0]
    skeleton.load(prefix)
    linears = skeleton.linear_modules()
    return skeleton, {name: m for name, m in linears.items() if name.startswith(f"{prefix}.")}


def shared_amax(weights: dict[str, Tensor], name: str) -> np.ndarray:
    """Return the largest |weight| of a module and of those fused with it."""
    parent, _, leaf = name.rpartition(".")
    groups = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
    group = next((group for group in groups if leaf in group), (leaf,))
    return np.array([[max(weights[f"{parent}.{m}"].abs().max().item() for m in group)]])


class TestWeights:
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("kind", ["llama-wide-block", "llama-odd"])
    def test_codes_and_scales_equal_the_oracle(
        self, model_of: ModelOf, kind: str, recipe: str
    ) -> None:
        skeleton, modules = layer_of(model_of(kind))
        spec = load_recipe(recipe).weights
        weights = {name: module.weight.float().clone() for name, module in modules.items()}
        for name, linear in quantize_weights(skeleton, modules, spec).items():
            weight = weights[name].double().numpy()
            amax = shared_amax(weights, name) if recipe == "fp8-static" else None
            codes, grid = reference.quantize_weight(weight, spec.tile(*weight.shape), amax)
            assert np.array_equal(linear.codes.view(torch.uint8).numpy(), codes)
            assert np.array_equal(spec.grid(linear.weight_scale).double().numpy(), grid)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_the_layer_computes_with_the_values_the_codes_stand_for(
        self, model_of: ModelOf, recipe: str
    ) -> None:
        skeleton, modules = layer_of(model_of("llama-wide-block"), torch.float32)
        spec = load_recipe(recipe).weights
        for name, linear in quantize_weights(skeleton, modules, spec).items():
            codes, grid = linear.codes.view(torch.uint8).numpy(), spec.grid(linear.weight_scale)
            tile = spec.tile(*linear.codes.shape)
            values = reference.dequantize(codes, grid.double().numpy(), "e4m3", tile)
            # 4 bits of code times 8 bits of scale are exact in float32.
            assert np.array_equal(modules[name].weight.double().numpy(), values)

    @pytest.mark.parametrize("kind", ["qwen2", "llama-biases"])
    def test_biases_stay(self, model_of: ModelOf, kind: str) -> None:
        skeleton, modules = layer_of(model_of(kind))
        before = {name: m.bias.clone() for name, m in modules.items() if m.bias is not None}
        quantize_weights(skeleton, modules, load_recipe("fp8-dynamic").weights)
        assert before
        for name, bias in before.items():
            assert torch.equal(modules[name].bias, bias)
            # For zero input a layer returns exactly its bias: not 0, not twice the bias.
            assert torch.equal(modules[name](torch.zeros_like(modules[name].weight[:1]))[0], bias)

    @pytest.mark.parametrize("recipe", ["fp8-dynamic", "fp8-block"])
    def test_modules_do_not_share_scales_by_channel_or_block(
        self, model_of: ModelOf, recipe: str
    ) -> None:
        spec = load_recipe(recipe).weights
        skeleton, modules = layer_of(model_of("llama"))
        together = quantize_weights(skeleton, modules, spec)
        for name in modules:
            fresh, others = layer_of(model_of("llama"))
            alone = quantize_weights(fresh, {name: others[name]}, spec)[name]
            assert torch.equal(alone.weight_scale, together[name].weight_scale)

    def test_a_zero_matrix_has_codes_of_zero_and_a_usable_scale(self, model_of: ModelOf) -> None:
        skeleton, modules = layer_of(model_of("llama"), torch.float32)
        name, module = next(iter(modules.items()))
        module.weight.data.zero_()
        skeleton.source.tensor = lambda _: torch.zeros_like(module.weight)  # type: ignore[method-assign]
        linear = quantize_weights(skeleton, {name: module}, load_recipe("fp8-dynamic").weights)[
            name
        ]
        assert not linear.codes.view(torch.uint8).any()
        assert (linear.weight_scale == 1).all()
        assert linear.weight_sqnr_db == inf


class TestSqnr:
    def test_is_20_db_for_a_tenth_of_the_amplitude(self) -> None:
        x = torch.randn(7, 11)
        assert sqnr_db(x, x * 1.1) == pytest.approx(20, abs=1e-4)  # float32 rounding of x * 1.1

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_equals_its_definition_in_float64(self, dtype: torch.dtype) -> None:
        x, y = torch.randn(300, 200).to(dtype), torch.randn(300, 200).to(dtype)
        signal, noise = x.double().square().sum(), (x.double() - y.double()).square().sum()
        expected = 10 * torch.log10(signal / noise).item()
        assert sqnr_db(x, y) == pytest.approx(expected, abs=1e-3)  # reports show 3 decimals

    def test_of_an_exact_result_is_infinite(self) -> None:
        assert sqnr_db(torch.ones(3), torch.ones(3)) == inf
        assert sqnr_db(torch.zeros(3), torch.zeros(3)) == inf

    def test_of_noise_without_signal_is_minus_infinite(self) -> None:
        assert sqnr_db(torch.zeros(3), torch.ones(3)) == -inf


def oracle_input(x: Tensor, tile: tuple[int, int], scale: Tensor | None = None) -> Tensor:
    """Return rows quantized and dequantized; scales by row and tile unless `scale` is given."""
    rows = x.reshape(-1, x.shape[-1]).double().numpy()
    grid = reference.stored_scale(reference.tile_amax(rows, tile))
    if scale is not None:
        grid, tile = scale.double().numpy().reshape(1, 1), rows.shape
    codes = reference.quantize(rows, grid, "e4m3", tile)
    values = torch.from_numpy(reference.dequantize(codes, grid, "e4m3", tile))
    return values.to(x.dtype).view(x.shape)


class TestInputs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("spec", "tile"), [(TOKEN, (1, 40)), (GROUP, (1, 16))], ids=["token", "group"]
    )
    def test_dynamic_ones_equal_the_oracle(
        self, spec: QuantSpec, tile: tuple[int, int], dtype: torch.dtype
    ) -> None:
        x = (torch.randn(2, 7, 40) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
        assert torch.equal(fake_quantize_input(x, None, spec), oracle_input(x, tile))

    def test_static_ones_equal_the_oracle_and_saturate(self) -> None:
        x, scale = torch.randn(3, 5, 40) * 10, torch.tensor([2.0**-6])
        result = fake_quantize_input(x, scale, STATIC)
        assert torch.equal(result, oracle_input(x, (15, 40), scale))
        assert result.abs().max() == 448 * 2.0**-6

    def test_one_row_does_not_depend_on_its_neighbours(self) -> None:
        x = torch.randn(4, 40)
        x[2] *= 1e4
        whole = fake_quantize_input(x, None, TOKEN)
        assert torch.equal(whole[:1], fake_quantize_input(x[:1], None, TOKEN))

    @pytest.mark.parametrize("spec", [TOKEN, GROUP], ids=["token", "group"])
    def test_rows_of_zeros_stay_zero(self, spec: QuantSpec) -> None:
        assert not fake_quantize_input(torch.zeros(3, 40), None, spec).any()

    def test_nan_is_not_hidden(self) -> None:
        x = torch.ones(1, 40)
        x[0, 3] = torch.nan
        assert fake_quantize_input(x, torch.tensor([1.0]), STATIC)[0].isnan().sum() == 1

    @pytest.mark.parametrize("spec", [TOKEN, STATIC], ids=["dynamic", "static"])
    def test_quantizers_change_what_the_matmul_sees_until_removed(self, spec: QuantSpec) -> None:
        _, modules = block()
        linears = linears_for(modules)
        for number, linear in enumerate(linears.values()):
            linear.input_scale = torch.tensor([2.0 ** -(number + 5)]) if spec is STATIC else None
        x, other = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
        plain = {name: module(x) for name, module in modules.items()}
        quantizers = InputQuantizers(modules, spec)
        assert all(torch.equal(modules[name](x), plain[name]) for name in modules)
        quantizers.start(linears, x.device)
        # Different scales, and a second tensor in between: no conversion may be reused wrongly.
        for value in (x, other, x):
            for name, module in modules.items():
                seen = fake_quantize_input(value, linears[name].input_scale, spec)
                expected = nn.functional.linear(seen, module.weight, module.bias)
                assert torch.equal(module(value), expected)
        quantizers.remove()
        assert all(torch.equal(modules[name](x), plain[name]) for name in modules)
