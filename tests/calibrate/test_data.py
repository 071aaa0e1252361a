"""Calibration samples: sources, selection, cutting, one BOS, and what is said about bad data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from quantkit.calibrate import texts
from quantkit.calibrate.data import Samples, effective_seq_len, load_samples
from quantkit.calibrate.texts import corpus_texts, manual_texts, parse_hub_source, split_text
from quantkit.calibrate.tokenize import special_prefix
from quantkit.errors import DataError
from tests import tiny
from tests.tiny import BOS_ID, EOS_ID, sentence, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="module")
def chat_tokenizer(chat_tokenizer_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(chat_tokenizer_folder)


@pytest.fixture(scope="module")
def bare_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Adds no BOS, and has a chat template that writes one."""
    folder = tmp_path_factory.mktemp("bare")
    tiny.save_tokenizer(folder, tiny.CHAT_TEMPLATE, add_bos=False)
    return AutoTokenizer.from_pretrained(folder)


def as_lists(samples: Samples) -> list[list[int]]:
    return [ids.tolist() for ids in samples.ids]


def word_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


# Sources.


def test_builtin_text_is_the_same_prose_every_time() -> None:
    pieces = manual_texts()
    assert pieces == manual_texts()
    assert sum(map(len, pieces)) > 300_000


def test_the_corpus_is_many_kinds_of_text_in_turn() -> None:
    documents = corpus_texts()
    assert documents == corpus_texts()
    assert len(documents) > 100
    assert 200_000 < sum(map(len, documents)) < 300_000
    assert all(document.endswith("\n\n") and "\f" not in document for document in documents)
    assert len(set(documents)) == len(documents)
    # Every kind within a few documents, so that few samples see all of them.
    assert any("def " in document for document in documents)
    assert any(ord(letter) > 0x3000 for letter in "".join(documents))


def test_the_corpus_is_used_up_before_the_manual(tokenizer: Any) -> None:
    corpus = {piece for piece in "".join(corpus_texts()).split() if len(piece) > 6}
    few = load_samples(["builtin"], tokenizer, 6, 64)
    words = tokenizer.decode(torch.cat([ids[1:] for ids in few.ids])).split()
    known = [word for word in words if len(word) > 6]
    assert sum(word in corpus for word in known) >= 0.9 * len(known)


def test_builtin_gives_full_windows_of_one_bos_each(tokenizer: Any) -> None:
    samples = load_samples(["builtin"], tokenizer, 8, 32)
    assert [len(ids) for ids in samples.ids] == [32] * 8
    assert all(ids.dtype == torch.int64 for ids in samples.ids)
    assert all(ids[0] == BOS_ID for ids in samples.ids)
    assert all(BOS_ID not in ids[1:] for ids in samples.ids)
    assert samples.warnings == []


@pytest.mark.parametrize("suffix", [".txt", ".md"])
def test_a_text_file_is_cut_into_windows_without_loss(
    tokenizer: Any, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_text(sentence(100))
    samples = load_samples([str(path)], tokenizer, 50, 26)
    ids = word_ids(tokenizer, sentence(100))
    assert as_lists(samples) == [[BOS_ID, *ids[start : start + 25]] for start in (0, 25, 50, 75)]
    assert samples.warnings == [
        f"4 of 50 samples usable: {path.name} has 4 windows of up to 26 tokens"
    ]


def test_a_text_shorter_than_a_window_is_one_short_window(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(sentence(7))
    samples = load_samples([str(path)], tokenizer, 1, 32)
    assert as_lists(samples) == [[BOS_ID, *word_ids(tokenizer, sentence(7))]]
    assert samples.warnings == []


def test_long_texts_are_cut_at_line_ends_and_lose_nothing() -> None:
    text = "".join(f"{number} {'x' * (number % 300)}\n" for number in range(2000))
    pieces = split_text(text)
    assert len(pieces) > 2
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)
    assert split_text("x" * 200_000) == ["x" * 200_000]


def test_a_huge_text_is_not_tokenized_as_a_whole(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    path.write_text((sentence(1000) + "\n") * 2000)
    samples = load_samples([str(path)], tokenizer, 4, 16)
    everything = 2000 * 1000 // 15
    assert samples.provenance["sources"][0]["windows"] < everything
    assert [len(ids) for ids in samples.ids] == [16] * 4


def test_rows_are_samples_in_the_order_of_the_file(tokenizer: Any, calibration_file: Path) -> None:
    samples = load_samples([str(calibration_file)], tokenizer, 16, 64)
    rows = [row["text"] for row in tiny.calibration_rows()]
    assert as_lists(samples) == [[BOS_ID, *word_ids(tokenizer, text)] for text in rows]
    assert samples.warnings == []


def test_a_bos_in_the_text_itself_is_not_doubled(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "<s> the cat"}, {"text": "<s> <s> a dog"}])
    samples = load_samples([str(path)], tokenizer, 2, 64)
    assert [ids.tolist().count(BOS_ID) for ids in samples.ids] == [1, 1]
    assert [len(ids) for ids in samples.ids] == [3, 3]


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    messages = [
        {"role": "user", "content": "the cat is"},
        {"role": "assistant", "content": "a dog"},
    ]
    return write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages}])


@pytest.mark.parametrize("name", ["chat_tokenizer", "bare_tokenizer"])
def test_conversations_have_exactly_one_bos(
    name: str, chat_file: Path, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(name)
    samples = load_samples([str(chat_file)], tokenizer, 1, 64)
    text = "user : the cat is </s> assistant : a dog </s>"
    assert as_lists(samples) == [[BOS_ID, *word_ids(tokenizer, text)]]
    assert samples.ids[0][-1] == EOS_ID


def test_a_given_chat_template_replaces_the_tokenizers(tokenizer: Any, chat_file: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    samples = load_samples([str(chat_file)], tokenizer, 1, 64, chat_template=template)
    assert as_lists(samples) == [[BOS_ID, *word_ids(tokenizer, "the cat is a dog")]]


def test_conversations_without_any_chat_template_are_refused(
    tokenizer: Any, chat_file: Path
) -> None:
    with pytest.raises(DataError, match=r"chat\.jsonl has rows with 'messages'.*--chat-template"):
        load_samples([str(chat_file)], tokenizer, 1, 64)


def test_conversations_the_template_refuses_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'tool' %}"
        "{{ raise_exception('no tools') }}{% endif %}{{ message['content'] }} {% endfor %}"
    )
    rows = [
        {"messages": [{"role": role, "content": "a red cat"}]} for role in ("user", "tool", "user")
    ]
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    samples = load_samples([str(path)], tokenizer, 3, 64, chat_template=template)
    assert len(samples.ids) == 2
    assert "2 of 3 samples usable (1 refused by the chat template)" in samples.warnings[0]


def test_text_wins_over_messages(tokenizer: Any, tmp_path: Path) -> None:
    row = {"text": "a cat", "messages": [{"role": "user", "content": "a dog"}]}
    path = write_jsonl(tmp_path / "both.jsonl", [row])
    assert as_lists(load_samples([str(path)], tokenizer, 1, 64)) == [
        [BOS_ID, *word_ids(tokenizer, "a cat")]
    ]


def test_lines_are_separated_by_newlines_only(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [{"text": "the\u2028cat"}, {"text": "a\u0085dog"}]
    text = "\ufeff" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    path.write_text(text, encoding="utf-8")
    assert len(load_samples([str(path)], tokenizer, 2, 64).ids) == 2


def test_a_dataset_is_read_through_datasets(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder stands in for a Hub name: the same code, and no network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"text": "a red cat"}, {"text": None}])
    write_jsonl(folder / "test.jsonl", [{"text": "the dog"}])
    samples = load_samples([f"hf:{folder}"], tokenizer, 2, 64)
    assert as_lists(samples) == [[BOS_ID, *word_ids(tokenizer, "a red cat")]]
    assert "1 of 2 samples usable (1 empty)" in samples.warnings[0]
    samples = load_samples([f"hf:{folder}:test"], tokenizer, 1, 64)
    assert as_lists(samples) == [[BOS_ID, *word_ids(tokenizer, "the dog")]]
    with pytest.raises(DataError, match=r"cannot load hf:.*nosuch"):
        load_samples([f"hf:{folder}::nosuch"], tokenizer, 1, 64)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:org/name", ("org/name", None, "train")),
        ("hf:name:test", ("name", None, "test")),
        ("hf:name:train[:1%]", ("name", None, "train[:1%]")),
        ("hf:name:wiki-raw", ("name", "wiki-raw", "train")),
        ("hf:name:en:train[5:9]", ("name", "en", "train[5:9]")),
        ("hf:name::odd_split", ("name", None, "odd_split")),
    ],
)
def test_hub_sources_have_a_name_a_config_and_a_split(
    source: str, expected: tuple[str, str | None, str]
) -> None:
    assert parse_hub_source(source) == expected


def test_an_unreachable_dataset_is_one_line_and_no_waiting(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    calls: list[bool] = []

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("Name or service not known")

    def load(*args: Any, **kwargs: Any) -> None:
        calls.append(constants.HF_HUB_OFFLINE)
        raise ConnectionError("Couldn't reach 'org/name' on the Hub.\nlong\ndetails")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(DataError) as caught:
        load_samples(["hf:org/name:test"], tokenizer, 1, 64)
    message = str(caught.value)
    assert "\n" not in message
    assert "cannot load hf:org/name:test: Couldn't reach 'org/name' on the Hub;" in message
    assert "hf download --repo-type dataset org/name" in message
    assert calls == [True]  # the cache alone was asked
    assert constants.HF_HUB_OFFLINE is False


def test_self_asks_the_model(tokenizer: Any) -> None:
    asked: list[tuple[int, int, int]] = []

    def generate(count: int, seq_len: int, seed: int) -> list[Tensor]:
        asked.append((count, seq_len, seed))
        return [torch.arange(10), torch.arange(40), torch.arange(1)]

    samples = load_samples(["self"], tokenizer, 3, 32, seed=5, self_generate=generate)
    assert asked == [(3, 32, 5)]
    assert [len(ids) for ids in samples.ids] == [10, 32]
    assert "2 of 3 samples usable (1 shorter than 2 tokens)" in samples.warnings[0]
    with pytest.raises(DataError, match="'self' needs a model"):
        load_samples(["self"], tokenizer, 3, 32)


def test_several_sources_share_the_samples(
    tokenizer: Any, calibration_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(sentence(200))
    samples = load_samples([str(calibration_file), str(path), "builtin"], tokenizer, 8, 16)
    assert [record["samples"] for record in samples.provenance["sources"]] == [3, 3, 2]
    assert len(samples.ids) == 8
    with pytest.raises(DataError, match="--samples is 2 for 3 data sources"):
        load_samples(["builtin", "self", str(path)], tokenizer, 2, 16)


# Selection.


def test_same_seed_same_samples_whatever_torch_has_drawn(tokenizer: Any) -> None:
    first = load_samples(["builtin"], tokenizer, 8, 32, seed=1)
    state = torch.get_rng_state()
    torch.rand(7)
    second = load_samples(["builtin"], tokenizer, 8, 32, seed=1)
    other = load_samples(["builtin"], tokenizer, 8, 32, seed=2)
    assert as_lists(first) == as_lists(second)
    assert first.provenance == second.provenance
    assert as_lists(first) != as_lists(other)
    assert first.provenance["sha256"] != other.provenance["sha256"]
    torch.set_rng_state(state)
    load_samples(["builtin"], tokenizer, 8, 32, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_are_chosen_by_seed_and_kept_in_order(tokenizer: Any, calibration_file: Path) -> None:
    rows = [word_ids(tokenizer, row["text"]) for row in tiny.calibration_rows()]
    choices = set()
    for seed in range(5):
        samples = load_samples([str(calibration_file)], tokenizer, 6, 64, seed=seed)
        numbers = tuple(rows.index(ids[1:]) for ids in as_lists(samples))
        assert numbers == tuple(sorted(numbers))
        assert len(set(numbers)) == 6
        choices.add(numbers)
    assert len(choices) > 1


def test_the_order_of_rows_does_not_matter_if_all_are_used(tokenizer: Any, tmp_path: Path) -> None:
    rows = tiny.calibration_rows()
    forward = write_jsonl(tmp_path / "forward.jsonl", rows)
    backward = write_jsonl(tmp_path / "backward.jsonl", rows[::-1])
    one, other = (load_samples([str(p)], tokenizer, 16, 64) for p in (forward, backward))
    assert sorted(as_lists(one)) == sorted(as_lists(other))


def test_unusable_rows_are_replaced_by_others(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": "" if number % 2 else sentence(5, number)} for number in range(400)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    samples = load_samples([str(path)], tokenizer, 150, 64)
    assert len(samples.ids) == 150
    [warning] = samples.warnings
    assert warning.startswith(f"skipped rows of {path.name}: ")
    assert warning.endswith(" empty")


def test_provenance_is_json_with_all_counts(tokenizer: Any, calibration_file: Path) -> None:
    samples = load_samples([str(calibration_file)], tokenizer, 16, 40, seed=3)
    record = json.loads(json.dumps(samples.provenance))
    assert record["samples"] == 16
    assert record["tokens"] == sum(len(ids) for ids in samples.ids)
    assert (record["seq_len"], record["seed"]) == (40, 3)
    assert record["warnings"] == samples.warnings
    [source] = record["sources"]
    assert source["source"] == calibration_file.name
    assert (source["rows"], source["samples"], source["longest"]) == (16, 16, 61)


# Too long, too short, too few.


def test_long_rows_are_cut_with_one_warning(tokenizer: Any, tmp_path: Path) -> None:
    rows = [*tiny.calibration_rows(), {"text": sentence(500)}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    samples = load_samples([str(path)], tokenizer, 17, 50)
    lengths = [len(tiny_row["text"].split()) + 1 for tiny_row in rows]
    cut = sum(length > 50 for length in lengths)
    assert [len(ids) for ids in samples.ids] == [min(length, 50) for length in lengths]
    assert samples.warnings == [
        f"{cut} of 17 samples of {path.name} were cut to 50 tokens (longest: 501)"
    ]


def test_too_few_usable_rows_are_said_with_counts(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": sentence(9, n) if n < 3 else ["", "  \n", None][n % 3]} for n in range(16)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    samples = load_samples([str(path)], tokenizer, 128, 64)
    assert len(samples.ids) == 3
    assert samples.warnings == [
        f"3 of 128 samples usable (13 empty): {path.name} has 16 rows of up to 64 tokens"
    ]
    assert samples.provenance["sources"][0]["skipped"] == {"empty": 13}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"content": "a cat", "id": 1}] * 4, ["4 without", "'content', 'id'", "'text' or"]),
        ([{"text": "cat"}] * 5, ["5 shorter than 2 tokens of 5", "at least 2 tokens"]),
        ([{"text": ""}] * 3, ["3 empty of 3"]),
        ([{"text": 7}] * 2, ["2 with a 'text' that is not a string"]),
        ([{}], ["fields found: none"]),
    ],
    ids=["other field", "one token", "empty", "number", "no field"],
)
def test_no_usable_row_names_what_was_found_and_what_is_accepted(
    tokenizer: Any, tmp_path: Path, rows: list[dict[str, Any]], words: list[str]
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load_samples([str(path)], tokenizer, 4, 64)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt", "x.md"])
@pytest.mark.parametrize("content", ["", " \n\n"], ids=["0 bytes", "blank"])
def test_an_empty_file_has_no_rows(tokenizer: Any, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name} has no rows"):
        load_samples([str(tmp_path / name)], tokenizer, 4, 64)


def test_a_text_of_one_token_states_the_minimum(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("cat")
    with pytest.raises(DataError, match=r"1 tokens; the minimum of a sample is 2"):
        load_samples([str(tmp_path / "x.txt")], tokenizer, 4, 64)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', ["not valid JSON"]),
        ("[1, 2]", ["expected a JSON object", "list"]),
        ("a cat", ["not valid JSON"]),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(
    tokenizer: Any, tmp_path: Path, line: str, words: list[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a cat"}\n\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        load_samples([str(path)], tokenizer, 4, 64)
    for word in [f"{path}:3:", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("bultin", ["'bultin'", "did you mean 'builtin'", "FILE.jsonl"]),
        ("data.csv", ["unknown data source 'data.csv'", "accepted"]),
        ("nowhere.jsonl", ["nowhere.jsonl does not exist"]),
        ("nowhere.txt", ["nowhere.txt does not exist"]),
        ("hf:", ["names no dataset"]),
    ],
)
def test_an_unknown_source_is_quoted(tokenizer: Any, source: str, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        load_samples([source], tokenizer, 4, 64)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_text_is_said(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match=r"x\.txt is not UTF-8"):
        load_samples([str(tmp_path / "x.txt")], tokenizer, 4, 64)
    with pytest.raises(DataError, match=r"cannot read data file .*folder\.txt: Is a directory"):
        load_samples([str(tmp_path / "folder.txt")], tokenizer, 4, 64)


def test_no_source_at_all_says_why_data_is_needed(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"data is required.*input_activations or kv_cache"):
        load_samples([], tokenizer, 4, 64)


@pytest.mark.parametrize(("samples", "seq_len"), [(0, 64), (4, 2), (4, 0), (-1, 64)])
def test_impossible_sizes_are_refused(tokenizer: Any, samples: int, seq_len: int) -> None:
    with pytest.raises(DataError, match=str(samples if samples < 1 else seq_len)):
        load_samples(["builtin"], tokenizer, samples, seq_len)


@pytest.mark.parametrize(
    ("requested", "explicit", "model", "tokenizer_limit", "expected"),
    [
        (2048, False, 8192, int(1e30), 2048),
        (2048, False, 64, int(1e30), 64),
        (2048, False, 8192, 512, 512),
        (2048, False, None, None, 2048),
        (64, True, 64, 32, 64),
        (4096, True, None, int(1e30), 4096),
    ],
)
def test_the_length_is_bounded_by_the_model(
    requested: int, explicit: bool, model: int | None, tokenizer_limit: int, expected: int
) -> None:
    length, note = effective_seq_len(requested, explicit, model, tokenizer_limit)
    assert length == expected
    assert (note is None) == (length == requested)
    if note:
        assert str(expected) in note
        assert str(requested) in note


def test_an_explicit_length_beyond_the_model_names_both_numbers() -> None:
    with pytest.raises(DataError, match=r"128.*limit of 64"):
        effective_seq_len(128, True, 64, None)


# Tokenizers.


def test_the_prefix_is_what_the_tokenizer_adds(
    tokenizer: Any, chat_tokenizer: Any, bare_tokenizer: Any
) -> None:
    assert special_prefix(tokenizer) == [BOS_ID]
    assert special_prefix(chat_tokenizer) == [BOS_ID]
    assert special_prefix(bare_tokenizer) == []


def test_without_a_bos_windows_are_text_only(bare_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(sentence(40))
    samples = load_samples([str(path)], bare_tokenizer, 4, 10)
    ids = word_ids(bare_tokenizer, sentence(40))
    assert as_lists(samples) == [ids[start : start + 10] for start in (0, 10, 20, 30)]


def test_pieces_are_small_enough_to_tokenize_in_parallel() -> None:
    assert max(map(len, split_text("a line\n" * 50_000))) < 2 * texts.PIECE_CHARS
