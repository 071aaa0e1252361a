"""Ranges of static inputs: what each observer decides, against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.calibrate.magnitudes import Magnitudes
from quantkit.calibrate.observers import (
    CLIPPING,
    CLIPPING_GAIN,
    HEADROOM,
    OBSERVERS,
    SAMPLED_EVERY,
    AmaxRange,
    ErrorRange,
    ObserverFactory,
    PercentileRange,
    observer_factory,
)
from quantkit.errors import RecipeError
from quantkit.numerics import E4M3
from tests import reference

CHANNELS = 24


def inputs(massive: float = 1.0, sequences: int = 6, tokens: int = 33) -> list[Tensor]:
    """Sequences of normal inputs; one channel of each first token is `massive` times as large."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(sequences, tokens, CHANNELS, generator=generator).bfloat16()
    found[:, 0, 5] *= massive
    return list(found)


def weights(rows: int = 16) -> Tensor:
    return torch.randn(rows, CHANNELS, generator=torch.Generator().manual_seed(4))


def range_of(make: ObserverFactory, data: list[Tensor]) -> float:
    observer = make(weights())
    for x in data:
        observer.update(x)
    return observer.range(E4M3)


def test_magnitudes_are_counted_exactly() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.3895e38, 1e-40, 1.0, torch.inf, torch.nan])
    magnitudes = Magnitudes(x.device)
    magnitudes.add(x.bfloat16())
    values, counts = magnitudes.occurring()
    assert counts.tolist() == [2, 1, 3, 1]
    assert values[0] == 0
    assert values[2] == 1
    assert torch.equal(values, x[[0, 5, 2, 4]].bfloat16().float())


def test_weighted_magnitudes_are_sums_of_weights() -> None:
    x, each = torch.tensor([[1.0, -2.0], [2.0, 1.0]]), torch.tensor([[0.5, 1.0], [4.0, 0.25]])
    magnitudes = Magnitudes(x.device)
    magnitudes.add(x, each)
    values, counts = magnitudes.occurring()
    assert (values.tolist(), counts.tolist()) == ([1, 2], [0.75, 5.0])


def test_amax_is_the_largest_input() -> None:
    data = inputs(massive=1000)
    assert range_of(AmaxRange, data) == max(x.abs().max().item() for x in data)


@pytest.mark.parametrize("percentile", [0.5, 50, 99, 99.9, 100])
def test_percentile_is_the_least_input_with_so_many_within(percentile: float) -> None:
    data = inputs(massive=1000)
    found = range_of(observer_factory(f"percentile:{percentile}"), data)
    every = np.sort(torch.stack(data).float().abs().flatten().numpy())
    assert found in every
    within = (every <= found).mean() * 100
    below = (every < found).mean() * 100
    assert below < percentile <= within


def relative_error(data: list[Tensor], largest: float) -> float:
    """Return the output error that `ErrorRange` minimizes, from its definition, in float64."""
    scale = reference.stored_scale(np.array([[largest]]))
    energy = weights().double().square().sum(dim=0).numpy()
    total = 0.0
    for x in data:
        rows = [0, *range(SAMPLED_EVERY // 2, len(x), SAMPLED_EVERY)]
        wide = x.double().numpy()[rows]
        codes = reference.quantize(wide, scale, "e4m3", wide.shape)
        error = wide - reference.dequantize(codes, scale, "e4m3", wide.shape)
        total += float(((error**2 @ energy) / (wide**2 @ energy)).sum())
    return total


@pytest.mark.parametrize("massive", [1.0, 50.0, 5000.0, 2.0**20])
def test_error_takes_the_best_range_of_those_it_tries(massive: float) -> None:
    data = inputs(massive)
    amax = max(x.abs().max().item() for x in data)
    found = range_of(ErrorRange, data)
    errors = {amax * r: relative_error(data, amax * r) for r in (*HEADROOM, *CLIPPING)}
    whole = min(errors[amax * ratio] for ratio in HEADROOM)
    clipped = min(errors[amax * ratio] for ratio in CLIPPING)
    pays = clipped < (1 - CLIPPING_GAIN) * whole
    assert (found < amax) == pays == (massive == 2.0**20)
    # Sums in float64 of float32 products: ranges this close are equally good.
    assert errors[found] <= (clipped if pays else whole) * (1 + 1e-5)


def test_a_massive_first_token_does_not_set_the_scale_for_all_others() -> None:
    data = inputs(massive=2.0**20)
    amax = max(x.abs().max().item() for x in data)
    assert range_of(ErrorRange, data) < amax / 8
    # All but the massive tokens are as good as they were without them.
    rest = [x[1:] for x in data]
    assert relative_error(rest, range_of(ErrorRange, data)) < 0.1 * relative_error(rest, amax)


@pytest.mark.parametrize("name", OBSERVERS)
def test_nothing_but_zeros_has_the_range_zero(name: str) -> None:
    assert range_of(observer_factory(name), [torch.zeros(4, CHANNELS).bfloat16()]) == 0


@pytest.mark.parametrize("name", OBSERVERS)
def test_names_make_observers(name: str) -> None:
    assert observer_factory(name) is OBSERVERS[name]


@pytest.mark.parametrize(
    "name", ["amx", "", "error:3", "percentile:", "percentile:0", "percentile:101", "percentile:x"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="observer is"):
        observer_factory(name)


def test_percentile_of_a_name_is_taken() -> None:
    data = inputs(massive=1000)
    assert range_of(observer_factory("percentile:50"), data) < 1 < range_of(PercentileRange, data)
