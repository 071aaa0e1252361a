"""Fixtures of the evaluation tests.

`quantized`  folder with `source` (a tiny float32 Llama of 256 positions) and `fp8`, its checkpoint
             with dynamic inputs, FP8 KV scales and a tokenizer that adds BOS; read only
`text_file`  101 words
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests import checkpoints, tiny

CONFIG = {**tiny.LLAMA, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    checkpoints.build(folder, LlamaConfig(**CONFIG), kv="fp8")
    tiny.save_tokenizer(folder / "fp8")
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny.sentence(101))
    return path
