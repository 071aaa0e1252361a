"""Ignore lists, as each engine reads them."""

from __future__ import annotations

import pytest

from quantkit.lint.engines import ENGINES
from quantkit.lint.matching import IgnoreList

VLLM, SGLANG, TRANSFORMERS, TENSORRT = ENGINES
DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"
ROUTER, GATE = "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"
EXPERT = "model.layers.1.mlp.experts.3.down_proj"
TENTH = "model.layers.10.mlp.down_proj"


@pytest.mark.parametrize(
    ("method", "entry", "module", "engines"),
    [
        # compressed-tensors: exact, or a pattern from the start
        ("compressed-tensors", DOWN, DOWN, ENGINES),
        ("compressed-tensors", DOWN, UP, ()),
        ("compressed-tensors", "down_proj", DOWN, (SGLANG,)),
        ("compressed-tensors", "mlp.down_proj", DOWN, (SGLANG,)),
        ("compressed-tensors", "model.layers.1.mlp", DOWN, (TENSORRT,)),
        ("compressed-tensors", "model.layers.1", TENTH, ()),
        ("compressed-tensors", "*down_proj", DOWN, (TENSORRT,)),
        ("compressed-tensors", r"re:.*down_proj$", DOWN, ENGINES),
        ("compressed-tensors", r"re:.*down", DOWN, (VLLM, SGLANG, TRANSFORMERS)),
        ("compressed-tensors", r"re:down_proj", DOWN, ()),
        ("compressed-tensors", r"re:.*mlp\.gate$", ROUTER, ENGINES),
        ("compressed-tensors", r"re:.*mlp\.gate$", GATE, ()),
        ("compressed-tensors", r"re:.*mlp.gate", GATE, (VLLM, SGLANG, TRANSFORMERS)),
        ("compressed-tensors", "re:(", DOWN, ()),
        # fp8: vLLM exact, SGLang parts of the path, transformers prefixes, suffixes and patterns
        ("fp8", DOWN, DOWN, ENGINES),
        ("fp8", DOWN, TENTH, ()),
        ("fp8", "layers.1.mlp.down_proj", DOWN, (SGLANG, TRANSFORMERS)),
        ("fp8", "mlp.gate", ROUTER, (SGLANG, TRANSFORMERS)),
        ("fp8", "mlp.gate", GATE, ()),
        ("fp8", "model.layers.1", DOWN, (SGLANG, TRANSFORMERS, TENSORRT)),
        ("fp8", "model.layers.1", TENTH, ()),
        ("fp8", "proj", DOWN, (TRANSFORMERS,)),
        ("fp8", "model.layers.1.mlp.experts.0.up_proj", EXPERT, (VLLM, SGLANG)),
        ("fp8", "model.layers.10.mlp.experts.0.up_proj", EXPERT, ()),
        # modelopt: names, parts of names, wildcards
        ("modelopt", DOWN, DOWN, (VLLM, SGLANG, TENSORRT)),
        ("modelopt", "model.layers.1", TENTH, (VLLM,)),
        ("modelopt", "model.layers.1*", DOWN, (VLLM, SGLANG, TENSORRT)),
        ("modelopt", "*.mlp.gate", ROUTER, (VLLM, SGLANG, TENSORRT)),
        ("modelopt", "*.mlp.gate", GATE, ()),
        ("modelopt", "down*", DOWN, (SGLANG,)),
        # what has no rules ignores nothing
        ("quark", DOWN, DOWN, ()),
    ],
)
def test_an_entry_names_a_module(
    method: str, entry: str, module: str, engines: tuple[str, ...]
) -> None:
    found = {e: IgnoreList(method, e, ["lm_head", entry]).matching(module) for e in ENGINES}
    assert {engine for engine, entries in found.items() if entries} == set(engines)
    assert all(entries in ([], [entry]) for entries in found.values())
