"""Faults of weights, scales, KV scales, and shapes."""

from __future__ import annotations

import torch

from tests.lint.damage import (
    PYDANTIC,
    SERVERS,
    SGLANG,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
    Case,
    add,
    all_scales,
    block,
    both,
    config,
    kv,
    narrow,
    no_kv,
    put,
    remove,
    rename,
)
from tests.lint.folders import ALL, GATE0, Q0

K_SCALE = "model.layers.0.self_attn.k_scale"

SCALES = [
    Case("weight-dtype", "dynamic", put(f"{Q0}.weight", lambda w: w.to(torch.float8_e5m2)), ALL),
    Case(
        "fp8-not-linear",
        "dynamic",
        put("model.norm.weight", lambda w: w.to(torch.float8_e4m3fn)),
        ALL,
    ),
    Case("scale-missing", "dynamic", remove(f"{Q0}.weight_scale"), ALL, place=f"{Q0}.weight"),
    Case(
        "scale-name",
        "dynamic",
        rename(f"{Q0}.weight_scale", f"{Q0}.weight_scale_inv"),
        PYDANTIC,
    ),
    Case(
        "scale-name",
        "fp8-block",
        rename(f"{Q0}.weight_scale_inv", f"{Q0}.weight_scale"),
        PYDANTIC,
    ),
    Case("scale-without-weight", "dynamic", add("lm_head.weight_scale", 128, 1), (VLLM,)),
    Case("scale-shape", "dynamic", put(f"{Q0}.weight_scale", lambda s: s[:, 0]), PYDANTIC),
    Case("scale-shape", "dynamic", put(f"{Q0}.weight_scale", lambda s: s.T.contiguous()), ALL),
    Case("scale-shape", "static", put(f"{Q0}.weight_scale", lambda s: s[0]), (TRANSFORMERS,)),
    Case("scale-shape", "block", put(f"{GATE0}.weight_scale", lambda s: s[:2].clone()), ALL),
    Case("scale-dtype", "dynamic", put(f"{Q0}.weight_scale", lambda s: s.int()), ALL),
    Case("scale-invalid", "dynamic", put(f"{Q0}.weight_scale", lambda s: s * torch.nan), ALL),
    Case("scale-invalid", "dynamic", put(f"{Q0}.weight_scale", lambda s: -s), ALL),
    Case("scale-invalid", "static", put(f"{Q0}.input_scale", lambda s: s / 0), PYDANTIC),
    Case("scale-zero", "static", put(f"{Q0}.weight_scale", lambda s: s * 0), PYDANTIC),
    Case("scale-zero", "dynamic", put(f"{Q0}.weight_scale", lambda s: s * 0), ALL, "warning"),
    Case(
        "scale-absurd",
        "dynamic",
        put(f"{Q0}.weight_scale", lambda s: s * 2.0**-100),
        ALL,
        "warning",
    ),
    Case(
        "scale-not-bf16",
        "dynamic",
        put(f"{Q0}.weight_scale", lambda s: s * 1.001),
        (TRANSFORMERS,),
        "note",
    ),
    Case("input-scale-missing", "static", remove(f"{Q0}.input_scale"), PYDANTIC),
    Case("input-scale-unused", "dynamic", add(f"{Q0}.input_scale", 1), (VLLM,)),
    Case(
        "input-scale-unused",
        "dynamic",
        add(f"{Q0}.input_scale", 1),
        (SGLANG, TRANSFORMERS, TENSORRT),
        "warning",
    ),
    Case("input-scale-shape", "static", add(f"{Q0}.input_scale", 2), PYDANTIC),
    Case(
        "fused-scales-differ",
        "static",
        put(f"{Q0}.weight_scale", lambda s: s * 2),
        (VLLM, SGLANG),
        "warning",
        place=f"{Q0}.weight_scale",
    ),
    Case(
        "fused-scales-differ",
        "modelopt",
        put(f"{GATE0}.input_scale", lambda s: s * 2),
        SERVERS,
        "warning",
    ),
]
KV = [
    Case(
        "kv-scale-name",
        "dynamic",
        both(no_kv, *(add(f"model.layers.{i}.self_attn.kv_scale", 1) for i in range(2))),
        (VLLM, SGLANG),
        "warning",
        also=("kv-scales-one",),
    ),
    Case("kv-scheme", "dynamic", kv(num_bits=4), (VLLM, TENSORRT)),
    Case("kv-scheme", "dynamic", kv(dynamic=True), (SGLANG,), "warning"),
    Case("kv-scheme", "dynamic", kv(symmetric=False), (VLLM,)),
    Case("kv-scales-missing", "dynamic", no_kv, SERVERS, "warning"),
    Case("kv-scales-partial", "dynamic", remove(K_SCALE), SERVERS, "warning"),
    Case("kv-scales-undeclared", "dynamic", block(kv_cache_scheme=None), SERVERS, "warning"),
    Case("kv-scale-shape", "dynamic", add(K_SCALE, 2), SERVERS),
    Case("kv-scale-shape", "dynamic", kv(strategy="attn_head"), (VLLM,), also=("kv-scheme",)),
    Case("kv-scale-invalid", "dynamic", put(K_SCALE, lambda s: s * 0), ALL),
    Case(
        "kv-scales-one",
        "dynamic",
        both(all_scales("k_scale", 1.0), all_scales("v_scale", 1.0)),
        SERVERS,
        "warning",
    ),
    Case("q-scale", "dynamic", add("model.layers.0.self_attn.q_scale", 1), (SGLANG,), "warning"),
]
SHAPES = [
    Case(
        "tp-size",
        "dynamic",
        config(num_attention_heads=3, num_key_value_heads=3),
        SERVERS,
        tensor_parallel=3,
        also=(),
    ),
    Case("alignment", "static", narrow(GATE0, 250), (SGLANG,)),
    Case("tp-heads", "dynamic", config(num_attention_heads=6), SERVERS, tensor_parallel=4),
    Case("tp-kv-heads", "dynamic", config(num_key_value_heads=3), SERVERS, tensor_parallel=2),
    Case(
        "block-rows",
        "block",
        lambda draft: None,
        (VLLM, SGLANG),
        tensor_parallel=2,
        place="model.layers.0.self_attn.k_proj.weight",
    ),
    Case(
        "block-columns",
        "block",
        lambda draft: None,
        (VLLM, SGLANG),
        tensor_parallel=4,
        place="model.layers.0.self_attn.o_proj.weight",
        also=("block-rows",),
    ),
]
