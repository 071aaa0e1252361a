"""Choose the scales of an FP8 KV cache by the error of the attention output.

E4M3 is a float format: over most of its range a scale changes not how fine values are stored but
which ones fall on the grid, and that repeats with every octave. Keys of all tokens have much in
common, so their rounding errors do not average out: which part of an octave the scale lies in
decides up to half of the squared error at the output. Values average out more and are tried on
fewer scales. Scales that saturate are tried only where a massive token, thousands of times as large
as others, takes so much of the range that ordinary values lose precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.attention_probe import AttentionSample
from quantkit.numerics import E4M3, Format, amax_to_scale, decode, encode

KEY_STEPS, VALUE_STEPS = 6, 3
"""Scales tried in the octave above amax / 448."""
SATURATING_SPAN, MAX_OCTAVES = 10, 24
"""Octaves from the median to amax from which on scales that saturate are tried, down to as many.
E4M3 is at full precision over 15; below ten, it has five to spare for values under the median."""
MIN_GAIN = 0.03
"""Share of squared error a scale must save to be taken over amax, or to saturate; less is noise."""


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """Amaxes that stand for the chosen scales, float32 [1] or [kv_heads], and their error.

    The errors are sums of squares, float64, of the shape of the amaxes; see `KvError`.
    """

    key_amax: Tensor
    value_amax: Tensor
    error: Tensor
    plain_error: Tensor


class KvError:
    """Squared error of what attention computes from rounded keys and values, on samples.

    Called with rounded keys and values, gives one error in all, or one a KV head. Where a sample
    lacks its attention (`of_output` is false), the squared errors of keys and of values, each
    relative to its power, are added instead. `fmt` is what keys and values are rounded to.
    """

    def __init__(
        self, samples: Sequence[AttentionSample], per_head: bool, fmt: Format = E4M3
    ) -> None:
        self.samples = samples
        self.per_head = per_head
        self.fmt = fmt
        self.of_output = all(sample.attend is not None for sample in samples)
        self._exact = [
            sample.attend(sample.keys, sample.values) if sample.attend else sample.keys
            for sample in (samples if self.of_output else ())
        ]
        powers = [sum(float(x.double().square().sum()) for x in side) for side in self.states()]
        self._powers = [power or 1.0 for power in powers]

    def states(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys, and values, of all samples."""
        return [s.keys for s in self.samples], [s.values for s in self.samples]

    def amaxes(self) -> tuple[Tensor, Tensor]:
        """Return the samples' own amax of keys and of values, float32 [1] or [kv_heads]."""
        keys, values = self.states()
        num_scales = keys[0].shape[0] if self.per_head else 1
        return _by_scale(keys, num_scales).amax(dim=1), _by_scale(values, num_scales).amax(dim=1)

    def signal(self) -> float:
        """Return the sum of squares of the exact output."""
        return sum(float(exact.double().square().sum()) for exact in self._exact)

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Return the errors, float64 [1] or [kv_heads]. Shapes: as the samples' own."""
        errors = []
        for number, (sample, key, value) in enumerate(zip(self.samples, keys, values, strict=True)):
            if self.of_output and sample.attend is not None:
                difference = sample.attend(key, value) - self._exact[number]
                errors.append(self._sum(difference, key.shape[0]))
            else:
                for side, error in enumerate((key - sample.keys, value - sample.values)):
                    errors.append(self._sum(error, key.shape[0]) / self._powers[side])
        return torch.stack(errors).sum(dim=0)

    def _sum(self, difference: Tensor, kv_heads: int) -> Tensor:
        """Sum squares over the query heads that share a KV head, or over all."""
        groups = kv_heads if self.per_head else 1
        return difference.reshape(groups, -1).square().sum(dim=1, dtype=torch.float64).cpu()


def round_states(states: Sequence[Tensor], amax: Tensor, fmt: Format = E4M3) -> list[Tensor]:
    """Return what the cache will hold. Shapes: [kv_heads, tokens, head_dim]; amax [1 or heads]."""
    scale = amax_to_scale(amax, fmt).view(-1, 1, 1)
    return [_round(x, scale.to(x.device), fmt) for x in states]


def _round(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    return decode(encode(x / scale, fmt), fmt) * scale


def plain_scales(measure: KvError, key_amax: Tensor, value_amax: Tensor) -> ScaleChoice:
    """Return amax itself as the choice, with its error. Shapes: [1] or [kv_heads]."""
    keys, values = measure.states()
    fmt = measure.fmt
    error = measure(round_states(keys, key_amax, fmt), round_states(values, value_amax, fmt))
    return ScaleChoice(key_amax, value_amax, error, error)


def choose_scales(measure: KvError, key_amax: Tensor, value_amax: Tensor) -> ScaleChoice:
    """Choose the scale of the keys, then that of the values given the keys'.

    `key_amax` and `value_amax`, [1] or [kv_heads], are the largest of all calibration data. The
    error is at most that of amax, and with scales by head at most that of the best shared ones.
    Deterministic.
    """
    choice = _choose(measure, key_amax, value_amax)
    if not measure.per_head:
        return choice
    shared = choose_scales(
        KvError(measure.samples, per_head=False, fmt=measure.fmt),
        key_amax.max().reshape(1),
        value_amax.max().reshape(1),
    )
    key_amax = shared.key_amax.expand_as(key_amax)
    value_amax = shared.value_amax.expand_as(value_amax)
    return _better(choice, plain_scales(measure, key_amax, value_amax))


def _choose(measure: KvError, key_amax: Tensor, value_amax: Tensor) -> ScaleChoice:
    keys, values = measure.states()
    plain = plain_scales(measure, key_amax, value_amax)
    # With exact values: rounded ones may be lost altogether, and then no key matters.
    chosen_key = _search(
        lambda amax: measure(round_states(keys, amax, measure.fmt), values),
        _Candidates.of(keys, key_amax, KEY_STEPS),
    )
    rounded_keys = round_states(keys, chosen_key, measure.fmt)
    chosen_value = _search(
        lambda amax: measure(rounded_keys, round_states(values, amax, measure.fmt)),
        _Candidates.of(values, value_amax, VALUE_STEPS),
    )
    return _better(plain, plain_scales(measure, chosen_key, chosen_value))


def _better(first: ScaleChoice, second: ScaleChoice) -> ScaleChoice:
    """Take of each scale the choice of less error, in a tie the first. Keeps the plain error."""
    taken = second.error < first.error
    return ScaleChoice(
        torch.where(taken, second.key_amax, first.key_amax),
        torch.where(taken, second.value_amax, first.value_amax),
        torch.where(taken, second.error, first.error),
        first.plain_error,
    )


@dataclass(frozen=True, slots=True)
class _Candidates:
    """What to try of keys or of values.

    amax, and the samples' own, are [scales]. fractions: multiples within an octave. octaves: how
    far down to go.
    """

    amax: Tensor
    sample_amax: Tensor
    fractions: tuple[float, ...]
    octaves: int

    @classmethod
    def of(cls, states: Sequence[Tensor], amax: Tensor, steps: int) -> _Candidates:
        magnitude = _by_scale(states, amax.numel())
        typical = magnitude.median(dim=1).values.clamp(min=2.0**-126)
        span = int((amax / typical).log2().max().clamp(0, MAX_OCTAVES))
        fractions = tuple(2.0 ** (step / steps) for step in range(1, steps))
        octaves = span if span >= SATURATING_SPAN else 0
        return cls(amax, magnitude.amax(dim=1), fractions, octaves)


def _search(error_of: Callable[[Tensor], Tensor], candidates: _Candidates) -> Tensor:
    """Return the best multiple of every amax. Shapes: [scales].

    The scales are judged each on its own, as heads do not mix in attention.
    """
    amax, multiple = candidates.amax, torch.ones_like(candidates.amax)
    plain = best = error_of(amax)
    for fraction in candidates.fractions:
        error = error_of(amax * fraction)
        taken = (error < best) & (error < (1 - MIN_GAIN) * plain)
        multiple, best = torch.where(taken, fraction, multiple), torch.where(taken, error, best)
    for octave in range(1, candidates.octaves + 1):
        lower = 2.0**-octave
        # Saturation has a price that shows only where the sample holds the largest values.
        sample_amax = candidates.sample_amax
        priced = (sample_amax >= amax / 2) | (amax * lower >= sample_amax)
        error = error_of(amax * lower)
        taken = priced & (error < (1 - MIN_GAIN) * best)
        multiple, best = torch.where(taken, lower, multiple), torch.where(taken, error, best)
    lowered = multiple
    for fraction in candidates.fractions if bool((lowered < 1).any()) else ():
        error = error_of(amax * lowered * fraction)
        taken = (lowered < 1) & (error < best)
        multiple = torch.where(taken, lowered * fraction, multiple)
        best = torch.where(taken, error, best)
    return amax * multiple


def _by_scale(states: Sequence[Tensor], num_scales: int) -> Tensor:
    """Return the magnitudes of all samples under each scale, [scales, elements], on the CPU."""
    return torch.cat([x.reshape(num_scales, -1).abs().cpu() for x in states], dim=1)
