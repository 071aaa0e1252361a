"""Rules on modelopt's block of config.json and on hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantkit.lint.documents import mapping, strings
from quantkit.lint.engines import MODELOPT, SERVERS, SGLANG, TENSORRT, VLLM
from quantkit.lint.finding import Finding, error, note, warning
from quantkit.lint.folder import QUANT_CONFIG_NAME
from quantkit.lint.quantization import CONFIG_KEY, algorithm_of
from quantkit.lint.subject import Subject

ALGORITHMS = {
    VLLM: ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
    SGLANG: ("FP8",),
    TENSORRT: ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES", "FP8_PB_WO"),
}
OTHERS = ("NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION", "W4A8_AWQ", "W4A16_AWQ", "INT4_AWQ")


def algorithm(subject: Subject) -> Iterator[Finding]:
    """vLLM: modelopt.py, LINEAR_ALGOS; SGLang: modelopt_quant.py, ModelOptFp8Config.from_config.

    TensorRT-LLM: quantization/mode.py, QuantAlgo, and modelopt_config.py for fp8_pb_wo.
    """
    if subject.quantization.method != MODELOPT:
        return
    block = subject.quantization.block
    fields = mapping(block.get("quantization")) or block
    place, found = subject.key("quant_algo"), algorithm_of(fields)
    if found in OTHERS:
        problem = f"is {found}: quantkit checks 8-bit floats only"
        yield note("not-fp8", subject.loaders(), place, problem)
        return
    unable = tuple(engine for engine in SERVERS if found not in ALGORITHMS[engine])
    if unable:
        problem = f"is {fields.get('quant_algo')!r}, which the engine does not know"
        yield error("quant-algo", unable, place, problem[:200], "export to compressed-tensors")


def files_disagree(subject: Subject) -> Iterator[Finding]:
    """TensorRT-LLM follows hf_quant_config.json (modelopt_config.py), others config.json."""
    legacy = mapping(subject.folder.documents.get(QUANT_CONFIG_NAME, {}).get("quantization"))
    if not legacy or subject.quantization.place != CONFIG_KEY:
        return
    if subject.quantization.method != MODELOPT:
        problem = f"is there, and config.json says {subject.quantization.method!r}"
        advice = f"remove {QUANT_CONFIG_NAME}"
        yield error("quant-config-differs", (TENSORRT,), QUANT_CONFIG_NAME, problem, advice)
        return
    for key, here, there in _facts(subject.quantization.block, legacy):
        if here != there:
            problem = f"has {key} {_short(there)}, and config.json {_short(here)}"
            place = f"{QUANT_CONFIG_NAME}.{key}"
            yield warning("quant-config-differs", SERVERS, place, problem, "make them agree")


def _short(value: Any) -> str:
    return repr(value)[:80]


def _facts(block: dict[str, Any], legacy: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what both files say: a name, config.json's value, hf_quant_config.json's value."""
    inner = mapping(block.get("quantization")) or block
    yield "quant_algo", algorithm_of(inner), algorithm_of(legacy)
    scheme = inner.get("kv_cache_scheme")
    is_fp8 = (mapping(scheme).get("num_bits"), mapping(scheme).get("type")) == (8, "float")
    here = "FP8" if is_fp8 else inner.get("kv_cache_quant_algo")
    yield "kv_cache_quant_algo", here, legacy.get("kv_cache_quant_algo")
    ignored = sorted(strings(inner.get("ignore")) or strings(inner.get("exclude_modules")))
    yield "exclude_modules", ignored, sorted(strings(legacy.get("exclude_modules")))


def file_missing(subject: Subject) -> Iterator[Finding]:
    """TensorRT-LLM up to 1.2 and vLLM before quant_algo in config.json read only the file."""
    is_modelopt = subject.quantization.method == MODELOPT
    if is_modelopt and QUANT_CONFIG_NAME not in subject.folder.files:
        problem = "is not there; older TensorRT-LLM reads it instead of config.json"
        yield note("quant-config-missing", (TENSORRT,), QUANT_CONFIG_NAME, problem, "write it too")


def file_unreadable(subject: Subject) -> Iterator[Finding]:
    """TensorRT-LLM and SGLang parse it as JSON wherever it is there."""
    problem = subject.folder.unreadable.get(QUANT_CONFIG_NAME)
    if problem:
        yield error("quant-config", SERVERS, QUANT_CONFIG_NAME, problem, "restore or remove it")


RULES = (algorithm, files_disagree, file_missing, file_unreadable)
