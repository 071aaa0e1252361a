"""What a caller may ask of sampling, and what it means for one model.

`SamplingParams` is the request, where None means "as the model's generation_config says".
`ResolvedParams` is the answer: every value known. Neither touches logits; `sampling` does.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from quantkit.errors import GenerationError, nearest

LOGGER = logging.getLogger("quantkit")

DEFAULT_MAX_NEW_TOKENS = 256
"""Used where neither the caller nor the model's generation_config sets a limit."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; None is the model's own default.

    Raises GenerationError, naming the field and the value, on anything out of range.
    """

    max_new_tokens: int | None = None  # >= 0; the context limit may end a sequence earlier
    min_new_tokens: int | None = None  # >= 0; nothing ends a sequence before, except the context
    temperature: float | None = None  # >= 0; 0 is greedy
    top_k: int | None = None  # >= 0; 0 keeps every token
    top_p: float | None = None  # (0, 1]; 1 keeps every token
    min_p: float | None = None  # [0, 1]; share of the likeliest token's probability; 0 is off
    repetition_penalty: float | None = None  # > 0; 1 is off; counts prompt and new tokens
    presence_penalty: float | None = None  # finite; 0 is off; counts new tokens
    frequency_penalty: float | None = None  # finite; 0 is off; counts new tokens
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit; -inf forbids
    seed: int | None = None  # None draws a fresh one, which `Completion.stats` records
    stop: str | Sequence[str] | None = None  # strings that end the text and are not part of it
    stop_token_ids: Sequence[int] | None = None  # like EOS ids, in addition to them
    ignore_eos: bool = False  # EOS is a token like any other; stop_token_ids still count
    logprobs: int | None = None  # also return the chosen token's log p and the n largest

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "top_k", "logprobs"):
            self._require_integer(name, minimum=0)
        self._require_integer("seed", minimum=None)
        self._require("temperature", 0, math.inf, "a finite number >= 0")
        self._require("min_p", 0, 1, "in [0, 1]")
        self._require("top_p", 0, 1, "in (0, 1]", above=True)
        self._require("repetition_penalty", 0, math.inf, "a finite number > 0", above=True)
        self._require("presence_penalty", -math.inf, math.inf, "a finite number")
        self._require("frequency_penalty", -math.inf, math.inf, "a finite number")
        if not all(isinstance(text, str) and text for text in _strings(self.stop)):
            raise GenerationError(f"stop must hold non-empty strings, got {self.stop!r}")
        for token_id, bias in (self.logit_bias or {}).items():
            if math.isnan(bias) or bias == math.inf:
                raise GenerationError(
                    f"logit_bias must be finite or -inf, got {bias} for token {token_id}"
                )

    def resolve(self, defaults: Mapping[str, Any], vocab_size: int) -> ResolvedParams:
        """Return the values to use with a model.

        `defaults` is the content of its generation_config.json. As in transformers, a temperature
        listed there counts only with `do_sample`; without it the default is greedy.
        Raises GenerationError on token ids outside the vocabulary and on defaults out of range.
        """
        listed = _listed(defaults)
        values: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            own = getattr(self, name)
            value = own if own is not None else getattr(listed, name)
            if value is not None:
                values[name] = value
        values["stop"] = _strings(self.stop)
        values["stop_token_ids"] = frozenset(self.stop_token_ids or ())
        values["eos_token_ids"] = _eos_token_ids(defaults.get("eos_token_id"), vocab_size)
        values.setdefault("seed", secrets.randbits(32))
        resolved = ResolvedParams(**values)
        for name, ids in (
            ("stop_token_ids", resolved.stop_token_ids),
            ("logit_bias", resolved.logit_bias),
        ):
            _require_known(name, ids, vocab_size)
        self._warn_if_unused(resolved)
        return resolved

    def _warn_if_unused(self, resolved: ResolvedParams) -> None:
        """Say so when a filter was asked for and the default turns out to be greedy."""
        if self.temperature is not None or resolved.temperature > 0:
            return
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None:
                LOGGER.warning(
                    "%s has no effect: this model decodes greedily by default; set temperature",
                    name,
                )

    def _require(self, name: str, low: float, high: float, rule: str, above: bool = False) -> None:
        value = getattr(self, name)
        if value is None:
            return
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            number
            and math.isfinite(value)
            and low <= value <= high
            and not (above and value == low)
        ):
            return
        raise GenerationError(f"{name} must be {rule}, got {value!r}")

    def _require_integer(self, name: str, minimum: int | None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise GenerationError(f"{name} must be an integer, got {value!r}")
        if minimum is not None and value < minimum:
            raise GenerationError(f"{name} must be >= {minimum}, got {value}")


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """Sampling parameters with every value known; the meanings are those of SamplingParams.

    The defaults are neutral: greedy, nothing filtered, nothing penalized.
    """

    seed: int
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def seed_used(self) -> int | None:
        """The seed, or None if greedy: then no noise is used and the seed changes nothing."""
        return self.seed if self.temperature > 0 else None

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end a sequence."""
        return self.stop_token_ids | (frozenset() if self.ignore_eos else self.eos_token_ids)


def sampling_params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """Return `params` with single fields replaced; raises GenerationError on an unknown one."""
    names = [f.name for f in fields(SamplingParams)]
    values = {name: getattr(params, name) for name in names} if params else {}
    for name in options:
        if name not in names:
            raise GenerationError(
                f"unknown sampling option {name!r}{nearest(name, names)}; known: {', '.join(names)}"
            )
    return SamplingParams(**(values | dict(options)))


def _listed(defaults: Mapping[str, Any]) -> SamplingParams:
    """Return what a generation_config lists, in our terms."""
    sampled = bool(defaults.get("do_sample"))
    names = ("max_new_tokens", "min_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty")
    values: dict[str, Any] = {name: defaults.get(name) for name in names}
    values["temperature"] = 0.0
    if sampled:
        temperature = defaults.get("temperature")
        values["temperature"] = 1.0 if temperature is None else temperature
    try:
        return SamplingParams(**values)
    except GenerationError as error:
        raise GenerationError(f"generation_config.json: {error}") from None


def _eos_token_ids(listed: Any, vocab_size: int) -> frozenset[int]:
    """Return the EOS ids of a generation_config, which lists none, one or several."""
    ids = listed if isinstance(listed, (list, tuple)) else [] if listed is None else [listed]
    known = []
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise GenerationError(f"generation_config.json: eos_token_id holds {token_id!r}")
        if 0 <= token_id < vocab_size:
            known.append(token_id)
        else:
            LOGGER.warning(
                "eos_token_id %d is outside the vocabulary of %d tokens; it is ignored",
                token_id,
                vocab_size,
            )
    return frozenset(known)


def _require_known(name: str, ids: Mapping[int, float] | frozenset[int], vocab_size: int) -> None:
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise GenerationError(
                f"{name} has token {token_id!r}, outside the vocabulary of {vocab_size} tokens"
            )


def _strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
