"""Seeded damage to files that are no safetensors: pickles, GGUF files, tokenizers.

Each function changes a folder in place and says in words what it did, as those of `mutations` do.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Damage = Callable[[Path, random.Random], str]
BIN, GGUF, TOKENIZER = "pytorch_model.bin", "model.gguf", "tokenizer.json"
HUGE = 2**62


def damage_bin(folder: Path, chance: random.Random) -> str:
    """Damage the pickled weights."""
    return chance.choice(BIN_KINDS)(folder, chance)


def damage_gguf(folder: Path, chance: random.Random) -> str:
    """Damage the GGUF file."""
    return chance.choice(GGUF_KINDS)(folder, chance)


def damage_tokenizer(folder: Path, chance: random.Random) -> str:
    """Put junk into the tokenizer."""
    return chance.choice(TOKENIZER_KINDS)(folder, chance)


def _flip(path: Path, chance: random.Random, end: int) -> str:
    data = bytearray(path.read_bytes())
    places = [chance.randrange(min(end, len(data))) for _ in range(chance.choice([1, 1, 3]))]
    for place in places:
        data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"bits flipped in bytes {places} of {path.name}"


def _cut(path: Path, chance: random.Random) -> str:
    data = path.read_bytes()
    size = chance.choice([0, chance.randrange(len(data)), len(data) - 1])
    path.write_bytes(data[:size])
    return f"{path.name} cut to {size} of {len(data)} bytes"


# Pickles.


def _flip_archive(folder: Path, chance: random.Random) -> str:
    return _flip(folder / BIN, chance, 10**9)


def _flip_directory(folder: Path, chance: random.Random) -> str:
    """Flip bits where the archive says what it holds."""
    path = folder / BIN
    data = bytearray(path.read_bytes())
    start = data.find(b"PK\x01\x02")
    place = chance.randrange(max(start, 0), len(data))
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"a bit flipped in byte {place} of the archive's directory"


def _change_pickle(folder: Path, chance: random.Random) -> str:
    """Change bytes of the pickle itself, its checksum being right again."""
    path = folder / BIN
    parts = {"data.pkl": path.read_bytes()}
    if zipped := zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    code = bytearray(parts[name])
    places = [chance.randrange(min(len(code), 5000)) for _ in range(chance.choice([1, 2, 8]))]
    for place in places:
        code[place] = chance.choice(OPCODES) if chance.random() < 0.5 else chance.randrange(256)
    parts[name] = bytes(code)
    if not zipped:
        path.write_bytes(code)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for part, data in parts.items():
                archive.writestr(part, data)
    return f"bytes {places} of the pickle changed"


OPCODES = [
    code[0]
    for code in (
        pickle.REDUCE, pickle.BUILD, pickle.GLOBAL, pickle.BINGET, pickle.TUPLE, pickle.SETITEMS,
        pickle.BINPERSID, pickle.NEWOBJ, pickle.STOP, pickle.POP, pickle.MARK, pickle.NONE,
        pickle.BININT, pickle.EMPTY_DICT, pickle.LONG4,
    )
]  # fmt: skip


def _other_value(folder: Path, chance: random.Random) -> str:
    """Save something that is no table of tensors."""
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    one = torch.ones(2, 2)
    values: dict[str, Any] = {
        "none": None, "a list": [one], "numbers for names": {1: one, 2: one}, "empty": {},
        "tables in tables": {"model": {"a": one}}, "deep": {"a": deep}, "a tensor": one,
        "sparse": {"lm_head.weight": one.to_sparse()}, "integers": {"lm_head.weight": one.int()},
        "complex": {"lm_head.weight": one.to(torch.complex64)}, "strange names": {"\ud800": one},
        "meta": {"lm_head.weight": torch.empty(2, 2, device="meta")},
        "expanded": {"lm_head.weight": torch.ones(1).expand(2**20, 2**10)},
        "quantized": {"lm_head.weight": torch.quantize_per_tensor(one, 1.0, 0, torch.qint8)},
    }  # fmt: skip
    kind = chance.choice(sorted(values))
    torch.save(values[kind], folder / BIN, _use_new_zipfile_serialization=chance.random() < 0.7)
    return f"{BIN} holds {kind}"


def _bin_index(folder: Path, chance: random.Random) -> str:
    targets: list[Any] = ["../x.bin", "/etc/passwd", "..", "", "config.json", None, 7, [], {}]
    target = chance.choice(targets)
    table: Any = {"lm_head.weight": BIN, "model.norm.weight": target}
    table = chance.choice([table, table, table, [], "x", 7, None, {"lm_head.weight": 0}])
    path = folder / f"{BIN}.index.json"
    path.write_text(json.dumps({"weight_map": table}))
    return f"an index of pickles with {target!r}: {str(table)[:60]}"


def _cut_bin(folder: Path, chance: random.Random) -> str:
    return _cut(folder / BIN, chance)


BIN_KINDS: tuple[Damage, ...] = (
    _flip_archive, _flip_directory, _change_pickle, _change_pickle, _other_value, _bin_index,
    _cut_bin,
)  # fmt: skip


# GGUF.


def _flip_gguf(folder: Path, chance: random.Random) -> str:
    """Flip bits before the vocabulary, in it, or among the tensors' places."""
    path = folder / GGUF
    end = chance.choice([200, path.stat().st_size // 20, path.stat().st_size])
    return _flip(path, chance, end)


def _cut_gguf(folder: Path, chance: random.Random) -> str:
    return _cut(folder / GGUF, chance)


def _gguf_number(folder: Path, chance: random.Random) -> str:
    """Overwrite a number of the header by one that is absurd."""
    path = folder / GGUF
    data = bytearray(path.read_bytes())
    code, value = chance.choice(
        [
            ("Q", HUGE),
            ("Q", 2**64 - 1),
            ("Q", 0),
            ("I", 0),
            ("I", 2**32 - 1),
            ("I", 9),
            ("Q", 2**32),
        ]
    )
    place = chance.choice([4, 8, 16, chance.randrange(24, min(1500, len(data) - 8))])
    struct.pack_into(f"<{code}", data, place, value)
    path.write_bytes(data)
    return f"{value} at byte {place} of {GGUF}"


def _gguf_key(folder: Path, chance: random.Random) -> str:
    """Give a key of the metadata another value, or another name."""
    path = folder / GGUF
    data = bytearray(path.read_bytes())
    keys = [
        b"general.architecture", b"llama.context_length", b"llama.embedding_length",
        b"llama.block_count", b"llama.feed_forward_length", b"llama.attention.head_count",
        b"llama.attention.head_count_kv", b"tokenizer.ggml.tokens", b"llama.rope.freq_base",
        b"tokenizer.ggml.bos_token_id", b"llama.attention.layer_norm_rms_epsilon",
    ]  # fmt: skip
    key = chance.choice(keys)
    start = data.find(key)
    if chance.random() < 0.3:
        data[start] ^= 1
        path.write_bytes(data)
        return f"{key.decode()} has another name"
    kind = start + len(key)
    if chance.random() < 0.5:
        data[kind] = chance.randrange(14)
    value = chance.choice([0, 1, 3, 2**20, 2**31, 2**32 - 1])
    struct.pack_into("<I", data, kind + 4, value)
    path.write_bytes(data)
    return f"{key.decode()} of type {data[kind]} and value {value}"


def _gguf_tensor(folder: Path, chance: random.Random) -> str:
    """Change the entry of a tensor: its name, rank, sizes, type or offset."""
    path = folder / GGUF
    data = bytearray(path.read_bytes())
    name = chance.choice([b"blk.0.attn_q.weight", b"token_embd.weight", b"blk.1.ffn_down.weight"])
    start = data.find(name) + len(name)
    place = start + chance.choice([-1, 0, 4, 12, 20, 24])
    value = chance.choice([0, 1, 2, 3, 8, 14, 30, 99, 2**31, 2**32 - 1])
    struct.pack_into("<I", data, place, value)
    path.write_bytes(data)
    return f"{value} at {place - start} of the entry of {name.decode()}"


GGUF_KINDS: tuple[Damage, ...] = (
    _flip_gguf, _cut_gguf, _gguf_number, _gguf_number, _gguf_key, _gguf_key, _gguf_tensor,
)  # fmt: skip


# Tokenizers.


def _cut_tokenizer(folder: Path, chance: random.Random) -> str:
    return _cut(folder / TOKENIZER, chance)


def _flip_tokenizer(folder: Path, chance: random.Random) -> str:
    return _flip(folder / TOKENIZER, chance, 10**9)


def _token(folder: Path, chance: random.Random) -> str:
    """Give tokens other numbers: two the same, one far away, one below zero."""
    path = folder / TOKENIZER
    document = json.loads(path.read_text())
    words = document["model"]["vocab"]
    word = chance.choice(sorted(words))
    number = words[word] = chance.choice([0, 5, 127, 128, 10**6, 2**31, 2**32, -1, 1.5, "x", None])
    path.write_text(json.dumps(document))
    return f"token {word!r} has number {number!r}"


def _special_token(folder: Path, chance: random.Random) -> str:
    path = folder / "tokenizer_config.json"
    document = json.loads(path.read_text())
    key = chance.choice(
        ["bos_token", "eos_token", "pad_token", "unk_token", "tokenizer_class", "chat_template",
         "model_max_length", "added_tokens_decoder", "backend", "extra_special_tokens"]
    )  # fmt: skip
    value = chance.choice(
        [None, 7, "", "x", [], {}, {"content": 7}, True, -1, 1e30, "../x", ["a"], {"7": "x"},
         "{% for x in range(10**9) %}x{% endfor %}", "{{ 1/0 }}", "{{ x.__class__ }}", "{% if"]
    )  # fmt: skip
    document[key] = value
    path.write_text(json.dumps(document))
    return f"{key} is {str(value)[:60]!r}"


def _part(folder: Path, chance: random.Random) -> str:
    """Give the tokenizer another part, or none, or one that is hard on regular expressions."""
    path = folder / TOKENIZER
    document = json.loads(path.read_text())
    key = chance.choice(["model", "pre_tokenizer", "post_processor", "normalizer", "decoder",
                         "added_tokens", "truncation", "padding", "version"])  # fmt: skip
    value: Any = chance.choice(
        [None, {}, [], "x", 7, {"type": "BPE"}, {"type": "WordLevel", "vocab": {}},
         {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]},
         {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]},
         {"type": "Unigram", "vocab": [["a", "x"]]}, {"type": "Unigram", "vocab": [["a", 0.0]],
          "unk_id": 99}, {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
          "invert": False}, {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
          "invert": False}, {"type": "TemplateProcessing", "single": [], "pair": [],
          "special_tokens": {}}, [{"id": 10**9, "content": "zz", "single_word": False,
          "lstrip": False, "rstrip": False, "normalized": False, "special": True}]]
    )  # fmt: skip
    document[key] = value
    path.write_text(json.dumps(document))
    return f"{key} is {str(value)[:80]!r}"


TOKENIZER_KINDS: tuple[Damage, ...] = (
    _cut_tokenizer, _flip_tokenizer, _token, _special_token, _special_token, _part, _part,
)  # fmt: skip
