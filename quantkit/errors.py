"""The errors that quantkit raises on purpose.

A message says what is wrong with the value, where (file, tensor, layer, option), and what to do.
Anything else that escapes is a bug in quantkit, not in its input.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantKitError(Exception):
    """Base of every error that a user can cause; the command line prints it as one line."""


class SourceError(QuantKitError):
    """The source model cannot be used: missing, truncated, non-finite, already quantized."""


class CheckpointError(QuantKitError):
    """A quantized checkpoint cannot be written or read."""


class RecipeError(QuantKitError):
    """A recipe or a scheme is malformed, or does not fit the model."""


class DataError(QuantKitError):
    """Calibration data is missing, empty or unusable."""


class CalibrationError(QuantKitError):
    """Calibration ran but did not produce usable statistics."""


class UnsupportedError(QuantKitError):
    """The request is well formed, and quantkit cannot do it."""


class GenerationError(QuantKitError):
    """A sampling parameter or a prompt is invalid."""


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return what another library's error says, as a part of one readable line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= limit else f"{text[:limit]}..."


def nearest(word: str, options: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the option closest to `word`, or an empty string."""
    matches = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
