"""Weights in another layout: codes that can stay do, others are the nearest of their new scale."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.export.requantize import Converted, Loss, convert_group
from quantkit.numerics import amax_to_scale, quantize, tile_amax
from quantkit.quantized_weight import QuantizedWeight
from quantkit.scheme import Granularity, QuantSpec
from tests import reference

TENSOR = QuantSpec(Granularity.TENSOR)
CHANNEL = QuantSpec(Granularity.CHANNEL)
BLOCK = QuantSpec(Granularity.BLOCK, block_shape=(16, 16))
E3M4 = QuantSpec(Granularity.CHANNEL, format="e3m4")
SPECS = {"tensor": TENSOR, "channel": CHANNEL, "block": BLOCK}


def make(rows: int, columns: int, spec: QuantSpec, seed: int = 0) -> QuantizedWeight:
    """Quantize a random weight whose channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.rand(rows, 1, generator=generator) + 0.1
    tile = spec.tile(rows, columns)
    grid = amax_to_scale(tile_amax(weight, tile), spec.fmt)
    codes = quantize(weight, grid, spec.fmt, tile)
    return QuantizedWeight(codes, grid.reshape(spec.scale_shape(rows, columns)), spec)


def values(found: Converted, spec: QuantSpec) -> np.ndarray:
    """Decode in float64, by the oracle."""
    codes = found.codes.view(torch.uint8).numpy()
    grid = spec.grid(found.scale).double().numpy()
    return reference.dequantize(codes, grid, "e4m3", spec.tile(*found.codes.shape))


@pytest.mark.parametrize("name", SPECS)
def test_the_same_layout_is_the_same_weight(name: str) -> None:
    weight = make(40, 24, SPECS[name])
    [found] = convert_group([weight], SPECS[name])
    assert found.codes is weight.codes
    assert found.scale is weight.scale
    assert found.loss == Loss()


@pytest.mark.parametrize("name", ["channel", "block"])
def test_a_scale_per_tensor_goes_into_every_finer_tile(name: str) -> None:
    weight = make(40, 24, TENSOR)
    [found] = convert_group([weight], SPECS[name])
    assert torch.equal(found.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert tuple(found.scale.shape) == SPECS[name].scale_shape(40, 24)
    assert bool((found.scale == weight.scale).all())
    assert found.loss.num_modules == 0
    assert found.loss.sqnr_db == inf


@pytest.mark.parametrize("source", [CHANNEL, BLOCK, E3M4], ids=["channel", "block", "e3m4"])
@pytest.mark.parametrize("name", SPECS)
def test_new_codes_are_the_nearest_ones(source: QuantSpec, name: str) -> None:
    target = SPECS[name]
    if source == target:
        return
    weight = make(40, 24, source)
    before = weight.dequantize().double().numpy()
    [found] = convert_group([weight], target)
    tile, grid = target.tile(40, 24), target.grid(found.scale).double().numpy()
    expected = reference.quantize(before, grid, "e4m3", tile)
    assert np.array_equal(found.codes.view(torch.uint8).numpy(), expected)
    change = values(found, target) - before
    assert found.loss.error == pytest.approx(np.square(change).sum(), rel=1e-6)
    assert found.loss.signal == pytest.approx(np.square(before).sum(), rel=1e-6)
    assert found.loss.num_modules == 1


@pytest.mark.parametrize("name", SPECS)
def test_new_scales_are_no_worse_than_those_of_the_largest_value(name: str) -> None:
    target = SPECS[name]
    weight = make(40, 24, E3M4)
    before = weight.dequantize().double().numpy()
    tile = target.tile(40, 24)
    plain = reference.stored_scale(reference.tile_amax(before, tile))
    codes = reference.quantize(before, plain, "e4m3", tile)
    worst = np.square(reference.dequantize(codes, plain, "e4m3", tile) - before).sum()
    [found] = convert_group([weight], target)
    assert found.loss.error <= worst * (1 + 1e-6)


@pytest.mark.parametrize("source", [CHANNEL, TENSOR], ids=["channel", "tensor"])
def test_fused_weights_share_a_scale_per_tensor(source: QuantSpec) -> None:
    weights = [make(32, 24, source, seed) for seed in range(3)]
    found = convert_group(weights, TENSOR)
    assert len({float(part.scale) for part in found}) == 1
    assert [tuple(part.codes.shape) for part in found] == [(32, 24)] * 3
    for part, weight in zip(found, weights, strict=True):
        before = weight.dequantize().double().numpy()
        grid = np.full((1, 1), float(part.scale))
        expected = reference.quantize(before, grid, "e4m3", (32, 24))
        assert np.array_equal(part.codes.view(torch.uint8).numpy(), expected)


def test_fused_weights_that_share_a_scale_already_keep_their_codes() -> None:
    one = make(32, 24, TENSOR)
    other = QuantizedWeight(make(32, 24, TENSOR, 1).codes, one.scale.clone(), TENSOR)
    found = convert_group([one, other], TENSOR)
    assert found[0].codes is one.codes
    assert found[1].codes is other.codes


def test_channels_beside_the_codes_come_back_into_them() -> None:
    weight = make(32, 24, CHANNEL)
    exact = torch.full((32, 1), 3.0, dtype=torch.bfloat16)
    weight = QuantizedWeight(
        weight.codes, weight.scale, CHANNEL, columns=torch.tensor([5]), exact=exact
    )
    [found] = convert_group([weight], CHANNEL)
    # Half a step of E4M3's three bits, and what clipping may cost.
    assert np.abs(values(found, CHANNEL)[:, 5] / 3.0 - 1.0).max() < 0.3
    assert found.loss.num_modules == 1


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(sorted(SPECS)))
def test_any_shape_has_the_scales_of_its_spec(rows: int, columns: int, name: str) -> None:
    [found] = convert_group([make(rows, columns, E3M4)], SPECS[name])
    assert tuple(found.codes.shape) == (rows, columns)
    assert tuple(found.scale.shape) == SPECS[name].scale_shape(rows, columns)
    assert bool((found.scale > 0).all())
