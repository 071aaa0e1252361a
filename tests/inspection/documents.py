"""Checkpoint folders for the tests of inspection: a quantkit.json with all facts, or an older one.

Two layers of a small Llama. In layer 1, down_proj is kept in bf16, its input has a massive channel,
and the keys are flagged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPES = {
    "self_attn.q_proj": [16, 8],
    "self_attn.k_proj": [8, 8],
    "self_attn.v_proj": [8, 8],
    "self_attn.o_proj": [8, 16],
    "mlp.gate_proj": [24, 8],
    "mlp.up_proj": [24, 8],
    "mlp.down_proj": [8, 24],
}
KEPT = "model.layers.1.mlp.down_proj"
INPUTS = {"q": "attention", "k": "attention", "v": "attention", "gate": "mlp", "up": "mlp"}
PREDICTED = {"attention": 0.002, "o": 0.001, "mlp": 0.004, "down": 0.003}


def document(num_layers: int = 2) -> dict[str, Any]:
    """Return a quantkit.json with every fact that this version writes."""
    layers = [_layer(number) for number in range(num_layers)]
    return {
        "quantkit_version": "0.1.0",
        "profile": "portable",
        "recipe": {"name": "fp8-dynamic", "kv": "fp8"},
        "seed": 7,
        "dtype": "auto",
        "source": {"name": "tiny model", "fingerprint": "c1de"},
        "data": {
            "sources": [{"source": "builtin"}, {"source": "chats.jsonl"}],
            "samples": 32,
            "tokens": 16384,
            "seq_len": 512,
            "sha256": "ba2c",
        },
        "versions": {"torch": "2.13.0"},
        "source_bytes": 20_000_000,
        "target_bytes": 12_000_000,
        "tiers": {"range": True, "compensation": True, "smoothing": False, "keep": True},
        "sensitivity": {"tokens": 2048, "predicted_kl": 0.02, "budget": 1.1},
        "layers": layers,
        "warnings": ["16 of 32 samples usable"],
    }


def older_document(num_layers: int = 2) -> dict[str, Any]:
    """Return what the first version wrote: of modules the weight's error alone."""
    value = document(num_layers)
    for key in ("tiers", "sensitivity", "dtype"):
        del value[key]
    for layer in value["layers"]:
        del layer["kv"]
        layer["modules"] = [
            {"name": m["name"], "shape": m["shape"], "weight_sqnr_db": 31.0, "input_amax": None}
            for m in layer["modules"]
        ]
    return value


def write_folder(folder: Path, value: dict[str, Any], weights: bool = False) -> Path:
    """Write quantkit.json, and with `weights` the tensors it speaks of and a bf16 embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quantkit.json").write_text(json.dumps(value))
    if weights:
        tensors = {
            "model.embed_tokens.weight": torch.zeros(100, 8, dtype=torch.bfloat16),
            "model.norm.weight": torch.zeros(8, dtype=torch.bfloat16),
        }
        for layer in value["layers"]:
            tensors[f"{layer['name']}.self_attn.k_scale"] = torch.ones(1)
            for module in layer["modules"]:
                name, shape = module["name"], module["shape"]
                kept = module.get("tiers") == ["keep"]
                dtype = torch.bfloat16 if kept else torch.float8_e4m3fn
                tensors[f"{name}.weight"] = torch.zeros(shape, dtype=dtype)
                if not kept:
                    tensors[f"{name}.weight_scale"] = torch.ones(shape[0], 1)
        save_file(tensors, folder / "model.safetensors")
    return folder


def _layer(number: int) -> dict[str, Any]:
    return {
        "name": f"model.layers.{number}",
        "output_sqnr_db": 25.0 + number,
        "scales": {},
        "kv": {
            "key_error_db": 30.0 - 10 * number,
            "value_error_db": 31.0,
            "output_error_db": 28.0,
            "key_channel_ratio": 5.0 + 100 * number,
            "flagged": number == 1,
        },
        "modules": [_module(number, name, shape) for name, shape in SHAPES.items()],
    }


def _module(number: int, place: str, shape: list[int]) -> dict[str, Any]:
    name = f"model.layers.{number}.{place}"
    stem = place.rpartition(".")[2].removesuffix("_proj")
    group = INPUTS.get(stem, stem)
    weights = shape[0] * shape[1]
    if name == KEPT:
        # What is kept is not measured.
        kept = {"tiers": ["keep"], "format": None, "bytes": 2 * weights}
        return {"name": name, "shape": shape, **kept, "predicted_kl": PREDICTED[group]}
    return {
        "name": name,
        "shape": shape,
        "tiers": [] if stem == "o" else ["range", "compensation"],
        "format": "e4m3",
        "weight_sqnr_db": 31.0,
        "plain_output_sqnr_db": 30.0,
        "output_sqnr_db": 30.0 if stem == "o" else 33.0 + number,
        "outlier_ratio": 4.0 + number,
        "input_outlier_ratio": 50.0 if stem == "down" else 10.0,
        "input_amax": 1000.0 if stem == "down" else 12.0 + len(group),
        "top_input_channels": [[5, 10.0], [3, 4.0], [1, 2.0], [0, 1.0]],
        "num_clipped": 3,
        "outlier_columns": 0,
        "bytes": weights + 4 * shape[0],
        "predicted_kl": PREDICTED[group],
    }
