"""Fixtures that every test may use. All paths are session-wide: read them, never write into them.

`tiny_llama`          folder: bf16 Llama of 2 layers (hidden 64, 4 heads, 2 KV heads, vocabulary
                      128, untied, at most 64 positions) with its tokenizer and a chat template
`tiny_llama_tied`     the same with tied embeddings: no `lm_head.weight` on disk
`tokenizer_folder`    folder of the word-level tokenizer alone; adds BOS; no chat template
`chat_tokenizer_folder`  the same with a chat template that writes BOS itself
`calibration_file`    JSONL, 16 rows with `text` of 5 to 60 tokens

To build variants (other families, dtypes, shards) call the functions of `tests/tiny.py`.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests import tiny
from tests.cuda.emulator import LAUNCHED

# The same examples in every run, and no time limits: CI machines are slow now and then.
settings.register_profile("quantkit", derandomize=True, deadline=None)
settings.load_profile("quantkit")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let `pytest -k cases` find every test that carries a case's number, as in test_b01_..."""
    if re.search(r"_b\d\d_|TestB\d\d", item.nodeid):
        item.extra_keyword_matches.add("cases")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Give each of the processes of `pytest -n` one thread: here, before they import torch."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what another process ran on the emulator."""
    launched = getattr(node, "workeroutput", {}).get("launched", {})
    for kernel, shapes in launched.items():
        LAUNCHED.setdefault(kernel, set()).update(shapes)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much ran on the emulator."""
    if LAUNCHED:
        pairs = sum(map(len, LAUNCHED.values()))
        terminalreporter.write_line(f"emulator: {len(LAUNCHED)} kernels, {pairs} kernels x shapes")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_llama_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    config = LlamaConfig(**tiny.LLAMA, tie_word_embeddings=True)
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny-llama-tied", config)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tokenizer(tmp_path_factory.mktemp("tokenizers") / "plain")


@pytest.fixture(scope="session")
def chat_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers") / "chat"
    return tiny.save_tokenizer(folder, tiny.CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def calibration_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "calibration.jsonl"
    return tiny.write_jsonl(path, tiny.calibration_rows())
