"""Faults of the quantization's configuration, and of ignore lists."""

from __future__ import annotations

import json

from tests.lint.damage import (
    PYDANTIC,
    SERVERS,
    SGLANG,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
    Case,
    add,
    as_int8,
    block,
    both,
    drop,
    experts,
    file,
    group,
    ignore,
    inputs,
    kv,
    no_kv,
    plain,
    unquantized,
    weights,
)
from tests.lint.folders import ALL, GATE0, Q0

EXPERT_DOWN = "model.layers.0.mlp.experts.1.down_proj"

METHOD = [
    Case("not-quantized", "dynamic", unquantized, ALL, "note"),
    Case(
        "not-checked",
        "dynamic",
        block(quant_method="torchao"),
        (VLLM, TRANSFORMERS),
        "note",
        also=("unknown-method",),
    ),
    Case(
        "deprecated-method",
        "dynamic",
        block(quant_method="fbgemm_fp8"),
        (VLLM,),
        "warning",
        also=("unknown-method", "not-checked"),
    ),
    Case("not-declared", "dynamic", drop("quantization_config"), ALL),
    Case("native-checkpoint", "dynamic", block(quant_method="quantkit"), ALL),
    Case("unknown-method", "dynamic", block(quant_method="fp9"), ALL),
    Case("unknown-method", "modelopt", lambda draft: None, (TRANSFORMERS,)),
]
COMPRESSED = [
    Case("not-fp8", "dynamic", both(as_int8, no_kv, block(kv_cache_scheme=None)), ALL, "note"),
    Case(
        "class-target",
        "dynamic",
        lambda draft: draft.quantization["config_groups"].update(
            group_1={**draft.group, "targets": [r"re:.*down_proj$"]}
        ),
        (TENSORRT,),
    ),
    Case(
        "unknown-key",
        "dynamic",
        weights(block_strcture=None),
        PYDANTIC,
        place="quantization_config.config_groups.group_0.weights.block_strcture",
    ),
    Case("unknown-key", "dynamic", group(weight=None), PYDANTIC),
    Case("unknown-key", "dynamic", kv(scale="x"), PYDANTIC),
    Case("invalid-value", "block", weights(block_structure=None), PYDANTIC),
    Case("invalid-value", "dynamic", weights(group_size=64), PYDANTIC),
    Case("no-groups", "dynamic", block(config_groups={}), ALL),
    Case(
        "group-without-weights",
        "dynamic",
        lambda draft: draft.quantization["config_groups"].update(
            attention={"targets": ["re:.*self_attn$"], "weights": None}
        ),
        (VLLM, SGLANG, TENSORRT),
        also=("class-target",),
    ),
    Case("unsupported-scheme", "dynamic", weights(symmetric=False), (VLLM, SGLANG)),
    Case("unsupported-scheme", "block", inputs(group_size=64), (TENSORRT,)),
    Case("unsupported-scheme", "block", group(input_activations=None), (SGLANG, TENSORRT), count=2),
    Case("unsupported-scheme", "dynamic", group(input_activations=None), (TENSORRT,)),
    Case("unsupported-scheme", "static", lambda draft: None, (TENSORRT,)),
    Case("format", "dynamic", group(format="pack-quantized"), (VLLM, SGLANG)),
    Case("format", "dynamic", group(format="floatquantized"), PYDANTIC),
    Case("status", "dynamic", drop("quantization_config", "quantization_status"), (TRANSFORMERS,)),
    Case(
        "sparsity",
        "dynamic",
        block(sparsity_config={"format": "dense", "targets": ["Linear"]}),
        (VLLM,),
    ),
    Case("target", "dynamic", group(targets=["Linear", "re:.*q_prjo"]), ALL),
]
OTHER_CONTAINERS = [
    Case(
        "activation-scheme",
        "fp8-block",
        drop("quantization_config", "activation_scheme"),
        (VLLM, SGLANG),
    ),
    Case("activation-scheme", "fp8-block", block(activation_scheme="block"), PYDANTIC),
    Case("block-size", "fp8-block", block(weight_block_size=[128]), ALL),
    Case("fp8-per-tensor", "fp8-tensor", lambda draft: None, (TRANSFORMERS,)),
    Case(
        "two-ignore-lists",
        "fp8-tensor",
        block(modules_to_not_convert=["lm_head", Q0]),
        (VLLM, SGLANG, TENSORRT),
        "warning",
    ),
    Case(
        "quant-algo",
        "modelopt",
        block(quant_algo="FP9"),
        SERVERS,
        also=("quant-config-differs",),
    ),
    Case(
        "quant-config-differs",
        "modelopt",
        block(kv_cache_scheme={"num_bits": 8, "type": "float"}, ignore=["lm_head", "*norm*"]),
        SERVERS,
        "warning",
    ),
    Case(
        "quant-config-differs",
        "dynamic",
        file("hf_quant_config.json", json.dumps({"quantization": {"quant_algo": "FP8"}})),
        (TENSORRT,),
    ),
    Case(
        "quant-config-missing", "modelopt", file("hf_quant_config.json", None), (TENSORRT,), "note"
    ),
    Case("quant-config", "modelopt", file("hf_quant_config.json", "{"), SERVERS),
]
IGNORE = [
    Case(
        "experts-not-ignored",
        "dynamic",
        add("model.layers.0.mlp.experts.gate_up_proj", 2, 64, 256),
        SERVERS,
        place="model.layers.0.mlp.experts.gate_up_proj",
    ),
    Case(
        "fused-group-split",
        "dynamic",
        both(plain(GATE0), ignore(GATE0)),
        SERVERS,
        place=f"{GATE0}.weight",
        also=("ignore-splits-group",),
    ),
    Case(
        "ignore-splits-group",
        "dynamic",
        ignore(GATE0),
        (VLLM, SGLANG),
        also=("ignored-but-quantized",),
    ),
    Case(
        "experts-scheme",
        "dynamic",
        both(experts, inputs(strategy="tensor", dynamic=True)),
        (VLLM, SGLANG),
        also=("unsupported-scheme",),
    ),
    Case(
        "experts-split",
        "dynamic",
        both(experts, plain(EXPERT_DOWN), ignore(EXPERT_DOWN)),
        SERVERS,
        place=f"{EXPERT_DOWN}.weight",
    ),
    Case("ignored-but-quantized", "dynamic", ignore("model.layers.0.mlp.down_proj"), ALL),
    Case("ignored-but-quantized", "dynamic", ignore("re:.*down"), PYDANTIC, also=("ignore-regex",)),
    Case("ignored-but-quantized", "dynamic", ignore("layers.0.mlp.down_proj"), (SGLANG,)),
    Case("unquantized-not-ignored", "dynamic", plain("model.layers.0.mlp.down_proj"), ALL),
    Case("unquantized-not-ignored", "dynamic", block(ignore=[]), (TRANSFORMERS,)),
    Case(
        "unquantized-not-ignored",
        "modelopt",
        block(ignore=[]),
        (VLLM, SGLANG),
        also=("quant-config-differs",),
    ),
    Case("ignore-pattern", "dynamic", ignore("re:.*(unclosed"), ALL, also=("ignore-regex",)),
    Case(
        "ignore-pattern",
        "dynamic",
        ignore(r"re:([a-z._0-9]+)+!"),
        ALL,
        "warning",
        also=("ignore-regex",),
    ),
    Case(
        "ignore-matches-nothing",
        "dynamic",
        ignore("model.layers.7.mlp.down_proj"),
        ALL,
        "warning",
        place="quantization_config.ignore",
    ),
    Case("untargeted", "dynamic", group(targets=["re:.*(attn|gate|up).*"]), ALL),
    Case("ignore-regex", "dynamic", ignore(r"re:.*\.norm$"), (TENSORRT,), "note"),
]
