"""The checkpoints in tests/fixtures/foreign: their names, copies of them, and damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit import load_fp8
from tests.checkpoints import edit_config

FOREIGN = Path(__file__).parent / "fixtures" / "foreign"
BLOCKS = {
    "llmcompressor-block-odd": (128, 128),
    "modelopt-block": (128, 128),
    "transformers-block": (128, 128),
    "transformers-ue8m0": (32, 32),
}
NAMES = sorted(path.name for path in FOREIGN.iterdir())
KV = ["autofp8-static-kv", "llmcompressor-dynamic-kv-heads", "llmcompressor-static-kv"]
KV += ["modelopt-fp8-kv", "quark-fp8-kv"]
LLMC, AUTO, BLOCK = "llmcompressor-static-kv", "autofp8-static-kv", "transformers-block"
MODELOPT, QUARK = "modelopt-fp8-kv", "quark-fp8-kv"
LAYER = "model.layers.0"
Q, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj"
E4M3 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]

KV_NAMES = {
    "autofp8-static-kv": ("k_proj.output_scale", "v_proj.output_scale"),
    "llmcompressor-dynamic-kv-heads": ("k_scale", "v_scale"),
    "llmcompressor-static-kv": ("k_scale", "v_scale"),
    "modelopt-fp8-kv": ("k_proj.k_scale", "v_proj.v_scale"),
    "quark-fp8-kv": ("k_scale", "v_scale"),
}


def ids(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, vocab_size, (3, 20), generator=generator)


def config_of(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOREIGN / name / "config.json").read_text())
    return value


def edit(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_block(folder: Path, **changes: Any) -> Path:
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config={**block, **changes})
    return folder


def same_logits(folder: Path, name: str) -> bool:
    tokens = ids(config_of(name)["vocab_size"])
    options = {"dtype": "float32", "activations": "full"}
    found, expected = (load_fp8(f, **options).logits(tokens) for f in (folder, FOREIGN / name))
    return torch.equal(found, expected)
