"""From text to token ids: batches, chat templates, and exactly one BOS.

Wraps what differs between tokenizers. Never adds an end-of-sequence token, never pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.errors import DataError


def special_prefix(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer puts before every text: BOS, or nothing, rarely more."""
    bare = encode(tokenizer, ["a"])[0]
    full = list(tokenizer("a")["input_ids"])
    starts = range(len(full) - len(bare) + 1)
    start = next((s for s in starts if full[s : s + len(bare)] == bare), 0)
    return full[:start]


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text without added special tokens; markers in the text are kept."""
    if not texts:
        return []
    # verbose=False: being longer than the model's limit is no fault here, samples are cut later.
    encoded = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    return [list(ids) for ids in encoded["input_ids"]]


def without_prefix(ids: list[int], prefix: list[int]) -> list[int]:
    """Return ids after any number of copies of `prefix` at their start.

    A chat template may have written BOS already; the caller puts one back.
    """
    start = 0
    while prefix and ids[start : start + len(prefix)] == prefix:
        start += len(prefix)
    return ids[start:]


def check_chat_template(tokenizer: Any, chat_template: str | None, source: str) -> None:
    """Raise DataError if neither the caller nor the tokenizer has a chat template."""
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{source} has rows with 'messages', and the tokenizer has no chat template; pass "
            "--chat-template FILE, or rows with 'text'"
        )


def render_chat(tokenizer: Any, messages: Any, chat_template: str | None) -> str | None:
    """Return a conversation as text, or None if the template cannot render it."""
    try:
        text: str = tokenizer.apply_chat_template(
            messages, chat_template=chat_template, tokenize=False, add_generation_prompt=False
        )
    # A template is a program that came with the model: it may raise anything on a row it dislikes.
    except Exception:
        return None
    return text
