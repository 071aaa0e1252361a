"""Tiny FP8 checkpoints of many model families, written without the calibration pipeline.

`FAMILIES` names a config for each; `build` saves a random model of it and quantizes its linears
with `quantkit.numerics` alone. KV scales are made up: small enough that some keys saturate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quantkit.checkpoint import cached_layers, read_checkpoint
from quantkit.containers import default_container
from quantkit.numerics import amax_to_scale, quantize, tile_amax
from quantkit.scheme import Granularity, QuantSpec, Scheme
from quantkit.shards import ShardReader, ShardWriter, read_json, write_json
from tests import tiny

DYNAMIC = Scheme(QuantSpec(Granularity.CHANNEL), inputs=QuantSpec(Granularity.TOKEN, dynamic=True))
STATIC = Scheme(QuantSpec(Granularity.TENSOR), inputs=QuantSpec(Granularity.TENSOR))
BLOCK = Scheme(
    QuantSpec(Granularity.BLOCK, block_shape=(128, 128)),
    inputs=QuantSpec(Granularity.GROUP, group_size=128, dynamic=True),
)
NATIVE = Scheme(QuantSpec(Granularity.CHANNEL, format="e3m4"), native=True)
SCHEMES = {"dynamic": DYNAMIC, "static": STATIC, "block": BLOCK, "native": NATIVE}

OUTLIERS = {"q_proj": [3, 0], "v_proj": [5], "up_proj": [1, 2], "down_proj": [7]}
"""Input channels that a native checkpoint keeps beside the codes, by module."""

ODD = {
    **tiny.LLAMA,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "vocab_size": 131,
}
"""Nothing is a multiple of 16."""


def _config(kind: str, **changes: Any) -> Any:
    return getattr(transformers, kind)(**{**tiny.LLAMA, **changes})


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": partial(_config, "LlamaConfig"),
    "llama-tied": partial(_config, "LlamaConfig", tie_word_embeddings=True),
    "llama-biases": partial(_config, "LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama-odd": partial(_config, "LlamaConfig", **ODD),
    "llama-wide-block": partial(_config, "LlamaConfig", hidden_size=160, intermediate_size=200),
    "llama-gelu": partial(_config, "LlamaConfig", hidden_act="gelu_pytorch_tanh"),
    "llama-rope-llama3": partial(_config, "LlamaConfig", rope_parameters=LLAMA3_ROPE),
    "llama-rope-linear": partial(_config, "LlamaConfig", rope_parameters=LINEAR_ROPE),
    "llama-rope-yarn": partial(_config, "LlamaConfig", rope_parameters=YARN_ROPE),
    "mistral": partial(_config, "MistralConfig", sliding_window=5, head_dim=24),
    "qwen2": partial(_config, "Qwen2Config"),
    "qwen2-windows": partial(
        _config, "Qwen2Config", use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": partial(_config, "Qwen3Config", head_dim=24),
    "smollm3": partial(_config, "SmolLM3Config", no_rope_layers=[1, 0]),
    "phi3": partial(_config, "Phi3Config", sliding_window=5),
    "phi3-partial": partial(
        _config,
        "Phi3Config",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "phi3-long": partial(
        _config, "Phi3Config", rope_parameters=LONG_ROPE, original_max_position_embeddings=16
    ),
    "starcoder2": partial(_config, "Starcoder2Config", sliding_window=5),
    "starcoder2-no-biases": partial(
        _config, "Starcoder2Config", use_bias=False, tie_word_embeddings=False
    ),
    "granite": partial(
        _config,
        "GraniteConfig",
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.4,
        logits_scaling=2.5,
    ),
    "gemma": partial(_config, "GemmaConfig", head_dim=24, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": partial(
        _config, "Gemma2Config", head_dim=16, sliding_window=5, attn_logit_softcapping=2.0
    ),
    # Two rotary embeddings, by kind of layer; heads whose size is not what scales their scores.
    "gemma3": partial(
        _config,
        "Gemma3TextConfig",
        head_dim=24,
        query_pre_attn_scalar=10,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=3.0,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
        },
    ),
    "olmo2": partial(_config, "Olmo2Config"),
    "olmo3": partial(
        _config,
        "Olmo3Config",
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": YARN_ROPE,
        },
    ),
}
"""Models that the decoder runs itself."""

OTHERS: dict[str, Callable[[], Any]] = {
    "gpt-neox": partial(_config, "GPTNeoXConfig"),
    "phi": partial(_config, "PhiConfig", partial_rotary_factor=0.5),
    "llama-rope-dynamic": partial(
        _config,
        "LlamaConfig",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
    ),
}
"""Models that run through transformers."""


def build(
    folder: Path,
    config: Any,
    scheme: Scheme = DYNAMIC,
    kv: str = "none",
    dtype: torch.dtype = torch.float32,
    ignore: tuple[str, ...] = ("lm_head",),
) -> Path:
    """Save a random model and its FP8 checkpoint; return the checkpoint's folder.

    Biases and norms are random too, biases with a deviation of 50. `kv` is "none", "fp8" (one
    scale per layer) or "fp8-head".
    """
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.config.dtype = dtype
    model.to(dtype).save_pretrained(folder / "source")
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    ignored = tuple(name for name in linears if name.endswith(ignore))
    return quantize_folder(folder / "source", folder / "fp8", scheme, kv, linears, ignored)


def randomize(model: nn.Module) -> None:
    """Give every parameter values that matter: no zero biases, no norms of one."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=50.0 if "proj" in name else 0.5)
        elif parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=2.0 / parameter.shape[-1] ** 0.5)


def quantize_folder(
    source: Path,
    target: Path,
    scheme: Scheme,
    kv: str,
    linears: list[str],
    ignored: tuple[str, ...],
) -> Path:
    """Write `source` as a compressed-tensors FP8 checkpoint into the new folder `target`."""
    target.mkdir()
    reader, writer = ShardReader(source), ShardWriter(target)
    config = read_json(source / "config.json")
    for name in reader.names:
        module = name.removesuffix(".weight")
        if module in linears and module not in ignored:
            for key, tensor in _quantized(module, reader.tensor(name), scheme).items():
                writer.add(key, tensor)
        else:
            writer.add(name, reader.tensor(name))
    for name, tensor in _kv_scales(config, linears, kv).items():
        writer.add(name, tensor)
    writer.finish()
    kv_spec = None if kv == "none" else QuantSpec(KV_GRANULARITIES[kv])
    written = replace(scheme, kv=kv_spec, ignore=ignored)
    block = default_container(written).to_config(written)
    write_json(target / "config.json", {**config, "quantization_config": block})
    return target


KV_GRANULARITIES = {"fp8": Granularity.TENSOR, "fp8-head": Granularity.HEAD}


def reference_model(checkpoint: Path) -> Any:
    """Return the transformers model with the checkpoint's dequantized weights, in float32."""
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = read_checkpoint(checkpoint)
    if "embed_out.weight" in weights:  # GPT-NeoX has its own name for it on disk
        weights["lm_head.weight"] = weights.pop("embed_out.weight")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return model.eval()


def _quantized(module: str, weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    spec = scheme.weights
    outliers = sorted(OUTLIERS.get(module.split(".")[-1], [])) if scheme.native else []
    exact = weight[:, outliers].bfloat16()
    weight = weight.index_fill(1, torch.tensor(outliers, dtype=torch.int64), 0.0)
    tile = spec.tile(*weight.shape)
    grid = amax_to_scale(tile_amax(weight, tile), spec.fmt)
    tensors = {
        f"{module}.weight": quantize(weight, grid, spec.fmt, tile),
        f"{module}.weight_scale": grid.reshape(spec.scale_shape(*weight.shape)),
    }
    if outliers:
        tensors[f"{module}.outlier_columns"] = torch.tensor(outliers, dtype=torch.int32)
        tensors[f"{module}.outlier_weight"] = exact
    if scheme.inputs is not None and not scheme.inputs.dynamic:
        tensors[f"{module}.input_scale"] = torch.tensor([0.0625])
    return tensors


def _kv_scales(config: dict[str, Any], linears: list[str], kv: str) -> dict[str, Tensor]:
    if kv == "none":
        return {}
    neox = config["model_type"] == "gpt_neox"
    heads = config["num_attention_heads" if neox else "num_key_value_heads"]
    attention = "attention" if neox else "self_attn"
    base = next(name for name in linears if f".0.{attention}." in name).split(".0.")[0]
    tensors = {}
    for layer in cached_layers(config):
        for kind, size in (("k_scale", 2.0**-6), ("v_scale", 2.0**-7)):
            scale = torch.tensor([size])
            if kv == "fp8-head":
                scale = (size * torch.arange(1.0, heads + 1)).view(-1, 1, 1)
            tensors[f"{base}.{layer}.{attention}.{kind}"] = scale
    return tensors


# Damage, for tests of what is refused.


def tensor(folder: Path, name: str) -> Tensor:
    """Return a copy of one tensor of a checkpoint."""
    return ShardReader(folder).tensor(name).clone()


def add(folder: Path, name: str, value: Tensor) -> None:
    """Add or replace one tensor."""
    _rewrite(folder, lambda tensors: {**tensors, name: value})


def rename(folder: Path, old: str, new: str | None) -> None:
    """Rename a tensor or all tensors of a module; None removes them."""

    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, value in tensors.items():
            if name != old and not name.startswith(f"{old}."):
                out[name] = value
            elif new is not None:
                out[new + name.removeprefix(old)] = value
        return out

    _rewrite(folder, changed)


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one."""
    config = {**read_json(folder / "config.json"), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    write_json(folder / "config.json", kept)


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    reader = ShardReader(folder)
    tensors = change({name: reader.tensor(name).clone() for name in reader.names})
    writer = ShardWriter(folder)
    for name, value in sorted(tensors.items()):
        writer.add(name, value)
    writer.finish()
