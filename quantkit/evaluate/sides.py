"""The two models of a run as the harness gets them: in our runtime, in transformers, or served.

What a side needs is checked when it is made; the model is loaded when its turn comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibrate.source import open_source
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import UnsupportedError
from quantkit.evaluate.evaluation import activations_word, input_activations
from quantkit.evaluate.models import check_vocabulary, load_in_transformers
from quantkit.runtime.loading import DTYPES, load_engine, resolve_device
from quantkit.runtime.model import Fp8Model
from quantkit.shards import read_json

CHAT = "/chat/completions"
"""End of the address of a server that is asked in messages."""

LOGIT_BYTES = 1 << 30
"""The harness's adapter holds the logits of all tokens of a batch, twice: at most this much."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all sides share."""

    checkpoint: Path
    chat: bool
    batch_size: int
    seed: int | None
    activations: str
    kv: str | None
    dtype: str
    device: str
    threads: int | None
    trust_remote_code: bool
    progress: bool


@dataclass(frozen=True, slots=True)
class Side:
    """One model: what messages call it, how it runs, and how to load it.

    `open` takes the length of the longest sequence, in tokens, if an earlier side found out.
    """

    label: str
    description: str
    open: Callable[[int | None], Any]


def in_runtime(options: Options) -> Side:
    """Return the checkpoint in quantkit's runtime."""
    path = options.checkpoint
    scheme = open_checkpoint(path).scheme
    kv = options.kv or ("fp8" if scheme.kv is not None else "none")
    stream = sys.stderr if options.progress else None

    def load(longest: int | None) -> Any:
        from quantkit.evaluate.harness import QuantkitLM

        engine = load_engine(
            path,
            options.device,
            options.dtype,
            kv,
            input_activations(options.activations, scheme),
            options.threads,
        )
        model = Fp8Model(engine, path)
        _check_chat(options, model.tokenizer)
        return QuantkitLM(model, options.batch_size, options.seed or 0, stream)

    words = activations_word(options.activations, scheme)
    cache = "FP8 KV" if kv == "fp8" else "plain KV"
    return Side(
        "the quantized model", f"quantkit, {options.dtype}, {cache}, activations {words}", load
    )


def in_transformers(reference: str | Path, options: Options) -> Side:
    """Return the original in the harness's own adapter, with the checkpoint's tokenizer."""
    source = open_source(reference, options.trust_remote_code)
    config_file = options.checkpoint / "config.json"
    if config_file.is_file():
        config = read_json(config_file)
        check_vocabulary(source, int((config.get("text_config") or config)["vocab_size"]))

    def load(longest: int | None) -> Any:
        from lm_eval.models.huggingface import HFLM
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            str(options.checkpoint), local_files_only=options.checkpoint.is_dir()
        )
        _check_chat(options, tokenizer)
        device = resolve_device(options.device)
        model = load_in_transformers(source, DTYPES[options.dtype], device)
        model.generation_config = _neutral(options.checkpoint, tokenizer)
        adapter = HFLM(model, backend="causal", tokenizer=tokenizer)
        size = 2 * 4 * int(model.get_output_embeddings().weight.shape[0])
        fits = LOGIT_BYTES // (size * (longest or adapter.max_length))
        adapter.batch_size_per_gpu = max(1, min(options.batch_size, fits))
        return adapter

    return Side("the original", f"{source.name} in transformers, {options.dtype}", load)


def served(label: str, url: str, model: str | None, options: Options) -> Side:
    """Return a model of an OpenAI-compatible server."""
    from quantkit.evaluate.endpoint import find_endpoint, open_endpoint

    endpoint = find_endpoint(url, model)

    def load(longest: int | None) -> Any:
        return open_endpoint(
            endpoint,
            options.checkpoint,
            options.batch_size,
            options.chat,
            options.trust_remote_code,
        )

    return Side(label, endpoint.description, load)


def _neutral(checkpoint: Path, tokenizer: Any) -> Any:
    """Return a generation config that ends where the checkpoint does, and changes nothing else."""
    from transformers import GenerationConfig

    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        listed = read_json(path).get("eos_token_id") if path.is_file() else None
        if listed is not None:
            ends = listed if isinstance(listed, list) else [listed]
            break
    return GenerationConfig(eos_token_id=sorted({*ends, tokenizer.eos_token_id}))


def _check_chat(options: Options, tokenizer: Any) -> None:
    if options.chat and not tokenizer.chat_template:
        raise UnsupportedError(
            f"the tokenizer of {options.checkpoint} has no chat template; leave out "
            "--apply-chat-template"
        )
