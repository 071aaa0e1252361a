"""Compare the linter's rules with the functions of vLLM that they mirror.

    PYTHONPATH=. vllm-env/bin/python tests/engines/vllm_rules.py

Needs vLLM alone: no GPU, no model. Prints a line a rule; exits with 1 where the two differ.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm.distributed
from compressed_tensors.quantization import QuantizationArgs
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsKVCacheMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from quantkit.lint.finding import Finding, Severity
from quantkit.lint.folder import Folder
from quantkit.lint.linears import Linears
from quantkit.lint.matching import IgnoreList
from quantkit.lint.quantization import read_quantization
from quantkit.lint.rules import compressed_tensors, fp8, kv_cache, modelopt, tensor_parallel
from quantkit.lint.subject import Subject
from quantkit.tensor_file import TensorEntry

Rules = Iterable[Callable[[Subject], Iterator[Finding]]]
Pair = tuple[object, bool, bool]
"""A case, whether the linter objects (or matches), and whether vLLM does."""

MODULES = [
    *(
        f"model.layers.{layer}.self_attn.{leaf}"
        for layer in (1, 10)
        for leaf in ("q_proj", "o_proj")
    ),
    *(f"model.layers.{layer}.mlp.{leaf}" for layer in (1, 10) for leaf in ("gate", "gate_proj")),
    *("model.layers.1.mlp.experts.3.down_proj", "lm_head"),
]
ENTRIES = [
    *MODULES,
    *("gate_proj", "mlp.gate", "model.layers.1", "mlp", "*gate_proj", "model.layers.1*"),
    *("*.mlp.gate", "re:.*gate", "re:.*mlp.gate", r"re:.*mlp\.gate$", "re:gate", "re:.*experts.*"),
    *("model.layers.1.mlp.experts.0.up_proj", "model.layers.1.mlp.experts"),
]
BLOCK = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "group",
                "group_size": 128,
                "dynamic": True,
            },
        }
    },
}


def subject(
    block: dict[str, Any],
    shapes: dict[str, tuple[int, int]] | None = None,
    gpus: int = 1,
    **config: int,
) -> Subject:
    entries = {
        f"{name}.weight": TensorEntry(f"{name}.weight", "F8_E4M3", shape, 0, Path())
        for name, shape in (shapes or {}).items()
    }
    folder = Folder(Path(), frozenset(), {**config, "quantization_config": block}, tensors=entries)
    quantization = read_quantization(folder)
    return Subject(folder, quantization, Linears(folder, quantization), gpus)


def objects(found: Subject, rules: Rules) -> bool:
    findings = (finding for rule in rules for finding in rule(found))
    return any("vllm" in f.engines and f.severity is Severity.ERROR for f in findings)


def raises(function: Callable[[], Any]) -> bool:
    try:
        function()
    except Exception as error:
        # Kernels are chosen after a scheme was accepted, and need a running vLLM.
        return "config is not set" not in str(error)
    return False


def ignore_lists() -> Iterator[Pair]:
    for entry, module in itertools.product(ENTRIES, MODULES):
        layer, found, _ = module.partition(".experts.")
        layer = f"{layer}.experts" if found else module  # vLLM asks for all experts at once
        excluded = ModelOptFp8Config("FP8", True, None, [entry]).is_layer_excluded(module)
        theirs = {
            "compressed-tensors": should_ignore_layer(module, [entry]),
            "fp8": is_layer_skipped(layer, [entry]),
            "modelopt": excluded,
        }
        for method, ignores in theirs.items():
            ours = bool(IgnoreList(method, "vllm", [entry]).matching(module))
            yield (method, entry, module), ours, ignores


def arguments() -> list[dict[str, Any]]:
    """Return every description of 8-bit floats that compressed-tensors accepts."""
    axes = {
        "num_bits": [8],
        "type": ["float"],
        "symmetric": [True, False],
        "strategy": ["tensor", "channel", "group", "block", "token"],
        "group_size": [None, 64, 128],
        "block_structure": [None, [128, 128]],
        "dynamic": [True, False],
    }
    every = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [fields for fields in every if not raises(lambda f=fields: QuantizationArgs(**f))]


def schemes() -> Iterator[Pair]:
    """Yield combinations of weights and inputs.

    Static inputs of other strategies than tensor are left out: vLLM leaves them unquantized, which
    the linter calls an error.
    """
    known = arguments()
    inputs = [
        fields
        for fields in known
        if fields["dynamic"] or (fields["strategy"], fields["symmetric"]) == ("tensor", True)
    ]
    formats = ["float-quantized", "naive-quantized", "pack-quantized", "dense", None]
    for weights, given, name in itertools.product(known, [*inputs, None], formats):
        if weights["strategy"] == "block" and given is not None and not given["dynamic"]:
            continue  # an assertion in the scheme, which only runs in a running vLLM
        if given is None and name == "pack-quantized":
            continue  # taken for packed integers, which then are not there
        group = {"targets": ["Linear"], "weights": weights, "input_activations": given}
        block = {**BLOCK, "config_groups": {"group_0": {**group, "format": name}}}
        ours = objects(subject(block), compressed_tensors.RULES)
        yield (weights, given, name), ours, raises(lambda b=block: _choose(copy.deepcopy(b)))


def _choose(block: dict[str, Any]) -> None:
    config = CompressedTensorsConfig.from_config(block)
    scheme = config.target_scheme_map["Linear"]
    config._get_scheme_from_parts(
        scheme["weights"], scheme["input_activations"], format=scheme["format"]
    )


def kv_schemes() -> Iterator[Pair]:
    bits, kinds, flags = (8, 4, None), ("float", "int", None), (True, False, None)
    strategies = ("tensor", "attn_head", "channel", "group", None)
    for values in itertools.product(bits, kinds, strategies, flags):
        named = zip(("num_bits", "type", "strategy", "symmetric"), values, strict=True)
        fields = {key: value for key, value in named if value is not None}
        block = {"quant_method": "compressed-tensors", "kv_cache_scheme": fields}
        theirs = raises(lambda f=fields: CompressedTensorsKVCacheMethod.validate_kv_cache_scheme(f))
        yield fields, objects(subject(block), [kv_cache.scheme]), theirs


def fp8_blocks() -> Iterator[Pair]:
    sizes = (None, [128, 128], [128], [64, 128])
    for scheme, size in itertools.product(("dynamic", "static", "x", None), sizes):
        given = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": size}
        block = {key: value for key, value in given.items() if value is not None}
        theirs = raises(lambda b=block: Fp8Config.from_config(dict(b)))
        yield block, objects(subject(block), fp8.RULES), theirs


def algorithms() -> Iterator[Pair]:
    for name in ("FP8", "fp8", "FP8_PB_WO", "fp8_pb_wo", "FP8_BLOCK_SCALES", "FP9", "", None):
        block = {"quant_method": "modelopt", "quant_algo": name, "ignore": []}
        theirs = raises(lambda b=block: ModelOptFp8Config.from_config(dict(b)))
        yield name, objects(subject(block), [modelopt.algorithm]), theirs


def block_rows() -> Iterator[Pair]:
    """Yield models of many shapes on 1 to 8 GPUs."""
    vllm.distributed.get_tensor_model_parallel_world_size = lambda: 1
    axes = ((1, 2, 4, 8), (64, 96, 128), (1, 2, 4, 8), (1, 3, 4), (576, 1024), (768, 1408, 1536))
    for gpus, size, shared, times, hidden, inner in itertools.product(*axes):
        heads = shared * times
        if heads % gpus or (shared % gpus if gpus < shared else gpus % shared) or inner % gpus:
            continue
        shapes = {
            "self_attn.q_proj": (heads * size, hidden),
            "self_attn.k_proj": (shared * size, hidden),
            "self_attn.v_proj": (shared * size, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
        }
        counts = {"num_attention_heads": heads, "num_key_value_heads": shared}
        ours = objects(subject(BLOCK, shapes, gpus, **counts), [tensor_parallel.block_rows])
        kv_rows = max(1, shared // gpus) * size
        fused = ([heads // gpus * size, kv_rows, kv_rows], [inner // gpus] * 2)
        theirs = any(
            raises(
                lambda r=rows, h=hidden, n=gpus: validate_fp8_block_shape(
                    SimpleNamespace(tp_size=n), h, sum(r) * n, h, r, [128, 128]
                )
            )
            for rows in fused
        )
        yield (gpus, shapes), ours, theirs


def main() -> int:
    checks = (ignore_lists, schemes, kv_schemes, fp8_blocks, algorithms, block_rows)
    failed = False
    for check in checks:
        pairs = list(check())
        differing = [pair for pair in pairs if pair[1] != pair[2]]
        print(f"{check.__name__}: {len(pairs)} cases, {len(differing)} differ")
        for case, ours, theirs in differing[:5]:
            print(f"  {case}: linter {ours}, vLLM {theirs}")
        failed = failed or bool(differing)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
