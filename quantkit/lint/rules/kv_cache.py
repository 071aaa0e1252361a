"""Rules on the scales of an FP8 KV cache: declared, there, and used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from quantkit.lint.documents import mapping, whole_number
from quantkit.lint.engines import (
    COMPRESSED_TENSORS,
    ENGINES,
    FP8,
    MODELOPT,
    SGLANG,
    TENSORRT,
    VLLM,
)
from quantkit.lint.finding import Finding, error, warning
from quantkit.lint.quantization import is_text, strategy_of
from quantkit.lint.subject import Subject
from quantkit.tensor_file import TensorEntry

READERS = (VLLM, SGLANG, TENSORRT)
"""Engines whose KV cache uses the scales; transformers' own cache is not quantized by them."""
SUFFIXES = {
    "k": (".k_scale", ".k_proj.output_scale", ".kv_scale", ".k_cache.scale"),
    "v": (".v_scale", ".v_proj.output_scale", ".kv_scale", ".v_cache.scale"),
}
"""Names that loaders map to the cache's scales.

vLLM: weight_utils.py, maybe_remap_kv_scale_name; SGLang: the same function.
"""
CALIBRATE = "calibrate the KV cache, or set kv_cache_scheme to null"


def scheme(subject: Subject) -> Iterator[Finding]:
    """Which declarations an engine takes.

    vLLM: compressed_tensors.py, validate_kv_cache_scheme raises; SGLang: is_supported_scheme warns
    and goes without; TensorRT-LLM: update_quant_config_from_compressed_tensors raises.
    """
    quantization = subject.quantization
    fields, place = quantization.kv_scheme, subject.key("kv_cache_scheme")
    if quantization.method != COMPRESSED_TENSORS or fields is None:
        return
    if not isinstance(fields, dict):
        yield error("kv-scheme", ENGINES, place, "is no JSON object", "correct it")
        return
    is_fp8 = (fields.get("num_bits"), fields.get("type")) == (8, "float")
    strategy = strategy_of(fields)
    if not is_fp8:
        problem = f"has num_bits={fields.get('num_bits')!r}, type={fields.get('type')!r}"
        yield error("kv-scheme", (VLLM, TENSORRT), place, f"{problem}: not FP8"[:200], CALIBRATE)
    elif fields.get("strategy") not in ("tensor", "attn_head") or not fields.get("symmetric"):
        problem = f"has strategy {fields.get('strategy')!r}, symmetric {fields.get('symmetric')!r}"
        advice = "use 'tensor' and true"
        yield error("kv-scheme", (VLLM,), place, f"{problem}: refused"[:200], advice)
    if not is_fp8 or strategy != "tensor" or fields.get("dynamic", False):
        problem = "is not static FP8 per tensor: the scales are ignored, the cache stays in 16 bits"
        yield warning("kv-scheme", (SGLANG,), place, problem, "calibrate with --kv fp8")


def scales_missing(subject: Subject) -> Iterator[Finding]:
    """A declared cache without scales runs with 1.0, silently.

    vLLM: compressed_tensors.py, CompressedTensorsKVCacheMethod.create_weights, and kv_cache.py;
    SGLang: kv_cache.py, process_weights_after_loading.
    """
    if not subject.is_checked or not _is_declared(subject):
        return
    layers, found = _attention_layers(subject), _scales(subject)
    bare = [name for name in layers if name not in found]
    engines = subject.loaders(*READERS)
    if layers and len(bare) == len(layers):
        problem = "has no k_scale and no v_scale in any layer: engines use 1.0"
        yield warning(
            "kv-scales-missing", engines, subject.key("kv_cache_scheme"), problem, CALIBRATE
        )
        return
    for name in bare:
        problem = "has no k_scale and v_scale, other layers have: engines use 1.0 here"
        yield warning("kv-scales-partial", engines, name, problem, CALIBRATE)
    for name, kinds in found.items():
        if len(kinds) == 1:
            kind = next(iter(kinds))
            problem = f"has {kind}_scale alone; the other is taken to be 1.0, or the same"
            yield warning("kv-scales-partial", engines, name, problem, CALIBRATE)


def scales_undeclared(subject: Subject) -> Iterator[Finding]:
    """Undeclared scales are used by vLLM with --kv-cache-dtype fp8 only, by SGLang never.

    vLLM: attention.py; SGLang: compressed_tensors.py, get_quant_method has nothing for it then.
    """
    if subject.quantization.method not in (COMPRESSED_TENSORS, MODELOPT):
        return
    found = _scales(subject)
    if found and not _is_declared(subject):
        place, name = subject.key("kv_cache_scheme"), next(iter(found))
        problem = f"is not set, and {name} has scales: they are used on demand or not at all"
        engines = subject.loaders(*READERS)
        yield warning("kv-scales-undeclared", engines, place, problem, "declare the scheme")


def scale_shapes(subject: Subject) -> Iterator[Finding]:
    """vLLM: compressed_tensors.py, create_weights and _tp_aware_loader; kv_cache.py elsewhere."""
    fields = mapping(subject.quantization.kv_scheme)
    per_head = fields.get("strategy") == "attn_head"
    heads = whole_number(subject.folder.text_config.get("num_key_value_heads")) or 0
    for name, kinds in _scales(subject).items():
        for entry in kinds.values():
            count = _numel(entry)
            expected = heads if per_head and heads else 1
            if count != expected and not (per_head and not heads):
                problem = f"has {count} values, expected {expected}"
                engines = subject.loaders(VLLM) if per_head else subject.loaders(*READERS)
                advice = "calibrate the KV cache again"
                yield error("kv-scale-shape", engines, entry.name, f"{problem} ({name})", advice)


def _numel(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count


def scale_values(subject: Subject) -> Iterator[Finding]:
    """The cache is divided by them; 1.0 everywhere is what an uncalibrated cache has."""
    values = []
    for kinds in _scales(subject).values():
        for entry in kinds.values():
            found = subject.folder.numbers(entry.name)
            if found is None or not found.size:
                continue
            values += found[:4096].tolist()
            bad = [float(value) for value in found[:4096] if not 0 < value < float("inf")]
            if bad:
                problem = f"is {bad[0]}, expected a finite number above 0"
                yield error("kv-scale-invalid", ENGINES, entry.name, problem, CALIBRATE)
    if values and all(value == 1.0 for value in values):
        problem = f"has {len(values)} scales, and all are 1.0: the cache was not calibrated"
        engines = subject.loaders(*READERS)
        place = subject.key("kv_cache_scheme")
        yield warning("kv-scales-one", engines, place, problem, "calibrate the KV cache")


def deprecated_name(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: weight_utils.py, maybe_remap_kv_scale_name."""
    for name in subject.folder.tensors:
        if name.endswith(".kv_scale"):
            problem = "is one scale for keys and values: deprecated"
            engines = subject.loaders(VLLM, SGLANG)
            yield warning("kv-scale-name", engines, name, problem, "store k_scale and v_scale")


def query_scale(subject: Subject) -> Iterator[Finding]:
    """SGLang: weight_utils.py, maybe_remap_kv_scale_name knows k_scale and v_scale only."""
    for name in subject.folder.tensors:
        if name.endswith(".q_scale") and subject.quantization.method == COMPRESSED_TENSORS:
            problem = "is a scale of queries, which SGLang does not read"
            yield warning("q-scale", (SGLANG,), name, problem, "nothing, or remove it")


def _is_declared(subject: Subject) -> bool:
    declared: Any = subject.quantization.kv_scheme
    return bool(declared) and subject.quantization.method != FP8


def _attention_layers(subject: Subject) -> list[str]:
    """Return the attention modules of the language model that project keys for a cache."""
    leaves = (".k_proj.weight", ".qkv_proj.weight")
    names = (
        name.removesuffix(leaf)
        for name in subject.folder.tensors
        for leaf in leaves
        if name.endswith(leaf) and is_text(name)
    )
    return [name for name in dict.fromkeys(names) if not _shares(subject, name)]


def _shares(subject: Subject, module: str) -> bool:
    """Whether a layer reads the cache of an earlier one (num_kv_shared_layers)."""
    config = subject.folder.text_config
    layers = whole_number(config.get("num_hidden_layers")) or 0
    shared = whole_number(config.get("num_kv_shared_layers")) or 0
    number = re.search(r"\.(\d{1,9})\.", module)
    return number is not None and shared > 0 and int(number[1]) >= layers - shared


def _scales(subject: Subject) -> dict[str, dict[str, TensorEntry]]:
    """Return attention module -> "k" or "v" -> scale."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in subject.folder.tensors.items():
        for kind, suffixes in SUFFIXES.items():
            suffix = next((s for s in suffixes if name.endswith(s)), None)
            if suffix is not None:
                module = name.removesuffix(suffix).removesuffix(f".{kind}_proj")
                found.setdefault(module.removesuffix(".qkv_proj"), {})[kind] = entry
    return found


RULES = (
    scheme,
    scales_missing,
    scales_undeclared,
    scale_shapes,
    scale_values,
    deprecated_name,
    query_scale,
)
