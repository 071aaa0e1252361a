"""Miniature models, tokenizers and calibration files, built from fixed seeds: no download.

Plain functions that write into a folder; `conftest.py` wraps the common ones as session fixtures.
A tokenizer knows 124 words (`WORDS`); everything else becomes `<unk>`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
VOCAB_SIZE = 128
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
_TEXT = """
. , : ; ! ? - ( ) the a an of to in is was it for on as with by at from that this be are or
not and user assistant system hello world model layer scale weight token cache key value head
query gate up down fast slow small large red green blue yellow one two three four five six
seven eight nine ten cat dog bird fish tree river sea sun moon star rain snow wind fire stone
house road city king queen book page word line name time day night year life hand eye heart
mind voice song war peace law art food bread milk salt gold iron ship coin hill lake
leaf seed wheel door glass lamp
"""
WORDS = tuple(_TEXT.split())
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }} : {{ message['content'] }}"
    " {{ eos_token }} {% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)
"""Writes BOS itself, as Llama's does; a caller who lets the tokenizer add another has two."""

LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
"""Sizes of the tiny Llama (F1); any other family takes them too: `Qwen2Config(**LLAMA)`."""


def save_tokenizer(folder: Path, chat_template: str | None = None, add_bos: bool = True) -> Path:
    """Save a word-level tokenizer; BOS comes from its post-processor if `add_bos`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *WORDS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS_ID)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def save_model(
    folder: Path,
    config: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    max_shard_size: str = "5GB",
) -> Path:
    """Save a randomly initialized causal LM of `config` (default: the tiny Llama) with tokenizer.

    The weights depend on config and seed alone. Returns the folder.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config or LlamaConfig(**LLAMA)).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return save_tokenizer(folder, chat_template)


def sentence(num_words: int, seed: int = 0) -> str:
    """Return `num_words` known words: with the tiny tokenizer, as many tokens (BOS not counted)."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def calibration_rows() -> list[dict[str, Any]]:
    """Return the 16 rows of F3: 5 to 60 tokens, always the same ones."""
    lengths = [5, 60, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 7]
    return [{"text": sentence(length, seed=number)} for number, length in enumerate(lengths)]


def random_ids(num_tokens: int, seed: int = 0) -> Tensor:
    """Return ordinary (not special) token ids, int64 [num_tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (num_tokens,), generator=generator)
