"""Calibration samples: which pieces of which texts, as token ids, and a record of the choice.

Owns selection (seeded, and independent of torch's global random state), the cutting to length, and
what is said about too little or unusable data. Text comes from `texts`, ids from `tokenize`.

The rules. Running text (`builtin`, FILE.txt, FILE.md) is tokenized once and cut into windows of
`seq_len`; a window shorter than that is used only if the text has no full one. Windows of the
packaged corpus are used up before those of Python's manual. In FILE.jsonl and `hf:` every row is a
sample, cut to `seq_len`; `text` wins over `messages`. Windows and rows are chosen by their
position, so reordering a file changes the choice unless all of it is used. Several sources give
equal numbers of samples, the first ones one more where that does not divide; what one source lacks
is not taken from another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.texts import HUB_PREFIX, SELF, Rows, RunningText, open_texts
from quantkit.calibrate.tokenize import (
    check_chat_template,
    encode,
    render_chat,
    special_prefix,
    without_prefix,
)
from quantkit.errors import DataError

MIN_TOKENS = 2
"""Fewest tokens of a sample, without BOS: one to attend from, one to attend to."""
CHARS_PER_TOKEN = 16
"""More than any natural text has; bounds how much of a long text is tokenized."""
MIN_CHARS = 4_000_000
"""Texts up to this size are tokenized as a whole."""
TEXT_FIELDS = ("text", "messages")
ACCEPTED_FIELDS = "'text' or 'messages'"
ROW_BATCH = 64

SelfGenerate = Callable[[int, int, int], Sequence[Tensor]]
"""(num_samples, seq_len, seed) -> samples drawn from the model itself: int64 [<= seq_len] each."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What calibration runs on.

    `ids`: int64 [num_tokens], one per sample, 2 to seq_len tokens (BOS not counted in the 2).
    `provenance`: JSON-ready record of sources, counts, seed and a hash of all ids.
    `warnings`: one line per cause, to be shown once.
    """

    ids: list[Tensor]
    provenance: dict[str, Any]
    warnings: list[str]


@dataclass(slots=True)
class _Taken:
    """What one source gave."""

    ids: list[Tensor]
    available: int  # windows or rows
    unit: str
    skipped: Counter[str] = field(default_factory=Counter)
    cut_lengths: list[int] = field(default_factory=list)  # original lengths of cut samples

    def warnings(self, source: str, asked: int, seq_len: int) -> list[str]:
        found: list[str] = []
        reasons = ", ".join(f"{count} {why}" for why, count in self.skipped.items())
        if len(self.ids) < asked:
            note = f" ({reasons})" if reasons else ""
            found.append(
                f"{len(self.ids)} of {asked} samples usable{note}: {source} has {self.available} "
                f"{self.unit}{'' if self.available == 1 else 's'} of up to {seq_len} tokens"
            )
        elif reasons:
            found.append(f"skipped {self.unit}s of {source}: {reasons}")
        if self.cut_lengths:
            found.append(
                f"{len(self.cut_lengths)} of {len(self.ids)} samples of {source} were cut to "
                f"{seq_len} tokens (longest: {max(self.cut_lengths)})"
            )
        return found

    def record(self, source: str) -> dict[str, Any]:
        return {
            "source": shown(source),
            f"{self.unit}s": self.available,
            "samples": len(self.ids),
            "skipped": dict(self.skipped),
            "cut": len(self.cut_lengths),
            "longest": max(self.cut_lengths, default=max(len(ids) for ids in self.ids)),
        }


def effective_seq_len(
    requested: int, explicit: bool, model_limit: int | None, tokenizer_limit: int | None
) -> tuple[int, str | None]:
    """Return the sample length to use, and a note if it is shorter than requested.

    `explicit`: the user asked for `requested`; a default is cut to what the model and its
    tokenizer take. Raises DataError if an explicit request exceeds the model's limit. Limits of
    None are unknown; tokenizers say 1e30 when they have none.
    """
    if explicit:
        if model_limit is not None and requested > model_limit:
            raise DataError(
                f"--seq-len {requested} exceeds the model's limit of {model_limit} positions "
                f"(max_position_embeddings); use at most {model_limit}"
            )
        return requested, None
    known = [int(limit) for limit in (model_limit, tokenizer_limit) if limit is not None]
    length = min([requested, *known])
    note = f"samples have {length} tokens, the model's limit, instead of {requested}"
    return length, None if length == requested else note


def load_samples(
    sources: Sequence[str],
    tokenizer: Any,
    num_samples: int,
    seq_len: int,
    seed: int = 0,
    chat_template: str | None = None,
    self_generate: SelfGenerate | None = None,
) -> Samples:
    """Return up to `num_samples` samples of at most `seq_len` tokens; see the module's rules.

    `chat_template` is the text of a template that replaces the tokenizer's. Same arguments, same
    samples. Raises DataError if a source cannot be read or gives no usable sample.
    """
    prefix = special_prefix(tokenizer) if set(sources) != {SELF} else []
    _check_request(sources, num_samples, seq_len, MIN_TOKENS + len(prefix))
    ids: list[Tensor] = []
    warnings: list[str] = []
    records: list[dict[str, Any]] = []
    for position, source in enumerate(sources):
        asked = num_samples // len(sources) + (position < num_samples % len(sources))
        request = _Request(source, asked, seq_len, seed, tokenizer, prefix, chat_template)
        taken = _take(request, self_generate)
        ids += taken.ids
        warnings += taken.warnings(shown(source), asked, seq_len)
        records.append(taken.record(source))
    provenance = {
        "sources": records,
        "samples": len(ids),
        "tokens": sum(len(sample) for sample in ids),
        "seq_len": seq_len,
        "seed": seed,
        "sha256": _digest(ids),
        "warnings": warnings,
    }
    return Samples(ids, provenance, warnings)


def shown(source: str) -> str:
    """Return how a source is called in reports: a file by its name, wherever it lies."""
    return source if source.startswith(HUB_PREFIX) else Path(source).name


@dataclass(frozen=True, slots=True)
class _Request:
    """What is wanted from one source, and the means to make it."""

    source: str
    count: int
    seq_len: int
    seed: int
    tokenizer: Any
    prefix: list[int]
    chat_template: str | None

    def order(self, available: int) -> list[int]:
        """Return the positions 0 .. available - 1 in random order; the first are chosen."""
        return random.Random(self.seed).sample(range(available), available)

    def sample(self, ids: Sequence[int]) -> Tensor:
        """Return prefix + ids, cut to seq_len."""
        return torch.tensor([*self.prefix, *ids][: self.seq_len], dtype=torch.int64)


def _check_request(sources: Sequence[str], num_samples: int, seq_len: int, shortest: int) -> None:
    if not sources:
        raise DataError(
            "calibration data is required, because input_activations or kv_cache is static; give "
            "--data, or a recipe with dynamic inputs and --kv none"
        )
    if num_samples < len(sources):
        raise DataError(
            f"--samples is {num_samples} for {len(sources)} data sources; each gives at least one"
        )
    if seq_len < shortest:
        raise DataError(f"--seq-len is {seq_len}; the minimum is {shortest} tokens")


def _take(request: _Request, generate: SelfGenerate | None) -> _Taken:
    if request.source == SELF:
        return _take_generated(request, generate)
    text = open_texts(request.source)
    return _take_rows(request, text) if isinstance(text, Rows) else _take_windows(request, text)


def _take_windows(request: _Request, text: RunningText) -> _Taken:
    """Choose windows of running text."""
    numbers = _choose_pieces(request, text.pieces)
    encoded = encode(request.tokenizer, [text.pieces[number] for number in numbers])
    stream = [token for ids in encoded for token in ids]
    if len(stream) < MIN_TOKENS:
        raise DataError(
            f"{request.source} has {len(stream)} tokens; the minimum of a sample is {MIN_TOKENS}"
        )
    step = request.seq_len - len(request.prefix)
    windows = max(len(stream) // step, 1)
    preferred = sum(number < text.num_preferred for number in numbers)
    first = min(sum(len(ids) for ids in encoded[:preferred]) // step, windows)
    order = request.order(first) + [first + number for number in request.order(windows - first)]
    chosen = sorted(order[: request.count])
    ids = [request.sample(stream[number * step : (number + 1) * step]) for number in chosen]
    return _Taken(ids, windows, "window")


def _choose_pieces(request: _Request, pieces: Sequence[str]) -> list[int]:
    """Number enough pieces for the windows wanted, in their order; all of them, as a rule."""
    budget = max(request.count * request.seq_len * CHARS_PER_TOKEN, MIN_CHARS)
    kept: list[int] = []
    for number in request.order(len(pieces)):
        if budget <= 0:
            break
        kept.append(number)
        budget -= len(pieces[number])
    return sorted(kept)


def _take_rows(request: _Request, text: Rows) -> _Taken:
    """Choose rows: walk them in random order, a batch at a time, until enough are usable."""
    taken = _Taken([], len(text.rows), "row")
    usable: dict[int, list[int]] = {}
    order = request.order(taken.available)
    size = max(request.count, ROW_BATCH)
    for start in range(0, len(order), size):
        usable |= _encode_rows(request, text.rows, order[start : start + size], taken.skipped)
        if len(usable) >= request.count:
            break
    if not usable:
        raise _nothing_usable(request.source, text, taken.skipped)
    for number in sorted(list(usable)[: request.count]):
        length = len(request.prefix) + len(usable[number])
        if length > request.seq_len:
            taken.cut_lengths.append(length)
        taken.ids.append(request.sample(usable[number]))
    return taken


def _encode_rows(
    request: _Request, rows: Sequence[Mapping[str, Any]], batch: list[int], skipped: Counter[str]
) -> dict[int, list[int]]:
    """Return {row number: ids without BOS} of the usable rows, and count why others are not."""
    texts: dict[int, str] = {}
    for number in batch:
        text, reason = _row_text(request, rows[number])
        if text is None:
            skipped[reason] += 1
        else:
            texts[number] = text
    usable: dict[int, list[int]] = {}
    for number, ids in zip(texts, encode(request.tokenizer, list(texts.values())), strict=True):
        bare = without_prefix(ids, request.prefix)
        if len(bare) < MIN_TOKENS:
            skipped[f"shorter than {MIN_TOKENS} tokens"] += 1
        else:
            usable[number] = bare
    return usable


def _row_text(request: _Request, row: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return a row's text, or None and the reason why it has none."""
    filled = [name for name in TEXT_FIELDS if row.get(name)]
    if not filled:
        present = any(name in row for name in TEXT_FIELDS)
        return None, "empty" if present else f"without {ACCEPTED_FIELDS}"
    value = row[filled[0]]
    if filled[0] == "messages":
        check_chat_template(request.tokenizer, request.chat_template, request.source)
        value = render_chat(request.tokenizer, value, request.chat_template)
        return value, "refused by the chat template"
    if not isinstance(value, str):
        return None, "with a 'text' that is not a string"
    return (value, "") if value.strip() else (None, "empty")


def _nothing_usable(source: str, text: Rows, skipped: Counter[str]) -> DataError:
    if not len(text.rows):
        return DataError(f"data source {source} has no rows")
    reasons = ", ".join(f"{count} {why}" for why, count in skipped.items())
    # The names of the fields are the same in all rows of real files; a few rows show them.
    first = [text.rows[number] for number in range(min(len(text.rows), ROW_BATCH))]
    found = ", ".join(repr(name) for name in sorted({name for row in first for name in row}))
    return DataError(
        f"data source {source} has no usable row: {reasons} of {len(text.rows)}; fields found: "
        f"{found or 'none'}; accepted: {ACCEPTED_FIELDS}, of at least {MIN_TOKENS} tokens"
    )


def _take_generated(request: _Request, generate: SelfGenerate | None) -> _Taken:
    """Let the model write its own samples."""
    if generate is None:
        raise DataError(f"data source {SELF!r} needs a model to sample from, and none was given")
    samples = [
        ids.to(torch.int64)[: request.seq_len]
        for ids in generate(request.count, request.seq_len, request.seed)
    ]
    usable = [ids for ids in samples if len(ids) >= MIN_TOKENS]
    if not usable:
        raise DataError(f"data source {SELF!r}: the model wrote no sample of {MIN_TOKENS} tokens")
    taken = _Taken(usable, len(samples), "sample")
    if len(usable) < len(samples):
        taken.skipped[f"shorter than {MIN_TOKENS} tokens"] = len(samples) - len(usable)
    return taken


def _digest(samples: Sequence[Tensor]) -> str:
    """Return a hash of all ids and of where samples end."""
    digest = sha256()
    for ids in samples:
        digest.update(len(ids).to_bytes(8, "little") + ids.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
