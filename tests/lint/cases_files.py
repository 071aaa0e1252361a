"""Faults of files, of the model's configuration, and of what lies beside the weights."""

from __future__ import annotations

import torch

from tests.lint.damage import (
    SERVERS,
    SGLANG,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
    Case,
    add,
    block,
    both,
    config,
    drop,
    file,
    ignore,
    index,
    put,
    remove,
    sharded,
)
from tests.lint.folders import ALL

MTP_Q = "mtp.layers.0.self_attn.q_proj"

STRUCTURE = [
    Case("no-weights", "dynamic", lambda d: d.tensors.clear(), ALL),
    Case("index", "dynamic", index(lambda i: i.pop("weight_map")), ALL),
    Case(
        "index-outside-folder",
        "dynamic",
        index(lambda i: i["weight_map"].update({"extra.weight": "../secret.safetensors"})),
        ALL,
        place="extra.weight",
    ),
    Case(
        "shard-missing",
        "dynamic",
        index(lambda i: i["weight_map"].update({"extra.weight": "model-00003.safetensors"})),
        ALL,
        place="model-00003.safetensors",
    ),
    Case(
        "tensor-missing",
        "dynamic",
        index(lambda i: i["weight_map"].update({"extra": "model-00001-of-00002.safetensors"})),
        ALL,
        place="extra",
    ),
    Case(
        "index-wrong-shard",
        "dynamic",
        index(
            lambda i: i["weight_map"].update({"lm_head.weight": "model-00001-of-00002.safetensors"})
        ),
        ALL,
        "warning",
        place="lm_head.weight",
    ),
    Case(
        "tensor-not-indexed",
        "dynamic",
        index(lambda i: i["weight_map"].pop("lm_head.weight")),
        ALL,
        "warning",
        place="lm_head.weight",
    ),
    Case("total-size", "dynamic", index(lambda i: i["metadata"].update(total_size=1)), ALL, "note"),
    Case("stray-shard", "dynamic", file("extra.safetensors", ""), (VLLM, SGLANG)),
    Case("stray-shard", "dynamic", sharded(file("extra.safetensors", "")), ALL, "note"),
    Case("consolidated-weights", "dynamic", sharded(file("consolidated.safetensors", "")), (VLLM,)),
    Case("pickled-weights", "dynamic", file("pytorch_model.bin", ""), ALL, "warning"),
    Case(
        "metadata-format",
        "dynamic",
        lambda draft: setattr(draft, "metadata", None),
        (TRANSFORMERS,),
        "warning",
    ),
    Case(
        "shard-name",
        "dynamic",
        lambda d: d.shards.update(dict.fromkeys(d.tensors, "weights.safetensors")),
        (TRANSFORMERS,),
    ),
]
MODEL = [
    Case(
        "head-quantized",
        "dynamic",
        both(
            put("lm_head.weight", lambda w: (w.float() * 1024).to(torch.float8_e4m3fn)),
            add("lm_head.weight_scale", 128, 1, dtype=torch.float32),
            block(ignore=[]),
        ),
        (VLLM, SGLANG),
    ),
    Case("no-architecture", "dynamic", drop("architectures"), (SGLANG, TENSORRT)),
    Case("no-architecture", "dynamic", drop("architectures"), (VLLM,), "warning"),
    Case("no-model-type", "dynamic", drop("model_type"), ALL),
    Case("no-dtype", "dynamic", drop("dtype"), ALL, "warning"),
    Case("dtype", "dynamic", config(dtype="float8_e4m3fn"), ALL),
    Case("other-dtype", "dynamic", put("model.norm.weight", lambda w: w.half()), ALL, "note"),
    Case("tied-head-stored", "dynamic", config(tie_word_embeddings=True), ALL, "warning"),
    Case("head-missing", "dynamic", remove("lm_head.weight"), ALL),
    Case(
        "custom-code",
        "dynamic",
        config(auto_map={"AutoModelForCausalLM": "modeling_x.XModel"}),
        ALL,
        "warning",
        place="modeling_x.py",
    ),
    Case("mtp-missing", "dynamic", config(num_nextn_predict_layers=1), (VLLM, SGLANG), "warning"),
    Case(
        "mtp-ignored-by-name",
        "dynamic",
        both(add(f"{MTP_Q}.weight", 256, 256), ignore(MTP_Q)),
        (SGLANG,),
        "warning",
    ),
    Case(
        "head-not-ignored",
        "fp8-block",
        block(modules_to_not_convert=[]),
        (TRANSFORMERS,),
        "warning",
    ),
]
SIDE_FILES = [
    Case("tokenizer-missing", "dynamic", file("tokenizer.json", None), ALL, "warning"),
    Case(
        "tokenizer-config",
        "dynamic",
        both(file("tokenizer_config.json", None), file("chat_template.jinja", "")),
        ALL,
        "warning",
    ),
    Case("chat-template", "dynamic", file("tokenizer_config.json", "{}"), SERVERS, "note"),
    Case("processor-missing", "dynamic", config(vision_config={}), ALL, "warning"),
    Case("generation-config", "dynamic", file("generation_config.json", "{,"), ALL, "warning"),
    Case("generation-config", "dynamic", file("generation_config.json", None), ALL, "note"),
    Case(
        "generation-sampling",
        "dynamic",
        lambda draft: draft.edit("generation_config.json", do_sample=False),
        (TRANSFORMERS,),
        "warning",
    ),
    Case(
        "no-eos",
        "dynamic",
        both(drop("eos_token_id"), file("generation_config.json", "{}")),
        ALL,
        "warning",
    ),
]
