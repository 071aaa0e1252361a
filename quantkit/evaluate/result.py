"""What an evaluation found: averages over tokens, their uncertainty, and the verdict.

Every number here was measured in this run. Standard errors treat tokens as independent, which
neighbours in a text are not quite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.evaluate.distribution import Distribution
from quantkit.evaluate.saturation import SaturationSummary
from quantkit.evaluate.scores import TokenScores

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp(mean nll), and its standard error; None for a single token."""

    perplexity: float
    perplexity_standard_error: float | None

    @classmethod
    def of(cls, scores: TokenScores) -> Perplexity:
        """Return the perplexity of scored tokens."""
        return cls(*_exponential_mean(scores.nll.numpy()))


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model is from the original. KL(original || model) in nats per token.

    `ppl_ratio` is model by original; its standard error comes from the paired differences of the
    two models' log-likelihoods, so it is far smaller than that of either perplexity.
    """

    mean_kl: float
    mean_kl_standard_error: float | None
    median_kl: float
    p99_kl: float
    p999_kl: float
    top1_agreement: float
    ppl_ratio: float
    ppl_ratio_standard_error: float | None

    @classmethod
    def of(cls, original: TokenScores, scores: TokenScores) -> Divergence | None:
        """Return the divergence of scored tokens, or None if they were not compared."""
        if scores.kl is None or scores.agrees is None:
            return None
        kl: Values = scores.kl.numpy()
        ratio, ratio_error = _exponential_mean((scores.nll - original.nll).numpy())
        median, p99, p999 = (float(q) for q in np.quantile(kl, (0.5, 0.99, 0.999)))
        return cls(
            mean_kl=float(kl.mean()),
            mean_kl_standard_error=_standard_error(kl),
            median_kl=median,
            p99_kl=p99,
            p999_kl=p999,
            top1_agreement=float(scores.agrees.double().mean()),
            ppl_ratio=ratio,
            ppl_ratio_standard_error=ratio_error,
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """The quantized model with one kind of KV cache ("none" or "fp8")."""

    kv: str
    perplexity: Perplexity
    divergence: Divergence | None
    distribution: Distribution | None = None
    saturation: SaturationSummary | None = None  # None where no scale is static

    def to_json(self) -> dict[str, Any]:
        """Return the averages, flat."""
        return {**_plain(self.perplexity), **(_plain(self.divergence) if self.divergence else {})}


@dataclass(frozen=True, slots=True)
class Setting:
    """What was measured, and how. `count` tokens were scored out of `tokens` in `texts` texts."""

    checkpoint: str
    reference: str | None
    reference_is_source: bool | None  # None: not told apart
    data: list[str]
    texts: int
    skipped: dict[str, int]
    tokens: int
    count: int
    window: int
    stride: int
    bos: str
    dtype: str
    activations: str

    def __str__(self) -> str:
        """Return the line that belongs beside the numbers."""
        return (
            f"{self.count:,} of {self.tokens:,} tokens scored, {self.texts} text"
            f"{'' if self.texts == 1 else 's'}; window {self.window}, stride {self.stride}; "
            f"BOS {self.bos}; computed in {self.dtype}; activations {self.activations}"
        )


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the checkpoint must reach, with every kind of KV cache that is measured."""

    max_kl: float | None = None
    max_ppl_ratio: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.max_kl is not None or self.max_ppl_ratio is not None

    def violations(self, measurements: Sequence[Measurement]) -> list[str]:
        """Return a line for each number that is above its limit, or that cannot be compared."""
        lines = []
        for measurement in measurements:
            found = measurement.divergence
            if found is None:
                continue
            for name, option, value, limit in (
                ("mean KL", "--max-kl", found.mean_kl, self.max_kl),
                ("perplexity ratio", "--max-ppl-ratio", found.ppl_ratio, self.max_ppl_ratio),
            ):
                if limit is not None and not value <= limit:
                    lines.append(
                        f"{name} is {value:.6g} with kv {measurement.kv}, above {option} {limit:g}"
                    )
        return lines


@dataclass(frozen=True, slots=True)
class Result:
    """All of it. `original` is None without a reference."""

    setting: Setting
    original: Perplexity | None
    measurements: list[Measurement]
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def violations(self) -> list[str]:
        """One line for each threshold that is not met; empty when all are."""
        return self.thresholds.violations(self.measurements)

    def to_json(self) -> dict[str, Any]:
        """Return everything, JSON-ready.

        The flat numbers are those of the first measurement, named by `kv`; all are in
        `measurements`, by their kind of KV cache.
        """
        first = self.measurements[0]
        original = _plain(self.original) if self.original else {}
        return {
            **asdict(self.setting),
            "kv": first.kv,
            **first.to_json(),
            **{f"reference_{name}": value for name, value in original.items()},
            "measurements": {found.kv: found.to_json() for found in self.measurements},
            "distributions": {
                found.kv: asdict(found.distribution)
                for found in self.measurements
                if found.distribution is not None
            },
            "saturation": {
                found.kv: found.saturation.to_json()
                for found in self.measurements
                if found.saturation is not None
            },
            "thresholds": asdict(self.thresholds),
            "violations": self.violations,
        }


def _plain(numbers: Perplexity | Divergence) -> dict[str, float | None]:
    """Return numbers for JSON, which knows no infinity: what is beyond a float becomes null."""
    return {
        name: value if value is None or np.isfinite(value) else None
        for name, value in asdict(numbers).items()
    }


def _exponential_mean(values: Values) -> tuple[float, float | None]:
    """Return exp(mean), and its standard error by the delta method."""
    with np.errstate(over="ignore"):
        mean = float(np.exp(values.mean()))
    error = _standard_error(values)
    return mean, None if error is None else mean * error


def _standard_error(values: Values) -> float | None:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
