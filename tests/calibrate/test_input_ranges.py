"""Static input scales: who is watched, who shares, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.calibrate.input_ranges import InputRanges
from quantkit.calibrate.observers import AmaxRange
from quantkit.calibrate.quantized_layer import InputQuantizers
from quantkit.errors import CalibrationError
from quantkit.numerics import Format
from tests import reference
from tests.calibrate.linears import STATIC, block, linears_for


class TestStaticInputs:
    def test_scales_are_amax_of_all_inputs_and_shared_by_siblings(self) -> None:
        _, modules = block()
        linears, observers = linears_for(modules), InputRanges(modules, AmaxRange)
        seen: dict[str, list[Tensor]] = {name: [] for name in modules}
        for number in range(3):
            x = torch.randn(2, 5, 32) * (number + 1)
            for name, module in modules.items():
                mine = x if name != "attn.o_proj" else x * 10
                module(mine)
                seen[name].append(mine)
        observers.finish(linears, STATIC)
        for name, linear in linears.items():
            amax = torch.cat(seen[name]).abs().max().item()
            assert linear.input_amax == amax
            expected = reference.stored_scale(np.array([amax]))
            assert np.array_equal(linear.input_scale.double().numpy(), expected)
        assert linears["attn.o_proj"].input_amax > linears["attn.q_proj"].input_amax

    def test_siblings_with_different_inputs_share_the_largest(self) -> None:
        _, modules = block()
        linears, observers = linears_for(modules), InputRanges(modules, AmaxRange)
        for size, module in enumerate(modules.values(), start=1):
            module(torch.full((1, 4, 32), float(size)))
        observers.finish(linears, STATIC)
        assert [linear.input_amax for linear in linears.values()] == [3, 3, 3, 4]

    def test_observing_changes_no_output_and_leaves_no_hook(self) -> None:
        _, modules = block()
        module, x = modules["attn.q_proj"], torch.randn(3, 32)
        before, observers = module(x), InputRanges({"attn.q_proj": module}, AmaxRange)
        assert torch.equal(module(x), before)
        observers.finish(linears_for({"attn.q_proj": module}), STATIC)
        assert not module._forward_pre_hooks

    def test_a_module_no_token_reached_is_named(self) -> None:
        _, modules = block()
        observers = InputRanges(modules, AmaxRange)
        modules["attn.q_proj"](torch.ones(1, 32))
        with pytest.raises(CalibrationError, match=r"no calibration token reached attn\.o_proj"):
            observers.finish(linears_for(modules), STATIC)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_an_input_that_is_not_finite_is_named(self, bad: float) -> None:
        _, modules = block()
        observers = InputRanges(modules, AmaxRange)
        for module in modules.values():
            module(torch.full((1, 32), bad))
        with pytest.raises(CalibrationError, match=r"input of attn\.q_proj .*NaN or infinite"):
            observers.finish(linears_for(modules), STATIC)


class Fixed:
    """An observer of the caller's own, of which the range is known beforehand."""

    given = 2.0

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.seen: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        self.seen.append(x)

    def range(self, fmt: Format) -> float:
        return self.given


class TestObserversOfOnesOwn:
    def test_one_observer_a_group_sees_each_sequence_once_and_the_stacked_weights(self) -> None:
        _, modules = block()
        made: list[Fixed] = []

        def make(weight: Tensor) -> Fixed:
            made.append(Fixed(weight))
            return made[-1]

        ranges = InputRanges(modules, make)
        x = torch.randn(2, 5, 32)
        for module in modules.values():
            module(x)
        ranges.finish(linears_for(modules), STATIC)
        assert [tuple(observer.weight.shape) for observer in made] == [(96, 32), (32, 32)]
        for observer in made:
            assert torch.equal(torch.stack(observer.seen), x)

    def test_its_range_makes_the_scale_and_what_lies_beyond_is_counted(self) -> None:
        _, modules = block()
        linears, ranges = linears_for(modules), InputRanges(modules, Fixed)
        x = torch.zeros(1, 3, 32)
        x[0, 0, 0], x[0, 1, 1], x[0, 2, 2] = 3.0, -2.5, 1.0
        for module in modules.values():
            module(x)
        ranges.finish(linears, STATIC)
        scale = reference.stored_scale(np.array([2.0]))
        quantizers = InputQuantizers(modules, STATIC)
        quantizers.start(linears, x.device)
        for module in modules.values():
            module(x)
        quantizers.remove()
        for linear in linears.values():
            assert linear.input_amax == 3.0
            assert np.array_equal(linear.input_scale.double().numpy(), scale)
            assert linear.inputs_clipped == 2

    @pytest.mark.parametrize("given", [0.0, -1.0, torch.inf, torch.nan])
    def test_a_range_that_is_none_is_refused_with_the_observers_name(
        self, given: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Fixed, "given", given)
        _, modules = block()
        ranges = InputRanges(modules, Fixed)
        for module in modules.values():
            module(torch.ones(1, 32))
        with pytest.raises(CalibrationError, match=r"observer Fixed gives .* attn\.q_proj .*range"):
            ranges.finish(linears_for(modules), STATIC)

    def test_an_input_of_zeros_has_a_scale(self) -> None:
        _, modules = block()
        linears, ranges = linears_for(modules), InputRanges(modules, AmaxRange)
        for module in modules.values():
            module(torch.zeros(1, 32))
        ranges.finish(linears, STATIC)
        assert all(linear.input_scale == 1 for linear in linears.values())
