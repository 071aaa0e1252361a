"""Miniature tokenizers of every decoding style in use, built in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The history of Rome is long. It's been told, don't you think? Yes!",
    "naïve café “quotes” … 你好 世界 🙂👩‍👩‍👧 Ünïcödé\n\n\tindent  two spaces",
    "def f(x):\n    return x + 1\n",
]
SPECIAL = ["<s>", "</s>", "<tool>"]


def wrap(backend: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<tool>"],
    )


def byte_level() -> Any:
    """GPT-2, Llama 3, Qwen: BPE over bytes; a character may be split anywhere."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend)


def byte_fallback(strip: bool = True) -> Any:
    """Llama 2 and Mistral (strip the first space) or Gemma (do not): BPE, byte fallback."""
    words = ["▁", "▁The", "▁his", "tory", "▁Rome", "a", "b", "c", "é", ".", "▁a", "!"]
    vocabulary = {"<unk>": 0}
    for token in (*(f"<0x{byte:02X}>" for byte in range(256)), *words):
        vocabulary[token] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return wrap(backend)


def metaspace() -> Any:
    """Unigram with a Metaspace decoder, as T5 and XLM-R have."""
    pieces = ["▁The", "▁his", "tory", "▁Rome", "▁", "a", ".", "▁a"]
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((p, -1.0) for p in pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrap(backend)


def word_pieces() -> Any:
    """WordPiece, whose decoder tidies spaces before punctuation."""
    words = ["[UNK]", "the", "his", "##tory", "rome", ".", ",", "don", "'", "##s", "n't", "do"]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return wrap(backend)


def word_level(folder: Path) -> Any:
    """The tokenizer of the tiny models: no decoder at all, words joined by spaces."""
    from transformers import AutoTokenizer

    from tests import tiny

    return AutoTokenizer.from_pretrained(tiny.save_tokenizer(folder))


BUILDERS = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "byte-fallback-unstripped": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word-pieces": word_pieces,
}
