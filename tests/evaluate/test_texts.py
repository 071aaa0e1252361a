from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import DataError
from quantkit.evaluate.texts import load_texts
from tests import tiny


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def write_text(folder: Path, num_words: int, name: str = "text.txt") -> str:
    path = folder / name
    path.write_text(tiny.sentence(num_words))
    return str(path)


def test_a_text_file_is_one_text_without_bos(tmp_path: Path, tokenizer: Any) -> None:
    texts = load_texts([write_text(tmp_path, 50)], tokenizer)
    assert texts.prefix == (tiny.BOS_ID,)
    assert [len(ids) for ids in texts.ids] == [50]
    assert texts.num_tokens == 50
    assert tokenizer.decode(texts.ids[0]) == tiny.sentence(50)


def test_a_tokenizer_without_bos_has_no_prefix(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.save_tokenizer(tmp_path, add_bos=False))
    assert load_texts([write_text(tmp_path, 50)], tokenizer).prefix == ()


def test_every_row_is_a_text_and_all_are_kept_in_order(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": tiny.sentence(2 + n % 9, seed=n)} for n in range(150)]
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    texts = load_texts([str(path)], tokenizer)
    assert [tokenizer.decode(ids) for ids in texts.ids] == [row["text"] for row in rows]
    assert not texts.skipped


def test_conversations_are_rendered_and_have_no_second_bos(
    tmp_path: Path, chat_tokenizer_folder: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer_folder)
    row = {"messages": [{"role": "user", "content": "hello cat"}]}
    texts = load_texts([str(tiny.write_jsonl(tmp_path / "c.jsonl", [row]))], tokenizer)
    assert texts.prefix == (tiny.BOS_ID,)
    assert tokenizer.decode(texts.ids[0]) == "user : hello cat </s>"


def test_texts_too_short_to_score_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "cat"}, {"text": "the cat is"}, {"text": ""}]
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    texts = load_texts([str(path)], tokenizer)
    assert len(texts.ids) == 1
    assert dict(texts.skipped) == {"shorter than 2 tokens": 2}


def test_a_limit_takes_the_beginning_and_is_shared_by_the_sources(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": tiny.sentence(8)}] * 9)
    sources = [write_text(tmp_path, 50), str(rows)]
    texts = load_texts(sources, tokenizer, max_tokens=41)
    assert [len(ids) for ids in texts.ids] == [21, 8, 8, 4]
    assert tokenizer.decode(texts.ids[0]) == " ".join(tiny.sentence(50).split()[:21])
    assert not texts.skipped


@pytest.mark.parametrize("limit", [1, 3])
def test_a_limit_below_two_tokens_a_source_is_an_error(limit: int, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=f"--max-tokens is {limit} for 2 data sources"):
        load_texts(["builtin", "builtin"], tokenizer, max_tokens=limit)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": "the cat"}, {"txt": "the cat"}], r"row 2 of .*rows\.jsonl has no 'text'.*'txt'"),
        ([{"text": 5}], "row 1 of .* has no 'text'"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "no chat template"),
        ([{"text": "cat"}], "has no text of at least 2 tokens"),
    ],
)
def test_what_cannot_be_scored_is_an_error(
    lines: list[dict[str, Any]], message: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=message):
        load_texts([str(path)], tokenizer)


@pytest.mark.parametrize(
    ("source", "message"),
    [("self", "wrote itself"), ("absent.txt", "does not exist"), ("bultin", "builtin")],
)
def test_a_source_that_cannot_be_read_is_named(source: str, message: str, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=message):
        load_texts([source], tokenizer)


def test_one_word_is_not_enough(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="at least 2 tokens"):
        load_texts([write_text(tmp_path, 1)], tokenizer)
    assert load_texts([write_text(tmp_path, 2)], tokenizer).num_tokens == 2
