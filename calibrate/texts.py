"""Where calibration text comes from: the built-in corpus, files, and datasets from the Hub.

Turns the name of a source into running text or into rows. Knows nothing about tokens, and picks
nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from quantkit.errors import DataError, nearest

BUILTIN = "builtin"
SELF = "self"
HUB_PREFIX = "hf:"
TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIX = ".jsonl"
ACCEPTED = f"{BUILTIN}, {SELF}, FILE.txt, FILE.md, FILE.jsonl, {HUB_PREFIX}NAME[:CONFIG][:SPLIT]"

DOCUMENT_BREAK = "\n\f\n"
"""Between two documents in a file of the corpus."""
PIECE_CHARS = 1 << 16
"""Long files are tokenized in pieces of about this size: tokenizers run a batch in parallel."""
PROBE_SECONDS = 3.0
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class RunningText:
    """One long text, in pieces that follow each other; windows may cross from one into the next.

    The first `num_preferred` pieces are used up before any of the others is used.
    """

    pieces: Sequence[str]
    num_preferred: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Independent rows; each is one sample."""

    rows: Sequence[Mapping[str, Any]]


def open_texts(source: str) -> RunningText | Rows:
    """Read the text of a data source (any but `self`).

    Raises DataError that names the source, and for files the line.
    """
    if source == BUILTIN:
        corpus = corpus_texts()
        return RunningText([*corpus, *manual_texts()], len(corpus))
    if source.startswith(HUB_PREFIX):
        return Rows(_load_hub_rows(source))
    path = Path(source)
    if path.suffix not in (*TEXT_SUFFIXES, ROW_SUFFIX):
        hint = nearest(source, (BUILTIN, SELF))
        raise DataError(f"unknown data source {source!r}{hint}; accepted: {ACCEPTED}")
    if path.suffix == ROW_SUFFIX:
        return Rows(_read_rows(path))
    return RunningText(split_text(_read_text(path)))


def corpus_texts() -> list[str]:
    """Return the documents of the packaged corpus, one kind after the other in turn.

    About 245 KB: encyclopedic articles, prose and conversation, sixteen languages, code, tables.
    Error compensation fits the text it sees, so a corpus of one kind (the manual alone) costs
    accuracy on all others.
    """
    folder = files("quantkit.calibrate") / "corpus"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    kinds = [(folder / name).read_text("utf-8").split(DOCUMENT_BREAK) for name in names]
    in_turn = [document for row in zip_longest(*kinds) for document in row if document]
    return [document.strip() + "\n\n" for document in in_turn]


def manual_texts() -> list[str]:
    """Return the topics of Python's reference manual in sorted order: 465 KB of English prose.

    Every CPython carries them, so no network is needed; they differ a little between versions of
    Python, and not between runs.
    """
    from pydoc_data.topics import topics

    return [topics[name].rstrip() + "\n\n" for name in sorted(topics)]


def split_text(text: str) -> list[str]:
    """Cut a text after line breaks into pieces of about PIECE_CHARS; joined they are the text."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARS) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return pieces


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"data file {path} does not exist") from None
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path} is not UTF-8: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read data file {path}: {error.strerror}") from None
    if not text.strip():
        raise DataError(f"data file {path} has no rows: it is empty")
    return text


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    # JSON strings may hold line separators other than \n, at which str.splitlines would cut.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows


def parse_hub_source(source: str) -> tuple[str, str | None, str]:
    """Split `hf:NAME[:CONFIG][:SPLIT]` into name, config and split (default "train").

    A lone second part is a split if it is one of SPLITS, with or without a slice as in
    "train[:1%]", and a config otherwise.
    """
    # The colon of a slice is inside brackets.
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix(HUB_PREFIX), maxsplit=2)
    if not name:
        raise DataError(f"data source {source!r} names no dataset; accepted: {ACCEPTED}")
    if len(rest) == 1 and rest[0].split("[")[0] in SPLITS:
        rest = ["", rest[0]]
    config, split = (*rest, "", "")[:2]
    return name, config or None, split or "train"


def _load_hub_rows(source: str) -> Sequence[Mapping[str, Any]]:
    from datasets import load_dataset

    name, config, split = parse_hub_source(source)
    try:
        with _offline_if_unreachable(name):
            rows: Sequence[Mapping[str, Any]] = load_dataset(name, config, split=split)
    # datasets raises a dozen unrelated types for what the user named wrongly or cannot reach.
    except Exception as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            f"cannot load {source}: {cause}; check the name, or download it where there is a "
            f"network with 'hf download --repo-type dataset {name}', or give a file"
        ) from None
    return rows


@contextmanager
def _offline_if_unreachable(name: str) -> Iterator[None]:
    """Use the local cache alone if the Hub does not answer.

    Without this the Hub's client retries for half a minute before it looks into the cache.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    before = constants.HF_HUB_OFFLINE
    if not before and not os.path.isdir(name):
        try:
            HfApi().dataset_info(name, timeout=PROBE_SECONDS)
        except HfHubHTTPError:
            pass  # it answered; loading will say what is wrong with the name
        except Exception:  # the type depends on the HTTP client that is installed
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
