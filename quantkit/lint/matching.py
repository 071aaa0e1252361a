"""Whether an ignore list names a module: every engine has its own idea of that.

Lists may have thousands of names, models tens of thousands of modules. So plain names are looked
up under all the keys that a module answers to, and only patterns are tried one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from quantkit.lint.engines import (
    COMPRESSED_TENSORS,
    FP8,
    MODELOPT,
    SGLANG,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
)

PATTERN = "re:"
EXPERTS = ".experts."
MAX_PATTERN = 1000
NESTED = re.compile(r"[*+}]\??\)[*+{]")


def is_explosive(pattern: str) -> bool:
    """Whether matching may take exponential time: a repetition of what ends in a repetition."""
    return len(pattern) > MAX_PATTERN or NESTED.search(pattern) is not None


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str] | None:
    """Return a regular expression, or None where it is not one, or explosive."""
    if is_explosive(pattern):
        return None
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an engine reads an ignore list.

    keys: the names by which a plain entry means a module.
    is_pattern: whether an entry is more than a plain name, and matches: whether it then matches.
    plain: the name to look up for a plain entry.
    """

    keys: Callable[[str], Iterator[str]]
    is_pattern: Callable[[str], bool]
    matches: Callable[[str, str], bool]
    plain: Callable[[str], str] = str


class IgnoreList:
    """The ignore list of one checkpoint as one engine reads it."""

    def __init__(self, method: str, engine: str, entries: Iterable[str]) -> None:
        self._dialect = DIALECTS.get((method, engine))
        self._plain: dict[str, str] = {}
        self._patterns: list[str] = []
        if self._dialect is None:
            return
        for entry in entries:
            if self._dialect.is_pattern(entry):
                self._patterns.append(entry)
            else:
                self._plain[self._dialect.plain(entry)] = entry

    def matching(self, module: str) -> list[str]:
        """Return the entries that make the engine leave a module unquantized."""
        if self._dialect is None:
            return []
        keys = dict.fromkeys(self._dialect.keys(module))
        found = [self._plain[key] for key in keys if key in self._plain]
        return found + [e for e in self._patterns if self._dialect.matches(e, module)]


def exact_or_pattern(entry: str, module: str) -> bool:
    """Compare as compressed-tensors does (utils/match.py, match_name), and vLLM with it."""
    if not entry.startswith(PATTERN):
        return entry == module
    expression = compiled(entry.removeprefix(PATTERN))
    return expression is not None and expression.match(module) is not None


def is_regex(entry: str) -> bool:
    """Whether an entry is a regular expression in compressed-tensors' notation."""
    return entry.startswith(PATTERN)


def _itself(module: str) -> Iterator[str]:
    yield module


def _ancestors(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def _suffixes(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.partition(".")[2]


def _parts(module: str) -> Iterator[str]:
    for suffix in _suffixes(module):
        yield from _ancestors(suffix)


def _itself_and_experts(module: str) -> Iterator[str]:
    yield module
    parent, found, _ = module.partition(EXPERTS)
    if found:
        yield f"{parent}.experts"


def _parts_of_layer(module: str) -> Iterator[str]:
    yield from _parts(_parent_of_experts(module))


def _layer_without_model(entry: str) -> str:
    return _without_model(_parent_of_experts(entry))


def _parent_of_experts(entry: str) -> str:
    parent, found, _ = entry.partition(EXPERTS)
    return f"{parent}.experts" if found else entry


def _is_regex_or_glob(entry: str) -> bool:
    return is_regex(entry) or any(mark in entry for mark in "*?[")


def _regex_or_glob(entry: str, module: str) -> bool:
    if not is_regex(entry):
        globs = (entry, entry.removesuffix(".*"))
        return any(fnmatchcase(name, glob) for name in _ancestors(module) for glob in globs)
    expression = compiled(entry.removeprefix(PATTERN))
    return expression is not None and any(map(expression.fullmatch, _ancestors(module)))


def _is_regex_or_word(entry: str) -> bool:
    return "." not in entry or re.fullmatch(r"[\w.-]+", entry) is None


def _boundary_or_suffix(entry: str, module: str) -> bool:
    expression = compiled(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")
    found = expression is not None and expression.match(module) is not None
    return found or module.endswith(entry)


def _never(entry: str, module: str) -> bool:
    return False


def _always(entry: str) -> bool:
    return True


def _part_of_name_or_glob(entry: str, module: str) -> bool:
    return entry in module or fnmatchcase(module, entry)


def _path_part_or_glob(entry: str, module: str) -> bool:
    names = (module, *module.split("."))
    return f".{_without_model(entry)}." in f".{module}." or any(
        fnmatchcase(name, entry) for name in names
    )


def _without_model(entry: str) -> str:
    return entry.removeprefix("model.").rstrip(".")


DIALECTS: dict[tuple[str, str], Dialect] = {
    # vLLM: compressed_tensors/utils.py, should_ignore_layer
    (COMPRESSED_TENSORS, VLLM): Dialect(_itself, is_regex, exact_or_pattern),
    # SGLang: compressed_tensors/utils.py, check_equal_or_regex_match
    (COMPRESSED_TENSORS, SGLANG): Dialect(_suffixes, is_regex, exact_or_pattern),
    # compressed-tensors: utils/match.py, match_name
    (COMPRESSED_TENSORS, TRANSFORMERS): Dialect(_itself, is_regex, exact_or_pattern),
    # TensorRT-LLM: models/modeling_utils.py, is_module_excluded_from_quantization
    (COMPRESSED_TENSORS, TENSORRT): Dialect(_ancestors, _is_regex_or_glob, _regex_or_glob),
    # vLLM: quantization/utils/quant_utils.py, is_layer_skipped
    (FP8, VLLM): Dialect(_itself_and_experts, is_regex, _never, _parent_of_experts),
    # SGLang: quantization/utils.py, _module_path_match
    (FP8, SGLANG): Dialect(_parts_of_layer, is_regex, _never, _layer_without_model),
    # transformers: quantizers/quantizers_utils.py, should_convert_module
    (FP8, TRANSFORMERS): Dialect(_parts, _is_regex_or_word, _boundary_or_suffix),
    (FP8, TENSORRT): Dialect(_ancestors, _is_regex_or_glob, _regex_or_glob),
    # vLLM: quantization/modelopt.py, is_layer_excluded
    (MODELOPT, VLLM): Dialect(_itself, _always, _part_of_name_or_glob),
    # SGLang: quantization/modelopt_quant.py, is_layer_excluded
    (MODELOPT, SGLANG): Dialect(_itself, _always, _path_part_or_glob),
    (MODELOPT, TENSORRT): Dialect(_ancestors, _is_regex_or_glob, _regex_or_glob),
}
