"""Seeded damage to a checkpoint folder: the same seed does the same to the same folder."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.robustness.foreign_files import (
    BIN,
    GGUF,
    TOKENIZER,
    damage_bin,
    damage_gguf,
    damage_tokenizer,
)

SHARD = "model.safetensors"
INDEX = "model.safetensors.index.json"
HUGE = 2**62
JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "../x", "/etc/passwd", "\ud800", "\0", [], [[]], [0], [None], {},
    {"a": {}}, "a" * 5000,
)  # fmt: skip
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
)  # fmt: skip
ABSURD = (10**7, 10**9, 2**40, 2**62, 10**30, 0, -1, 1, 3, 1e9, "64", None, [64])


def damage(folder: Path, seed: int) -> str:
    """Damage a folder in place; return what was done, in words."""
    chance = random.Random(seed)
    if (folder / GGUF).exists():
        return damage_gguf(folder, chance)
    if (folder / BIN).exists():
        return chance.choice([damage_bin, damage_bin, damage_bin, junk_value])(folder, chance)
    return chance.choice(KINDS)(folder, chance)


def flip_bits(folder: Path, chance: random.Random) -> str:
    """Flip one to three bits of the shard's header, its length included."""
    path = folder / SHARD
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    places = [chance.randrange(end) for _ in range(chance.choice([1, 1, 3]))]
    for place in places:
        data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"bits flipped in bytes {places} of the header"


def flip_data(folder: Path, chance: random.Random) -> str:
    """Flip one bit among the numbers."""
    path = folder / SHARD
    data = bytearray(path.read_bytes())
    place = chance.randrange(8 + int.from_bytes(data[:8], "little"), len(data))
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"a bit flipped in byte {place}"


def truncate(folder: Path, chance: random.Random) -> str:
    """Cut any file off somewhere."""
    path = chance.choice(_files(folder))
    data = path.read_bytes()
    size = chance.choice([0, chance.randrange(len(data)), len(data) - 1])
    path.write_bytes(data[:size])
    return f"{path.name} cut to {size} of {len(data)} bytes"


def header_length(folder: Path, chance: random.Random) -> str:
    """Claim another length of the header."""
    path = folder / SHARD
    data = path.read_bytes()
    length = chance.choice([0, 1, 2**31, 2**32, HUGE, 2**63, 2**64 - 1, len(data), len(data) - 8])
    path.write_bytes(struct.pack("<Q", length) + data[8:])
    return f"a header said to have {length} bytes"


def header_field(folder: Path, chance: random.Random) -> str:
    """Give tensors a wrong shape, dtype or place; drop, repeat or rename them."""
    header, data = _read_shard(folder / SHARD)
    name = chance.choice(sorted(set(header) - {"__metadata__"}))
    entry = header[name]
    change = chance.choice(list(ENTRY_CHANGES))
    value = ENTRY_CHANGES[change](header, name, chance)
    if change in entry:
        entry[change] = value
    _write_shard(folder / SHARD, header, data)
    return f"{change} of {name}: {str(value)[:80]!r}"


def _shape(header: dict[str, Any], name: str, chance: random.Random) -> Any:
    shape = header[name]["shape"]
    wrong = [shape[::-1], [*shape, 1], shape[1:], [-1], [HUGE, HUGE], [0], [1e30], "x", None]
    return chance.choice(wrong)


def _dtype(header: dict[str, Any], name: str, chance: random.Random) -> Any:
    return chance.choice(["F64", "F16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "BOOL", "C64", 7])


def _span(header: dict[str, Any], name: str, chance: random.Random) -> Any:
    start, end = header[name]["data_offsets"]
    return chance.choice(
        [[0, end], [end, start], [start, HUGE], [-4, end], [start + 1, end + 1], [start], None,
         [HUGE, HUGE + end - start], [start, 2**64]]
    )  # fmt: skip


def _drop(header: dict[str, Any], name: str, chance: random.Random) -> Any:
    """Name a tensor otherwise, so that its bytes stay."""
    other = chance.choice(["x", name + ".weight", "../x", name.replace("0", "7"), "\ud800", "\0"])
    header[other] = header.pop(name)
    return other


def _same_size(header: dict[str, Any], name: str, chance: random.Random) -> Any:
    """Keep the bytes and change both dtype and shape, which no check of sizes can see."""
    entry = header[name]
    start, end = entry["data_offsets"]
    entry["dtype"] = chance.choice(["U8", "F8_E4M3", "F8_E5M2", "I8", "BOOL", "F8_E8M0"])
    entry["shape"] = chance.choice([[end - start], [1, end - start], [end - start, 1]])
    return entry


def _swap(header: dict[str, Any], name: str, chance: random.Random) -> Any:
    """Let two tensors change places."""
    other = chance.choice(sorted(set(header) - {"__metadata__"}))
    header[name], header[other] = header[other], header[name]
    return other


ENTRY_CHANGES: dict[str, Callable[[dict[str, Any], str, random.Random], Any]] = {
    "shape": _shape,
    "dtype": _dtype,
    "data_offsets": _span,
    "name": _drop,
    "same size": _same_size,
    "place": _swap,
}


def absurd_size(folder: Path, chance: random.Random) -> str:
    """Set a size in config.json to what no model has."""
    key, value = chance.choice(SIZES), chance.choice(ABSURD)
    config = json.loads((folder / "config.json").read_text())
    config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return f"{key}={value!r}"


def junk_value(folder: Path, chance: random.Random) -> str:
    """Put junk in place of a value anywhere in a JSON file, or leave the value out."""
    path = chance.choice([path for path in _files(folder) if path.suffix == ".json"])
    document = json.loads(path.read_text())
    holder, key = _somewhere(document, chance)
    value: Any = "left out"
    if chance.random() < 0.2:
        del holder[key]
    else:
        value = holder[key] = chance.choice(JUNK)
    path.write_text(json.dumps(document))
    return f"{path.name}: {key}={str(value)[:80]!r}"


def hostile_text(folder: Path, chance: random.Random) -> str:
    """Replace a JSON file by text that is hard on parsers."""
    path = chance.choice([path for path in _files(folder) if path.suffix == ".json"])
    good = path.read_text().strip()
    texts = {
        "deep lists": "[" * 100_000,
        "deep objects": '{"a":' * 100_000,
        "a long number": good[:-1] + ',"hidden_size":' + "9" * 5000 + "}",
        "a key twice": good[:-1] + ',"hidden_size":7,"hidden_size":[]}',
        "deep value": good[:-1] + ',"layer_types":' + "[" * 900 + "]" * 900 + "}",
        "no text": "",
        "null": "null",
        "a list": "[]",
        "an empty object": "{}",
        "a byte order mark": "\ufeff" + good,
    }
    kind = chance.choice(list(texts))
    path.write_text(texts[kind], encoding="utf-8")
    return f"{path.name}: {kind}"


def index_entry(folder: Path, chance: random.Random) -> str:
    """Add an index that leads elsewhere."""
    names = sorted(set(_read_shard(folder / SHARD)[0]) - {"__metadata__"})
    targets: list[Any] = [
        "../x.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "config.json",
        "other",
        None,
        7,
        [],
    ]
    target = chance.choice(targets)
    weight_map = dict.fromkeys(names, SHARD) | {chance.choice([*names, "x"]): target}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return f"the index maps a tensor to {target!r}"


def folder_for_file(folder: Path, chance: random.Random) -> str:
    """Put a folder where a file was."""
    path = chance.choice(_files(folder))
    path.unlink()
    path.mkdir()
    return f"{path.name} is a folder"


def no_file(folder: Path, chance: random.Random) -> str:
    """Remove a file."""
    path = chance.choice(_files(folder))
    path.unlink()
    return f"no {path.name}"


def tokenizer(folder: Path, chance: random.Random) -> str:
    """Damage the tokenizer, where there is one."""
    damage = damage_tokenizer if (folder / TOKENIZER).exists() else junk_value
    return damage(folder, chance)


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (
    flip_bits, flip_bits, flip_data, truncate, header_length, header_field, header_field,
    absurd_size, absurd_size, junk_value, junk_value, junk_value, hostile_text, index_entry,
    folder_for_file, no_file, tokenizer, tokenizer, tokenizer,
)  # fmt: skip


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def _write_shard(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _somewhere(document: Any, chance: random.Random) -> tuple[Any, Any]:
    """Return a dict or list within a document, and a key of it."""
    while True:
        key = chance.choice(list(document) if isinstance(document, dict) else range(len(document)))
        inner = document[key]
        if not (isinstance(inner, dict | list) and inner and chance.random() < 0.7):
            return document, key
        document = inner
