"""The texts to score: from data sources to token ids, in order, nothing chosen at random.

A text file is one text; every row of a JSONL file or a dataset is a text of its own. What cannot be
scored is counted and named, never dropped in silence. Reading and tokenizing are calibration's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from quantkit.calibrate.texts import SELF, Rows, open_texts
from quantkit.calibrate.tokenize import encode, render_chat, special_prefix, without_prefix
from quantkit.errors import DataError
from quantkit.evaluate.windows import MIN_TOKENS

BATCH = 64
"""Rows tokenized together; also how far reading runs ahead of a limit on tokens."""


@dataclass(slots=True)
class Texts:
    """Token ids of every text, without BOS, and what was left out.

    `prefix` is what the tokenizer puts before every text. `skipped` counts rows by reason.
    """

    prefix: tuple[int, ...]
    ids: list[list[int]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts, BOS not counted."""
        return sum(map(len, self.ids))


def load_texts(sources: Sequence[str], tokenizer: Any, max_tokens: int | None = None) -> Texts:
    """Read and tokenize data sources.

    `max_tokens` in all, from the beginning of each source; several sources give equal shares, and
    what one source lacks is not taken from another. Raises DataError, naming the source, if one
    cannot be read or has no text of two tokens.
    """
    if not sources:
        raise DataError("no data is given; give --data, or leave it out for the default")
    if max_tokens is not None and max_tokens < MIN_TOKENS * len(sources):
        raise DataError(
            f"--max-tokens is {max_tokens} for {len(sources)} data sources; each needs at least "
            f"{MIN_TOKENS}"
        )
    texts = Texts(tuple(special_prefix(tokenizer)))
    for position, source in enumerate(sources):
        share = None
        if max_tokens is not None:
            share = max_tokens // len(sources) + (position < max_tokens % len(sources))
        _add(texts, source, tokenizer, share)
    return texts


def _add(texts: Texts, source: str, tokenizer: Any, limit: int | None) -> None:
    if source == SELF:
        raise DataError(
            f"data source {SELF!r} is text that the model wrote itself, on which its perplexity "
            "means little; evaluate on other text"
        )
    found = skipped = 0
    for ids in _token_ids(source, tokenizer):
        bare = without_prefix(ids, list(texts.prefix))[:limit]
        if len(bare) >= MIN_TOKENS:
            texts.ids.append(bare)
            found += 1
            limit = None if limit is None else limit - len(bare)
        else:
            skipped += 1
        if limit is not None and limit < MIN_TOKENS:
            break
    if skipped:
        texts.skipped[f"shorter than {MIN_TOKENS} tokens"] += skipped
    if not found:
        raise DataError(f"data source {source} has no text of at least {MIN_TOKENS} tokens")


def _token_ids(source: str, tokenizer: Any) -> Iterator[list[int]]:
    """Yield the ids of each text of a source; running text is one."""
    opened = open_texts(source)
    if not isinstance(opened, Rows):
        # Tokenized in pieces, in parallel; they are cut after line breaks.
        yield [token for ids in encode(tokenizer, opened.pieces) for token in ids]
        return
    rows = enumerate(iter(opened.rows), start=1)
    while batch := list(islice(rows, BATCH)):
        yield from encode(tokenizer, [_row_text(source, n, row, tokenizer) for n, row in batch])


def _row_text(source: str, number: int, row: Mapping[str, Any], tokenizer: Any) -> str:
    """Return the text of a row; a row without one is an error: it would be left out unseen."""
    text: Any = row.get("text")
    if not text and row.get("messages"):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"{source} has rows with 'messages', and the tokenizer has no chat template; give "
                "rows with 'text'"
            )
        text = render_chat(tokenizer, row["messages"], None)
        if text is None:
            raise DataError(f"row {number} of {source} is refused by the chat template")
    if not isinstance(text, str):
        fields = ", ".join(repr(name) for name in sorted(row)) or "none"
        raise DataError(
            f"row {number} of {source} has no 'text' or 'messages'; its fields are {fields}"
        )
    return text
