"""Rules on config.json beside quantization: what the model is, its head, its extra layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantkit.lint.documents import mapping, strings, whole_number
from quantkit.lint.engines import (
    COMPRESSED_TENSORS,
    ENGINES,
    FP8,
    SGLANG,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
)
from quantkit.lint.finding import Finding, error, note, warning
from quantkit.lint.folder import CONFIG_NAME
from quantkit.lint.linears import HEADS, WEIGHT, is_coded
from quantkit.lint.matching import is_regex
from quantkit.lint.subject import Subject

HALVES = {"F16", "BF16"}
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
NEXT_TOKEN_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
MTP = "mtp."


def identity(subject: Subject) -> Iterator[Finding]:
    """transformers: models/auto/configuration_auto.py needs model_type; servers architectures[0].

    SGLang: configs/model_config.py; TensorRT-LLM: _torch/model_config.py, from_pretrained. vLLM
    goes by model_type where it is missing.
    """
    config, advice = subject.folder.config, "copy it from the original"
    if not strings(config.get("architectures")):
        place = f"{CONFIG_NAME}: architectures"
        problem = "is missing: the engine cannot tell the model's class"
        yield error("no-architecture", (SGLANG, TENSORRT), place, problem, advice)
        problem = "is missing: the model's class is guessed from model_type"
        yield warning("no-architecture", (VLLM,), place, problem, advice)
    if not isinstance(config.get("model_type"), str):
        place = f"{CONFIG_NAME}: model_type"
        problem = "is missing: the configuration's class is unknown"
        yield error("no-model-type", ENGINES, place, problem, advice)


def dtype(subject: Subject) -> Iterator[Finding]:
    """vLLM: config/model.py, _get_and_verify_dtype; without the key each engine guesses."""
    found = _dtype(subject)
    if found is None:
        problem = "is missing: each engine guesses what to compute in"
        yield warning("no-dtype", ENGINES, f"{CONFIG_NAME}: dtype", problem, "write 'bfloat16'")
    elif "float8" in found:
        problem = f"is {found!r}: what is not quantized would be computed in 8 bits"
        yield error("dtype", ENGINES, f"{CONFIG_NAME}: dtype", problem, "write 'bfloat16'")


def _dtype(subject: Subject) -> str | None:
    keys = ("dtype", "torch_dtype")
    configs = (subject.folder.config, subject.folder.text_config)
    found: list[Any] = [config.get(key) for config in configs for key in keys]
    return next((value for value in found if isinstance(value, str)), None)


def mixed_dtypes(subject: Subject) -> Iterator[Finding]:
    """Engines cast what is not quantized to one dtype; float16 has less range than bfloat16."""
    wanted = DTYPES.get((_dtype(subject) or "").removeprefix("torch."))
    for name, entry in subject.folder.tensors.items():
        if wanted in HALVES and entry.dtype in HALVES - {wanted} and name.endswith(WEIGHT):
            problem = f"is {entry.dtype}, and config.json has dtype {wanted}: it is cast on loading"
            yield note("other-dtype", ENGINES, name, problem, "store it in the model's dtype")


def _heads(subject: Subject) -> list[str]:
    names = tuple(f"{head}{WEIGHT}" for head in HEADS)
    return [
        name
        for name in subject.folder.tensors
        if name.endswith(names) and name.removesuffix(WEIGHT).rpartition(".")[2] in HEADS
    ]


def _is_tied(subject: Subject) -> bool | None:
    configs = (subject.folder.config, subject.folder.text_config)
    found = [config.get("tie_word_embeddings") for config in configs]
    return next((value for value in found if isinstance(value, bool)), None)


def head_stored_twice(subject: Subject) -> Iterator[Finding]:
    """vLLM: models/llama.py ties the head to the embedding, and loads what is stored into it."""
    for name in _heads(subject) if _is_tied(subject) else ():
        problem = "is stored, and tie_word_embeddings is true: a second copy of the embedding"
        advice = "remove it, or set tie_word_embeddings to false"
        yield warning("tied-head-stored", ENGINES, name, problem, advice)


def head_missing(subject: Subject) -> Iterator[Finding]:
    """An untied head that is not stored starts at random (transformers) or is never filled."""
    architectures = strings(subject.folder.config.get("architectures"))
    makes_text = any(a.endswith(("ForCausalLM", "ForConditionalGeneration")) for a in architectures)
    damaged = any(header.problem for header in subject.folder.shards.values())
    is_whole = bool(subject.folder.tensors) and not damaged
    if _is_tied(subject) is False and makes_text and not _heads(subject) and is_whole:
        if any(name.endswith(("output.weight", "head.weight")) for name in subject.folder.tensors):
            return
        place = f"{CONFIG_NAME}: tie_word_embeddings"
        problem = "is false, and no output head is stored: logits would be random"
        yield error("head-missing", ENGINES, place, problem, "store lm_head.weight, or set it true")


def head_coded(subject: Subject) -> Iterator[Finding]:
    """Servers quantize a head only where the configuration names it.

    vLLM: compressed_tensors.py, get_quant_method finds no target by the class ParallelLMHead, and
    fp8.py has no branch for it; SGLang: get_lm_head_scheme, which refuses blocks.
    """
    quantization = subject.quantization
    for name in _heads(subject):
        if not is_coded(subject.folder.tensors[name]):
            continue
        group = quantization.group_by_name(name.removesuffix(WEIGHT))
        engines = subject.loaders(VLLM, SGLANG)
        if quantization.method == COMPRESSED_TENSORS and group is not None:
            engines = tuple(e for e in engines if e == SGLANG and group.strategy == "block")
        elif quantization.method not in (COMPRESSED_TENSORS, FP8):
            continue
        if engines:
            problem = (
                "is in 8 bits, and the engine runs heads in 16 bits: it has no place for a scale"
            )
            yield error("head-quantized", engines, name, problem, "store the head in 16 bits")


def custom_code(subject: Subject) -> Iterator[Finding]:
    """transformers: dynamic_module_utils.py looks for the module's file in the folder."""
    auto_map = mapping(subject.folder.config.get("auto_map"))
    for target in auto_map.values():
        for reference in strings(target if isinstance(target, list) else [target]):
            file = f"{reference.partition('.')[0]}.py"
            if "--" not in reference and file not in subject.folder.files:
                problem = f"is what auto_map names for {reference!r}, and is not there"
                yield warning("custom-code", ENGINES, file[:200], problem[:300], "copy it")


def next_token_layers(subject: Subject) -> Iterator[Finding]:
    """Layers for speculative decoding (MTP) that quantization tools leave behind."""
    config = subject.folder.text_config
    count = next((n for n in map(whole_number, map(config.get, NEXT_TOKEN_KEYS)) if n), 0)
    layers = whole_number(config.get("num_hidden_layers")) or 0
    extra = tuple(f"layers.{layers + i}." for i in range(min(count, 64)))
    if not count or not subject.folder.tensors:
        return
    if not any(MTP in name or any(e in name for e in extra) for name in subject.folder.tensors):
        key = next(key for key in NEXT_TOKEN_KEYS if whole_number(config.get(key)))
        problem = f"is {count}, and no tensor of such a layer is stored: no speculative decoding"
        advice = "copy the mtp tensors from the original and add 're:^mtp.*' to the ignore list"
        yield warning("mtp-missing", (VLLM, SGLANG), f"{CONFIG_NAME}: {key}", problem, advice)


def next_token_ignored_by_name(subject: Subject) -> Iterator[Finding]:
    """SGLang: its MTP modules have fused names, which a list of single linears does not match.

    Reported as sgl-project/sglang#35797: weights are dropped, nothing is accepted. A pattern helps.
    """
    quantization = subject.quantization
    named = [e for e in quantization.ignore if e.startswith(MTP) and "_proj" in e]
    patterns = [e for e in quantization.ignore if is_regex(e) and "mtp" in e]
    if quantization.method == COMPRESSED_TENSORS and named and not patterns:
        problem = f"lists linears of MTP layers one by one ({named[0]!r}): SGLang drops them"
        advice = "add 're:^mtp.*' to ignore"
        place = subject.key(quantization.ignore_key)
        yield warning("mtp-ignored-by-name", (SGLANG,), place, problem, advice)


def quantized_transformers_head(subject: Subject) -> Iterator[Finding]:
    """transformers: quantizers/base.py, get_modules_to_not_convert skips heads by itself or not.

    Where a list is given, the head is only skipped if the list names it.
    """
    quantization = subject.quantization
    if quantization.method != FP8 or not isinstance(
        quantization.block.get("modules_to_not_convert"), list
    ):
        return
    for name in _heads(subject):
        module = name.removesuffix(WEIGHT)
        is_plain = not is_coded(subject.folder.tensors[name])
        if is_plain and not quantization.ignoring(TRANSFORMERS, module):
            problem = "is in 16 bits, and modules_to_not_convert does not name it"
            advice = f"add {module!r} to it"
            yield warning("head-not-ignored", (TRANSFORMERS,), name, problem, advice)


RULES = (
    identity,
    dtype,
    mixed_dtypes,
    head_stored_twice,
    head_missing,
    head_coded,
    custom_code,
    next_token_layers,
    next_token_ignored_by_name,
    quantized_transformers_head,
)
