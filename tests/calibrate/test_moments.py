"""Moments are sums over tokens, split into fit and held out, whatever the batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantkit.calibrate.moments import (
    HOLD_OUT_EVERY,
    InputMoments,
    MomentObservers,
    MomentSums,
    group_name,
)

CHANNELS = 12


def sequences(count: int = 2 * HOLD_OUT_EVERY + 3, tokens: int = 7, seed: int = 0) -> Tensor:
    x = torch.randn(count, tokens, CHANNELS, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16()


def moments_of(*batches: Tensor) -> InputMoments:
    """Batches begin and end where they like, but for the ends of blocks."""
    sums, first = MomentSums(CHANNELS, torch.device("cpu")), 0
    for batch in batches:
        rows = batch.unsqueeze(0) if batch.dim() == 2 else batch
        while len(rows):
            part = rows[: HOLD_OUT_EVERY - first % HOLD_OUT_EVERY]
            sums.update(part, first)
            first, rows = first + len(part), rows[len(part) :]
            if first % HOLD_OUT_EVERY == 0:
                sums.end_block()
    return sums.finish()


def gram(rows: Tensor) -> np.ndarray:
    wide = rows.flatten(0, 1).double().numpy()
    return wide.T @ wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_eighth_sequence_is_held_out_and_all_others_are_fitted(dtype: torch.dtype) -> None:
    x = sequences().to(dtype)
    held = torch.arange(len(x)) % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
    moments = moments_of(x)
    # Products of bfloat16 values are exact in float32; only sums of 7 tokens round.
    np.testing.assert_allclose(moments.fit.numpy(), gram(x[~held]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moments.held_out.numpy(), gram(x[held]), rtol=1e-5, atol=1e-5)
    assert moments.num_tokens == x.shape[0] * x.shape[1]
    assert moments.num_held_out == 2 * x.shape[1]
    assert moments.judge is moments.held_out
    assert torch.equal(moments.amax, x.float().abs().amax(dim=(0, 1)))
    rms = x.double().square().mean(dim=(0, 1)).sqrt()
    torch.testing.assert_close(moments.rms.double(), rms, rtol=1e-5, atol=0)


def test_batches_change_no_bit() -> None:
    x = sequences()
    whole, parts = moments_of(x), moments_of(x[:1], x[1:6], x[6:])
    assert torch.equal(whole.fit, parts.fit)
    assert torch.equal(whole.held_out, parts.held_out)
    assert torch.equal(whole.amax, parts.amax)


def test_where_nothing_is_held_out_the_fit_judges() -> None:
    moments = moments_of(sequences(3))
    assert moments.judge is moments.fit


def test_tokens_without_sequences_are_one_sequence() -> None:
    x = sequences(1)
    assert torch.equal(moments_of(x[0]).fit, moments_of(x).fit)


def test_dividing_is_what_divided_inputs_would_have_given() -> None:
    x, factors = sequences().float(), 2.0 ** torch.arange(-6, 6)
    moments = moments_of(x)
    moments.divide(factors)
    expected = moments_of(x / factors)
    for name in ("fit", "held_out", "amax"):
        # Powers of two scale without rounding.
        assert torch.equal(getattr(moments, name), getattr(expected, name)), name


def test_siblings_share_one_record_and_a_module_that_never_ran_has_none() -> None:
    names = ("a.q_proj", "a.k_proj", "a.o_proj")
    modules = {name: nn.Linear(CHANNELS, 3) for name in names}
    observers = MomentObservers(modules)
    x = sequences(2).float()
    modules["a.q_proj"](x)
    modules["a.k_proj"](x)
    found = observers.finish()
    modules["a.o_proj"](x)  # the hooks are gone
    assert found.keys() == {"a.q_proj", "a.k_proj"}
    assert found["a.q_proj"] is found["a.k_proj"]
    assert found["a.q_proj"].num_tokens == 14


def test_a_batch_without_tokens_leaves_no_trace() -> None:
    modules = {name: nn.Linear(CHANNELS, 3) for name in ("expert.w2", "other.w2")}
    observers = MomentObservers(modules)
    for x in (torch.empty(0, CHANNELS), sequences(2).float().flatten(0, 1)):
        modules["expert.w2"](x)
    modules["other.w2"](torch.empty(0, CHANNELS))
    found = observers.finish()
    assert found.keys() == {"expert.w2"}
    assert found["expert.w2"].num_tokens == 14


def test_a_group_is_named_after_its_first_member_that_is_there() -> None:
    assert group_name("m.v_proj", ["m.k_proj", "m.v_proj"]) == "m.k_proj"
    assert group_name("m.down_proj", ["m.down_proj"]) == "m.down_proj"
