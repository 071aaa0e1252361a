"""What a tokenizer must be able to do before anything is built on it."""

from __future__ import annotations

from typing import Any


def usable(tokenizer: Any) -> Any:
    """Return a tokenizer that has just encoded a letter, and decoded it.

    Libraries open many damaged files, and fail at the first text. Raises ValueError for a length
    that is no number, and whatever the library raises.
    """
    limit = tokenizer.model_max_length
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise ValueError(f"model_max_length is {limit!r}, expected a number")
    tokenizer.decode(tokenizer("a")["input_ids"], skip_special_tokens=True)
    _ = tokenizer.all_special_ids  # empty special tokens lead some libraries round in circles
    return tokenizer
