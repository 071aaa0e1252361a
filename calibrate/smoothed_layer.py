"""Smooth one loaded decoder layer: the tier's entry point.

Owns what is observed of the inputs, the error that candidates are ranked by, and what is kept.
Runs before the layer's weights are quantized; afterwards the layer computes what it did, and what
was observed of the inputs before has to be divided by `SmoothedLayer.input_factors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, log10
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate.quantized_layer import fake_quantize_input
from quantkit.calibrate.ranks import ALONE, Ranks
from quantkit.calibrate.smoothing import (
    ALPHAS,
    ChosenFactors,
    SmoothingPair,
    Strength,
    awq_factors,
    choose_factors,
    column_amax,
    fold,
    smoothing_factors,
)
from quantkit.calibrate.smoothing_pairs import Run, SkippedPair, find_pairs
from quantkit.numerics import amax_to_scale, fake_quantize, tile_amax
from quantkit.scheme import Granularity, QuantSpec

MIN_GAIN_DB = 0.1
"""Smaller gains on a sample of tokens and rows are chance."""
MAX_OCTAVES = 8
"""Factors stay within 2^-8 .. 2^8, so that float16 weights neither overflow nor lose bits."""
SAMPLED_ROWS = 512
_BLOCK = 128  # rows that may share a scale

Error = Callable[[SmoothingPair, Tensor], float]
"""Squared output error of the pair's targets, quantized, with these factors [C] folded in."""


@dataclass(frozen=True, slots=True)
class AppliedPair:
    """A pair that was smoothed; `gain_db` is how much the error of its targets fell."""

    pair: SmoothingPair
    strength: Strength
    gain_db: float


@dataclass(slots=True)
class SmoothedLayer:
    """What smoothing did to a layer; all names are relative to it.

    skipped: pairs that cannot be smoothed, or that it does not help. input_factors: what the
    inputs [K] of each target were divided by, float32 [K]. changed: parameters that are not those
    of the source any more; those that are not quantized have to be written to the checkpoint.
    """

    applied: list[AppliedPair] = field(default_factory=list)
    skipped: list[SkippedPair] = field(default_factory=list)
    input_factors: dict[str, Tensor] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)


@torch.no_grad()
def smooth_layer(
    layer: nn.Module,
    config: Any,
    run: Run,
    statistics: InputStatistics,
    error: Error,
    *,
    power_of_two: bool = True,
    norms_only: bool = False,
    min_gain_db: float = MIN_GAIN_DB,
) -> SmoothedLayer:
    """Fold the best factors into each provable pair of a loaded layer for which they help.

    Candidates are SmoothQuant's and AWQ's factors for each alpha of `ALPHAS`. `config` is that of
    the model; `run` runs the layer on a few tokens (see `find_pairs`). `norms_only` leaves out
    v -> o and up -> down, for static input scales: a massive activation on other text would be
    clipped that the plain scale still held. Raises CalibrationError for observed inputs that are
    not finite.
    """
    pairs, skipped = find_pairs(layer, config, run)
    result = SmoothedLayer(skipped=skipped)
    for pair in pairs:
        if any(target not in statistics.amax for target in pair.targets):
            result.skipped.append(SkippedPair(pair.name, "not all of its targets are observed"))
        elif norms_only and layer.get_parameter(f"{pair.source}.weight").dim() > 1:
            reason = "static input scales do not hold activations of this kind after smoothing"
            result.skipped.append(SkippedPair(pair.name, reason))
        else:
            candidates = _candidates(layer, pair, statistics, power_of_two)
            chosen = choose_factors(candidates, partial(error, pair), min_gain_db)
            _apply(layer, pair, chosen, result)
    return result


def _candidates(
    layer: nn.Module, pair: SmoothingPair, statistics: InputStatistics, power_of_two: bool
) -> dict[Strength, Tensor]:
    """Return factors [C] for all strengths."""
    first = pair.targets[0]  # all targets read the same tensor
    amax = pair.channels(statistics.amax[first])
    mean = pair.channels(statistics.mean[first])
    weights = [layer.get_parameter(f"{target}.weight").data for target in pair.targets]
    columns = pair.channels(column_amax(weights))
    found: dict[Strength, Tensor] = {}
    for alpha in ALPHAS:
        found["smoothquant", alpha] = smoothing_factors(amax, columns, alpha, power_of_two)
        found["awq", alpha] = awq_factors(mean, columns, alpha, power_of_two)
    limit = 2.0**MAX_OCTAVES
    return {strength: factors.clamp(1 / limit, limit) for strength, factors in found.items()}


def _apply(
    layer: nn.Module, pair: SmoothingPair, chosen: ChosenFactors, result: SmoothedLayer
) -> None:
    if chosen.strength is None:
        result.skipped.append(SkippedPair(pair.name, "no factors lower the output error enough"))
        return
    folded = fold(layer, pair, chosen.factors)
    result.changed += [name for name in folded.before if name not in result.changed]
    columns = pair.columns(folded.factors)
    result.input_factors.update(dict.fromkeys(pair.targets, columns))
    gain = 10 * log10(chosen.plain_error / chosen.error) if chosen.error else inf
    result.applied.append(AppliedPair(pair, chosen.strength, gain))


class SampledError:
    """The output error of a pair's targets on sampled tokens and blocks of output rows.

    `sum |x W^T - Q(x / s) Q(W s)^T|^2`, where Q is the recipe's; linears that share an input are
    taken as one matrix, as an engine would. The same call always gives the same number.
    """

    def __init__(
        self,
        layer: nn.Module,
        statistics: InputStatistics,
        weights: QuantSpec,
        inputs: QuantSpec | None,
    ) -> None:
        self._layer = layer
        self._statistics = statistics
        self._weights = weights
        self._inputs = inputs

    @torch.no_grad()
    def __call__(self, pair: SmoothingPair, factors: Tensor) -> float:
        """Return the error with factors [C] of the pair's source."""
        columns = pair.columns(factors)
        target = pair.targets[0]
        parameters = [self._layer.get_parameter(f"{name}.weight").data for name in pair.targets]
        weight = _sampled_rows(parameters)
        x = self._statistics.rows[target].float()
        scaled = weight * columns
        amax = tile_amax(scaled, self._weights.tile(*scaled.shape))
        if self._weights.granularity is Granularity.TENSOR:
            amax = (column_amax(parameters) * columns).amax().view(1, 1)
        spec = self._weights
        grid = amax_to_scale(amax, spec.fmt)
        rounded = fake_quantize(scaled, grid, spec.fmt, spec.tile(*scaled.shape))
        seen = self._rounded_inputs(x / columns, self._statistics.amax[target] / columns)
        return float((seen @ rounded.t() - x @ weight.t()).square().sum().item())

    def _rounded_inputs(self, x: Tensor, amax: Tensor) -> Tensor:
        spec = self._inputs
        if spec is None:
            return x
        scale = None if spec.dynamic else amax_to_scale(amax.amax(), spec.fmt).view(1)
        return fake_quantize_input(x, scale, spec)


def _sampled_rows(weights: Sequence[Tensor]) -> Tensor:
    """Return at most `SAMPLED_ROWS` rows of the stacked weights, in blocks, evenly spread.

    Shapes: each [N_i, K] -> float32 [rows, K].
    """
    blocks = [block for weight in weights for block in torch.split(weight, _BLOCK)]
    step = max(1, len(blocks) * _BLOCK // SAMPLED_ROWS)
    return torch.cat(blocks[::step]).float()


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """What was seen of the inputs of a layer's linears, by names relative to the layer.

    amax, mean: float32 [K], max and mean of |x|. rows: [tokens, K], a sample of tokens that amax
    and mean have not seen: factors that give every channel the same range make a static scale of
    which each channel's next record is clipped, and only other tokens show it.
    """

    amax: dict[str, Tensor]
    mean: dict[str, Tensor]
    rows: dict[str, Tensor]


class InputCollector:
    """Forward hooks on a layer's linears that collect `InputStatistics`.

    Linears that read the same tensor share one observation. `rows_per_call` evenly spread tokens
    of each call are held out. The first is in both parts: massive activations live there.
    """

    def __init__(self, modules: Mapping[str, nn.Linear], rows_per_call: int = 32) -> None:
        self._rows_per_call = rows_per_call
        self._seen: dict[str, list[_Seen]] = {name: [] for name in modules}
        self._new: dict[str, list[_Seen]] = {name: [] for name in modules}
        self._last: tuple[Tensor, _Seen] | None = None
        self._handles = [
            module.register_forward_pre_hook(self._hook(name)) for name, module in modules.items()
        ]

    def _hook(self, name: str) -> Any:
        def observe(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not args[0].numel():
                return
            if self._last is None or self._last[0] is not args[0]:
                self._last = (args[0], _see(args[0], self._rows_per_call))
            self._new[name].append(self._last[1])

        return observe

    def begin(self, first: int) -> None:
        """Announce the sequences from number `first` on: their numbers make no difference."""

    def end_block(self, ranks: Ranks) -> None:
        """Bring what every process has seen of this round to the first."""
        found, self._new = self._new, {name: [] for name in self._new}
        for part in ranks.gather(found):
            for name, seen in part.items():
                self._seen[name] += seen

    def finish(self) -> InputStatistics:
        """Remove the hooks; return what was seen, without linears that saw no token."""
        for handle in self._handles:
            handle.remove()
        self._last = None
        self.end_block(ALONE)
        seen = {name: found for name, found in self._seen.items() if found}
        return InputStatistics(
            {name: torch.stack([s.amax for s in all_]).amax(dim=0) for name, all_ in seen.items()},
            {
                name: torch.stack([s.sum for s in all_]).sum(dim=0) / sum(s.count for s in all_)
                for name, all_ in seen.items()
            },
            {name: torch.cat([s.rows for s in all_]) for name, all_ in seen.items()},
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """One call's share: max and sum of |x| [K], number of tokens, sampled tokens [rows, K]."""

    amax: Tensor
    sum: Tensor
    count: int
    rows: Tensor


def _see(x: Tensor, num_rows: int) -> _Seen:
    tokens = x.reshape(-1, x.shape[-1])
    step = max(2, tokens.shape[0] // num_rows)
    size = tokens.abs()
    size[step::step] = 0  # held out
    count = tokens.shape[0] - len(size[step::step])
    amax, total = size.amax(dim=0).float(), size.sum(dim=0, dtype=torch.float32)
    return _Seen(amax, total, count, tokens[::step].clone())
