"""Tiers are kept where they lower the held-out output error, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.calibrate.moments import HOLD_OUT_EVERY, InputMoments, MomentSums
from quantkit.calibrate.outliers import choose_columns
from quantkit.calibrate.tiers import NO_TIERS, Tiers
from quantkit.calibrate.weight_tiers import TierChoice, choose_tiers
from quantkit.numerics import amax_to_scale, quantize, tile_amax
from quantkit.scheme import Granularity, QuantSpec
from tests import reference

ROWS, COLUMNS = 24, 48
CHANNEL = QuantSpec(Granularity.CHANNEL)
SPECS = [
    CHANNEL,
    QuantSpec(Granularity.TENSOR),
    QuantSpec(Granularity.BLOCK, block_shape=(16, 16)),
]
BOTH = Tiers()


def random_weight(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.02


def correlated_inputs(outlier: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5
    x = torch.randn(4 * HOLD_OUT_EVERY, 32, COLUMNS, generator=generator) @ (
        mix + torch.eye(COLUMNS)
    )
    x[..., 5] *= outlier
    return x


def moments_of(x: Tensor) -> InputMoments:
    sums = MomentSums(COLUMNS, torch.device("cpu"))
    sums.update(x, 0)
    return sums.finish()


MOMENTS = moments_of(correlated_inputs())


def error_of(choice: TierChoice, weight: Tensor, moments: InputMoments) -> np.ndarray:
    values = choice.chosen.values().double().numpy()
    return reference.output_errors(values, weight.double().numpy(), moments.judge.double().numpy())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.granularity.value)
def test_without_tiers_a_weight_is_rounded_plainly(spec: QuantSpec) -> None:
    weight = random_weight()
    tile = spec.tile(ROWS, COLUMNS)
    scale = amax_to_scale(tile_amax(weight, tile), spec.fmt)
    for moments, tiers in ((MOMENTS, NO_TIERS), (None, BOTH)):
        chosen = choose_tiers(weight, moments, spec, tiers).chosen
        assert torch.equal(chosen.scale, scale)
        codes = quantize(weight, scale, spec.fmt, tile).view(torch.uint8)
        assert torch.equal(chosen.codes.view(torch.uint8), codes)
        assert chosen.tiers == ()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.granularity.value)
def test_the_error_is_that_of_the_values_on_held_out_tokens_and_below_plain(
    spec: QuantSpec,
) -> None:
    weight = random_weight()
    choice = choose_tiers(weight, MOMENTS, spec, BOTH)
    assert "compensation" in choice.chosen.tiers
    found = error_of(choice, weight, MOMENTS)
    np.testing.assert_allclose(choice.chosen.error.numpy(), found, rtol=1e-3)
    assert choice.chosen.error.sum() < 0.9 * choice.plain.error.sum()


def test_a_tier_that_does_not_help_on_other_tokens_is_not_kept() -> None:
    """Nothing is correlated on the held-out tokens, so what the fit says of them is wrong."""
    fitted = correlated_inputs().flatten(0, 1)
    moments = InputMoments(
        fit=fitted.t() @ fitted,
        held_out=torch.eye(COLUMNS),
        amax=torch.ones(COLUMNS),
        num_tokens=2,
        num_held_out=1,
    )
    tiers = replace(BOTH, range=False)
    choice = choose_tiers(random_weight(), moments, CHANNEL, tiers)
    assert choice.chosen.tiers == ()
    assert torch.equal(choice.chosen.error, choice.plain.error)


def test_formats_are_tried_and_the_finer_one_wins_where_range_suffices() -> None:
    choice = choose_tiers(
        random_weight(), MOMENTS, CHANNEL, replace(BOTH, formats=("e3m4", "e5m2"))
    )
    assert choice.chosen.spec.format == "e3m4"
    assert choice.chosen.tiers[0] == "format"
    one = choose_tiers(random_weight(), MOMENTS, CHANNEL, BOTH).chosen
    assert choice.chosen.error.sum() < 0.5 * one.error.sum()


def test_a_weight_of_many_octaves_keeps_the_format_with_range() -> None:
    weight = random_weight() * torch.exp2(-torch.arange(COLUMNS) / 4)
    x = correlated_inputs() * torch.exp2(torch.arange(COLUMNS) / 4)
    choice = choose_tiers(weight, moments_of(x), CHANNEL, replace(BOTH, formats=("e3m4",)))
    assert choice.chosen.spec.format == "e4m3"


def test_outlier_columns_stay_beside_the_codes() -> None:
    weight, moments = random_weight(), moments_of(correlated_inputs(outlier=100.0))
    tiers = replace(BOTH, outlier_columns=0.05)
    chosen = choose_tiers(weight, moments, CHANNEL, tiers).chosen
    assert "outliers" in chosen.tiers
    assert chosen.columns is not None
    assert chosen.exact is not None
    assert 5 in chosen.columns.tolist()
    assert len(chosen.columns) == int(0.05 * COLUMNS)
    assert chosen.exact.shape == (ROWS, len(chosen.columns))
    assert (chosen.codes.float()[:, chosen.columns] == 0).all()
    assert (
        chosen.error.sum() < 0.75 * choose_tiers(weight, moments, CHANNEL, BOTH).chosen.error.sum()
    )


def test_columns_are_chosen_by_what_their_rounding_costs() -> None:
    weight = torch.ones(4, 6)
    weight[:, 2] = 3.0
    importance = torch.tensor([1.0, 1.0, 1.0, 50.0, 0.0, 1.0])
    assert choose_columns(weight, importance, 0.4).tolist() == [2, 3]
    assert choose_columns(weight, importance, 0.01).tolist() == [3]


@pytest.mark.parametrize("spec", SPECS[:2], ids=lambda spec: spec.granularity.value)
def test_a_stack_falls_into_its_parts(spec: QuantSpec) -> None:
    choice = choose_tiers(random_weight(), MOMENTS, spec, replace(BOTH, outlier_columns=0.05))
    parts = choice.split([10, 14])
    whole = choice.chosen.values()
    assert torch.equal(torch.cat([part.chosen.values() for part in parts]), whole)
    assert torch.equal(torch.cat([part.chosen.error for part in parts]), choice.chosen.error)
    assert torch.equal(torch.cat([part.signal for part in parts]), choice.signal)
