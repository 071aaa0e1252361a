"""Damaged and hostile folders are findings or a CheckpointError, never a crash or a huge read."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.lint import lint
from quantkit.lint.headers import read_header
from tests.lint.folders import BASES, Draft, dynamic

SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dynamic().save(tmp_path_factory.mktemp("hostile") / "good")


def opens(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def write_shard(path: Path, header: Any, data: int = 0, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + bytes(data))
    return path


def entry(dtype: Any = "F32", shape: Any = (1,), span: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


@pytest.mark.parametrize(
    ("header", "data", "length", "problem"),
    [
        ({"a": entry()}, 4, None, ""),
        ({"a": entry(shape=(0,), span=(0, 0))}, 0, None, ""),
        ({"a": entry(shape=())}, 4, None, ""),
        ({"a": entry("F64", span=(0, 8)), "b": entry(span=(8, 12))}, 12, None, ""),
        ({"a": entry()}, 3, None, "truncated"),
        ({"a": entry()}, 5, None, "belong to no tensor"),
        ({"a": entry()}, 4, 2**63, "truncated"),
        ({"a": entry()}, 4, 10_000, "truncated"),
        ({"a": entry("F8")}, 4, None, "dtype 'F8'"),
        ({"a": entry(["F32"])}, 4, None, "dtype"),
        ({"a": entry(shape=(2,))}, 4, None, "not the 8 of F32"),
        ({"a": entry(shape=(-1,))}, 4, None, "shape"),
        ({"a": entry(shape=(1e30,))}, 4, None, "shape"),
        ({"a": entry(shape=(2**62, 2**62))}, 4, None, "not the"),
        ({"a": entry(shape="x")}, 4, None, "shape"),
        ({"a": entry(span=(4, 0))}, 4, None, "bytes"),
        ({"a": entry(span=(0,))}, 4, None, "offsets"),
        ({"a": entry(span={"0": 4})}, 4, None, "offsets"),
        ({"a": entry(), "b": entry()}, 4, None, "starts at byte"),
        ({"a": entry(span=(4, 8))}, 8, None, "starts at byte"),
        ({"a": 7}, 0, None, "dtype None"),
        ([1], 0, None, "no JSON object"),
        (b"{", 0, None, "no JSON"),
        (b"\xff\xfe", 0, None, "no JSON"),
        (b"[" * 100_000, 0, None, "no JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, None, "no JSON"),
        (b'{"a":{},"a":{}}', 0, None, "twice"),
    ],
)
def test_a_header_is_judged_as_the_library_judges_it(
    header: Any, data: int, length: int | None, problem: str, tmp_path: Path
) -> None:
    path = write_shard(tmp_path / SHARD, header, data, length)
    assert problem in read_header(path).problem
    assert bool(problem) == bool(read_header(path).problem)
    assert opens(path) == (not problem)


def test_an_absurd_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / SHARD
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 5_000_000_000))
        file.truncate(6_000_000_000)  # sparse
    tracemalloc.start()
    assert "claims a header of 5000000000 bytes" in read_header(path).problem
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@given(st.integers(0, 2**32 - 1))
def test_flipped_bits_in_a_header_are_findings(folder: Path, seed: int) -> None:
    source = (folder / SHARD).read_bytes()
    end = 8 + int.from_bytes(source[:8], "little")
    chance, damaged = random.Random(seed), bytearray(source)
    for _ in range(chance.choice([1, 1, 3])):
        damaged[chance.randrange(end)] ^= 1 << chance.randrange(8)
    target = folder.parent / "flipped"
    _copy(folder, target, bytes(damaged))
    report = lint(target)
    if not opens(target / SHARD):
        assert "shard-damaged" in {finding.rule for finding in report.errors}


def _copy(source: Path, target: Path, shard: bytes) -> None:
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        data = shard if file.name == SHARD else file.read_bytes()
        (target / file.name).write_bytes(data)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "re:(", "re:.*", "Linear", "float", "\ud800", "a" * 500, "../x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.sampled_from(sorted(BASES)), st.integers(0, 2**32 - 1), st.lists(JUNK, min_size=3))
def test_any_json_is_findings_or_an_error_that_says_so(
    tmp_path_factory: pytest.TempPathFactory, base: str, seed: int, junk: list[Any]
) -> None:
    draft = BASES[base][0]()
    draft.split()
    chance = random.Random(seed)
    documents: list[Any] = [draft.config, draft.index]
    for value in junk:
        _replace_somewhere(chance.choice(documents), value, chance)
    target = tmp_path_factory.getbasetemp() / "junk"
    _save_again(draft, target)
    with contextlib.suppress(CheckpointError):
        report = lint(target, tp=chance.choice([1, 2, 3]))
        json.dumps(report.to_json(), allow_nan=False)


def _replace_somewhere(document: Any, value: Any, chance: random.Random) -> None:
    """Put a value in place of one that is somewhere inside a document."""
    while True:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not keys:
            return
        key = chance.choice(keys)
        inner = document[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
            document = inner
        else:
            document[key] = value
            return


def _save_again(draft: Draft, target: Path) -> None:
    """Save a draft in place of what is there."""
    for old in target.glob("*") if target.is_dir() else ():
        old.unlink()
    draft.save(target)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", "[" * 100_000),
        ("config.json", '{"a": ' + "9" * 5000 + "}"),
        ("config.json", "\0"),
    ],
)
def test_a_config_that_is_none_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    dynamic().save(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        lint(tmp_path)


def test_what_is_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        lint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        lint(tmp_path)


@pytest.mark.parametrize(
    ("engines", "gpus", "message"),
    [
        (["vlm"], 1, r"engine 'vlm' is not known \(did you mean 'vllm'\?\)"),
        ([], 1, "no engine to check for"),
        (["vllm"], 0, "--tp must be at least 1, got 0"),
    ],
)
def test_an_unknown_engine_is_quoted(
    engines: list[str], gpus: int, message: str, folder: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        lint(folder, engines, gpus)


def test_a_folder_in_place_of_a_file_is_a_finding(tmp_path: Path) -> None:
    dynamic().save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").mkdir()
    assert [finding.rule for finding in lint(tmp_path).findings] == ["generation-config"]
