"""Observers of what linear modules read: how large an input the largest code should stand for.

With a static scale that decision is made once, on calibration data. The plain one is the largest
input seen (`AmaxRange`). A single massive activation then makes all others coarse, so others give
up some of the largest inputs, which saturate, for finer steps everywhere else.

An observer of your own is any class with the two methods of `RangeObserver` whose constructor
takes the weights; give it to `calibrate(..., observer=...)`. In a run of several processes it has
to have those of `SharedObserver` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from quantkit.calibrate.amax import AmaxObserver, canonical_input
from quantkit.calibrate.magnitudes import Magnitudes
from quantkit.errors import RecipeError, nearest
from quantkit.numerics import Format, amax_to_scale, round_to_format

DEFAULT_OBSERVER = "error"
DEFAULT_PERCENTILE = 99.999
SAMPLED_EVERY = 8
"""Of the tokens, those that `ErrorRange` looks at, and the first of each sequence."""
HEADROOM: tuple[float, ...] = tuple(2.0 ** (step / 8) for step in range(9))
"""Ranges that are tried, by the largest input: an octave, within which the codes' steps repeat."""
CLIPPING: tuple[float, ...] = tuple(2.0 ** (step / 8) for step in range(-1, -65, -1))
"""Ranges below the largest input, down to a 256th."""
CLIPPING_GAIN = 1 / 3
"""What share of the error clipping has to save: on other text it costs more than on this one."""


class RangeObserver(Protocol):
    """Watches one input of linear modules."""

    def update(self, x: Tensor) -> None:
        """Take in the inputs of one sequence. Shapes: x [tokens, channels], finite or not."""

    def range(self, fmt: Format) -> float:
        """Return the magnitude that becomes `fmt.max`; larger inputs saturate.

        Called once, after all of the data.
        """


@runtime_checkable
class SharedObserver(RangeObserver, Protocol):
    """One whose data may come from several processes, a few sequences at a time."""

    def take(self) -> Any:
        """Return, and forget, what was seen since the last time; to be merged, here or elsewhere.

        Any value that can be pickled; tensors stay on their device.
        """

    def merge(self, part: Any) -> None:
        """Take in what `take` returned, in the order of the sequences."""


ObserverFactory = Callable[[Tensor], RangeObserver]
"""Makes the observer of one input, given the weights that read it, stacked: [rows, channels]."""


class AmaxRange:
    """The largest input seen: nothing of the calibration data saturates."""

    def __init__(self, weight: Tensor) -> None:
        self._observer = AmaxObserver()

    def update(self, x: Tensor) -> None:
        """See `RangeObserver`."""
        self._observer.update(canonical_input(x))

    def range(self, fmt: Format) -> float:
        """See `RangeObserver`."""
        return 0.0 if self._observer.amax is None else float(self._observer.amax.item())

    def take(self) -> AmaxObserver:
        """See `SharedObserver`."""
        return self._observer.take()

    def merge(self, part: AmaxObserver) -> None:
        """See `SharedObserver`."""
        self._observer.merge_observer(part)


class PercentileRange:
    """The least range that `percentile` per cent of all inputs are within."""

    def __init__(self, weight: Tensor, percentile: float = DEFAULT_PERCENTILE) -> None:
        self._percentile = percentile
        self._magnitudes = Magnitudes(weight.device)

    def update(self, x: Tensor) -> None:
        """See `RangeObserver`."""
        self._magnitudes.add(x)

    def range(self, fmt: Format) -> float:
        """See `RangeObserver`."""
        values, counts = self._magnitudes.occurring()
        if not len(values):
            return 0.0
        within = counts.cumsum(0)
        wanted = (self._percentile / 100 * within[-1]).reshape(1)
        place = torch.searchsorted(within, wanted).clamp(max=len(values) - 1)
        return float(values[place].item())

    def take(self) -> Tensor:
        """See `SharedObserver`."""
        return self._magnitudes.take()

    def merge(self, part: Tensor) -> None:
        """See `SharedObserver`."""
        self._magnitudes.merge(part)


class ErrorRange:
    """The range with the least error of the modules' outputs, relative to each token's output.

    Errors of the channels are taken as independent, so that a token's output error is
    `sum_k |W_k|^2 (x_k - x'_k)^2`. It is divided by the token's `sum_k |W_k|^2 x_k^2`: a token with
    massive activations counts as much as any other, and so cannot set the scale for all of them.
    Within an octave above the largest input, the best range puts the channels that always carry
    much on numbers that the format has.
    """

    def __init__(self, weight: Tensor) -> None:
        self._importance = weight.float().square().sum(dim=0)
        self._magnitudes = Magnitudes(weight.device)
        self._amax = AmaxRange(weight)

    def update(self, x: Tensor) -> None:
        """See `RangeObserver`."""
        self._amax.update(x)
        rows = torch.cat([x[:1], x[SAMPLED_EVERY // 2 :: SAMPLED_EVERY]])
        power = rows.float().square() @ self._importance
        weights = self._importance / power.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        self._magnitudes.add(rows, weights)

    def range(self, fmt: Format) -> float:
        """See `RangeObserver`."""
        amax = self._amax.range(fmt)
        error, largest = self._best(amax, HEADROOM, fmt)
        clipped_error, clipped = self._best(amax, CLIPPING, fmt)
        return clipped if clipped_error < (1 - CLIPPING_GAIN) * error else largest

    def take(self) -> tuple[AmaxObserver, Tensor]:
        """See `SharedObserver`."""
        return self._amax.take(), self._magnitudes.take()

    def merge(self, part: tuple[AmaxObserver, Tensor]) -> None:
        """See `SharedObserver`."""
        amax, counts = part
        self._amax.merge(amax)
        self._magnitudes.merge(counts)

    def _best(self, amax: float, ratios: Sequence[float], fmt: Format) -> tuple[float, float]:
        """Return the least error of the ranges, and the first range that has it."""
        values, counts = self._magnitudes.occurring()
        tried = [amax * ratio for ratio in ratios]
        errors = [_rounding_error(values, counts, each, fmt) for each in tried]
        return min(zip(errors, tried, strict=True), key=lambda pair: pair[0])


def _rounding_error(values: Tensor, counts: Tensor, amax: float, fmt: Format) -> float:
    """Return the summed squared error of rounding `values` with the scale for a range."""
    scale = amax_to_scale(torch.tensor(amax, device=values.device), fmt)
    error = values - round_to_format(values / scale, fmt) * scale
    return float((error.double().square() * counts).sum().item())


OBSERVERS: Mapping[str, ObserverFactory] = {
    "amax": AmaxRange,
    "percentile": PercentileRange,
    "error": ErrorRange,
}


def observer_factory(name: str) -> ObserverFactory:
    """Return what makes the observers of a name in a recipe: "amax", "percentile:99.9", ...

    Raises RecipeError for an unknown name, or a percentile that is none.
    """
    kind, has_value, value = name.partition(":")
    if kind not in OBSERVERS or (has_value and kind != "percentile"):
        known = f"{', '.join(OBSERVERS)}, or percentile:P"
        raise RecipeError(f"observer is {name!r}{nearest(kind, OBSERVERS)}; known: {known}")
    if not has_value:
        return OBSERVERS[kind]
    return partial(PercentileRange, percentile=_percentile(value))


def _percentile(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise RecipeError(f"observer is a percentile above 0, up to 100; got {text!r}")
    return value
