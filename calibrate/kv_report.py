"""What an FP8 cache does to one layer, in numbers, and whether that is too much.

Large biases of a few key channels (Qwen2) make attention scores of hundreds, of which FP8 keeps
four bits; softmax turns that error into garbage. No scale helps, since FP8 is a float format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite, log10
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.kv_search import KvError, ScaleChoice, choose_scales, round_states
from quantkit.numerics import Format, amax_to_scale

POOR_OUTPUT_DB = 15.0
"""An output error (signal to noise) that no keys excuse: noise of 18 % in every output."""
SUSPECT_OUTPUT_DB, SUSPECT_CHANNEL_RATIO = 30.0, 32.0
"""Below this, with outlier channels beyond that: long contexts rotate such keys further apart than
the sample shows. Keys of Llama-like models have a ratio of 3 to 7 (and 22 to 37 dB), those that
Qwen2's biases dominate of hundreds."""
UNMEASURED_CHANNEL_RATIO = 64.0
"""The ratio that counts alone where the output error is unknown."""


@dataclass(frozen=True, slots=True)
class KvReport:
    """The FP8 KV cache of one layer, measured on a few hundred tokens.

    Errors are signal-to-noise ratios in dB, higher is better: of keys, of values, and of the
    attention output computed from both (None where the architecture hides its attention), which
    with plain amax scales would be `plain_output_error_db`. key_channel_ratio: largest over median
    channel amax. *_saturated: how many of the values measured lie beyond the range of the scale.
    head_output_error_db: what one scale a head would give; known for flagged layers without them.
    """

    key_error_db: float
    value_error_db: float
    output_error_db: float | None
    plain_output_error_db: float | None
    key_channel_ratio: float
    keys_saturated: int
    values_saturated: int
    head_output_error_db: float | None = None

    @property
    def flagged(self) -> bool:
        """Whether FP8 cannot hold this layer's keys."""
        return _too_much(self.output_error_db, self.key_channel_ratio)

    def to_json(self) -> dict[str, Any]:
        """Return what quantkit.json says of the layer; None for what is unknown or infinite."""
        return {
            "key_error_db": _rounded(self.key_error_db),
            "value_error_db": _rounded(self.value_error_db),
            "output_error_db": _rounded(self.output_error_db),
            "plain_output_error_db": _rounded(self.plain_output_error_db),
            "key_channel_ratio": _rounded(self.key_channel_ratio),
            "keys_saturated": self.keys_saturated,
            "values_saturated": self.values_saturated,
            "flagged": self.flagged,
        }

    def warning(self, layer_name: str) -> str | None:
        """Return one line on a flagged layer: what was measured and what to do; else None."""
        if not self.flagged:
            return None
        if self.output_error_db is None:
            measured = "error of the attention output unknown"
        else:
            measured = f"attention output {self.output_error_db:.1f} dB above its error"
        return (
            f"{layer_name}: an FP8 cache cannot hold its keys (largest channel "
            f"{self.key_channel_ratio:.0f} times the median, {measured}); leave it out (kv_ignore "
            f"in a recipe), or use {self._remedy()}"
        )

    def _remedy(self) -> str:
        by_head = self.head_output_error_db
        if by_head is None or _too_much(by_head, self.key_channel_ratio):
            return "--kv none"
        return f"--kv fp8-head ({by_head:.1f} dB) or --kv none"


def kv_warnings(reports: Mapping[str, KvReport]) -> list[str]:
    """Return what to say about a model, given the reports by layer name.

    One line for each flagged layer, and one for all whose attention could not be observed.
    """
    lines = [line for name, report in reports.items() if (line := report.warning(name))]
    unseen = [name for name, report in reports.items() if report.output_error_db is None]
    if unseen:
        lines.append(
            f"{len(unseen)} layers ({unseen[0]}, ...) compute attention outside of transformers' "
            "attention interface: their KV scales are chosen by the error of keys and values, and "
            "that of the attention output is unknown"
        )
    return lines


def measure_kv(measure: KvError, choice: ScaleChoice) -> KvReport:
    """Measure the chosen scales on the samples of `measure`."""
    keys, values = measure.states()
    fmt = measure.fmt
    report = KvReport(
        key_error_db=_snr_db(keys, round_states(keys, choice.key_amax, fmt)),
        value_error_db=_snr_db(values, round_states(values, choice.value_amax, fmt)),
        output_error_db=_output_db(measure, choice.error),
        plain_output_error_db=_output_db(measure, choice.plain_error),
        key_channel_ratio=_channel_ratio(keys),
        keys_saturated=_num_saturated(keys, choice.key_amax, fmt),
        values_saturated=_num_saturated(values, choice.value_amax, fmt),
    )
    if not report.flagged or measure.per_head or not measure.of_output:
        return report
    by_head = KvError(measure.samples, per_head=True, fmt=measure.fmt)
    error = choose_scales(by_head, *by_head.amaxes()).error
    return replace(report, head_output_error_db=_output_db(by_head, error))


def _too_much(output_error_db: float | None, channel_ratio: float) -> bool:
    if output_error_db is None:
        return channel_ratio >= UNMEASURED_CHANNEL_RATIO
    suspect = output_error_db < SUSPECT_OUTPUT_DB and channel_ratio >= SUSPECT_CHANNEL_RATIO
    return suspect or output_error_db < POOR_OUTPUT_DB


def _channel_ratio(keys: list[Tensor]) -> float:
    """Return the largest over the median channel amax; 1 for keys that are zero."""
    channels = torch.stack([x.abs().amax(dim=1) for x in keys]).amax(dim=0).flatten()
    largest, median = float(channels.max()), float(channels.median())
    if largest == 0:
        return 1.0
    return largest / median if median > 0 else inf


def _num_saturated(states: list[Tensor], amax: Tensor, fmt: Format) -> int:
    limit = (amax_to_scale(amax, fmt) * fmt.max).view(-1, 1, 1)
    return sum(int((x.abs() > limit.to(x.device)).sum()) for x in states)


def _snr_db(exact: list[Tensor], rounded: list[Tensor]) -> float:
    noise = sum(
        float((x - y).square().sum(dtype=torch.float64))
        for x, y in zip(exact, rounded, strict=True)
    )
    return _db(sum(float(x.square().sum(dtype=torch.float64)) for x in exact), noise)


def _output_db(measure: KvError, error: Tensor) -> float | None:
    return _db(measure.signal(), float(error.sum())) if measure.of_output else None


def _db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): infinite without noise, -infinite without signal."""
    if noise == 0:
        return inf
    return 10 * log10(signal / noise) if signal > 0 else -inf


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if value is not None and isfinite(value) else None
