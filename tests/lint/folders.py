"""Small checkpoints in every container, written by hand, for tests that damage them.

A Llama of 2 layers (hidden 256, inner 512, 4 heads of 64, 2 KV heads, vocabulary 128, untied). Each
`BASES` entry is a function that returns a Draft without faults, and the engines it is meant for.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, VOCABULARY, LAYERS = 256, 512, 128, 2
SHAPES = {
    "self_attn.q_proj": (256, HIDDEN),
    "self_attn.k_proj": (128, HIDDEN),
    "self_attn.v_proj": (128, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 256),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
KV = {**FLOAT8, "strategy": "tensor", "dynamic": False}
Q0, GATE0 = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"


@dataclass
class Draft:
    """A checkpoint in memory: config.json, tensors, and the text of other files.

    `shards` maps tensors to files; empty means one file. `index` is written as it is, if any.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, str] = field(default_factory=dict)
    shards: dict[str, str] = field(default_factory=dict)
    index: dict[str, Any] | None = None
    metadata: dict[str, str] | None = field(default_factory=lambda: {"format": "pt"})

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]  # type: ignore[no-any-return]

    @property
    def group(self) -> dict[str, Any]:
        return self.quantization["config_groups"]["group_0"]  # type: ignore[no-any-return]

    def document(self, name: str) -> dict[str, Any]:
        return json.loads(self.files[name])  # type: ignore[no-any-return]

    def edit(self, name: str, **changes: Any) -> None:
        self.files[name] = json.dumps({**self.document(name), **changes})

    def split(self) -> None:
        """Make two shards with an index: the layers, and all else."""
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        self.shards = {name: files["layers" not in name] for name in self.tensors}
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        self.index = {"metadata": {"total_size": total}, "weight_map": dict(self.shards)}

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, text in self.files.items():
            (folder / name).write_text(text)
        files: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            files.setdefault(self.shards.get(name, "model.safetensors"), {})[name] = tensor
        for file, tensors in files.items():
            save_file(tensors, folder / file, metadata=self.metadata)
        if self.index is not None:
            (folder / "model.safetensors.index.json").write_text(json.dumps(self.index))
        return folder


def side_files() -> dict[str, str]:
    return {
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
        "generation_config.json": json.dumps({"eos_token_id": 2, "do_sample": True, "top_p": 0.9}),
    }


def plain_tensors() -> dict[str, Tensor]:
    """Return the tensors of the model in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).mul(0.02).bfloat16()

    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, shape in SHAPES.items():
            tensors[f"{prefix}.{name}.weight"] = random(*shape)
    return tensors


def quantized(
    scale_shape: Callable[[int, int], tuple[int, ...]], scale: str = "weight_scale"
) -> dict[str, Tensor]:
    """Return the tensors with linears in FP8; all scales are powers of two."""
    tensors = plain_tensors()
    for name in [name for name in tensors if "_proj" in name]:
        module, weight = name.removesuffix(".weight"), tensors[name]
        tensors[name] = (weight.float() * 1024).to(torch.float8_e4m3fn)
        tensors[f"{module}.{scale}"] = torch.full(scale_shape(*weight.shape), 2.0**-10)
    return tensors


def add_kv(tensors: dict[str, Tensor], place: str = "self_attn.{}_scale") -> None:
    for layer in range(LAYERS):
        for kind in "kv":
            name = f"model.layers.{layer}.{place.format(kind)}"
            tensors[name] = torch.full((1,), 2.0**-5)


def add_inputs(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name.replace(".weight", ".input_scale")] = torch.full((1,), 2.0**-4)


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": {**FLOAT8, "dynamic": False, **weights},
        "input_activations": None if inputs is None else {**FLOAT8, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": dict(KV),
        "config_groups": {"group_0": group},
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17.0",
    }


def draft(tensors: dict[str, Tensor], block: dict[str, Any]) -> Draft:
    config = {**copy.deepcopy(CONFIG), "quantization_config": block}
    return Draft(config, tensors, side_files())


def channel_grid(rows: int, columns: int) -> tuple[int, ...]:
    return (rows, 1)


def one(rows: int, columns: int) -> tuple[int, ...]:
    return (1,)


def scalar(rows: int, columns: int) -> tuple[int, ...]:
    return ()


def block_grid(rows: int, columns: int) -> tuple[int, ...]:
    return (-(-rows // 128), -(-columns // 128))


def dynamic() -> Draft:
    tensors = quantized(channel_grid)
    add_kv(tensors)
    return draft(
        tensors, compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True})
    )


def static() -> Draft:
    tensors = quantized(one)
    add_inputs(tensors)
    add_kv(tensors)
    inputs = {"strategy": "tensor", "dynamic": False}
    return draft(tensors, compressed({"strategy": "tensor"}, inputs))


def block() -> Draft:
    tensors = quantized(block_grid)
    add_kv(tensors)
    weights = {"strategy": "block", "block_structure": [128, 128]}
    inputs = {"strategy": "group", "group_size": 128, "dynamic": True}
    return draft(tensors, compressed(weights, inputs))


def fp8_block() -> Draft:
    return draft(
        quantized(block_grid, "weight_scale_inv"),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
    )


def fp8_tensor() -> Draft:
    """AutoFP8's format."""
    tensors = quantized(scalar)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(2.0**-4)
    block = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return draft(tensors, block)


def modelopt() -> Draft:
    tensors = quantized(scalar)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(2.0**-4)
    add_kv(tensors, "self_attn.{0}_proj.{0}_scale")
    block = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }
    result = draft(tensors, block)
    legacy = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    result.files["hf_quant_config.json"] = json.dumps(
        {"producer": block["producer"], "quantization": legacy}
    )
    return result


ALL = ("vllm", "sglang", "transformers", "tensorrt-llm")
BASES: dict[str, tuple[Callable[[], Draft], tuple[str, ...]]] = {
    "dynamic": (dynamic, ALL),
    "static": (static, ALL[:3]),
    "block": (block, ALL),
    "fp8-block": (fp8_block, ALL),
    "fp8-tensor": (fp8_tensor, ("vllm", "sglang", "tensorrt-llm")),
    "modelopt": (modelopt, ("vllm", "sglang", "tensorrt-llm")),
}
"""Name -> how to make it, and the engines for which it has no fault."""
