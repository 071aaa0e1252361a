"""Tiny random models of many architectures, and what transformers computes with them.

`CONFIGS` names a config for each. Unlike a fresh model, these have biases that are not zero and
norms that are not one, so that nothing that is dropped goes unseen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.source import open_source
from quantkit.checkpoint import read_checkpoint
from tests import checkpoints, tiny

GPT = {
    "vocab_size": tiny.VOCAB_SIZE,
    "bos_token_id": tiny.BOS_ID,
    "eos_token_id": tiny.EOS_ID,
    "pad_token_id": tiny.PAD_ID,
}
ALTERNATING = ["sliding_attention", "full_attention"]


def _config(kind: str, **fields: Any) -> Any:
    return getattr(transformers, kind)(**fields)


def _like_llama(kind: str, **changes: Any) -> Callable[[], Any]:
    return partial(_config, kind, **{**tiny.LLAMA, **changes})


MORE: dict[str, Callable[[], Any]] = {
    # Two kinds of mask and of rotary embedding in one model.
    "gemma3": _like_llama(
        "Gemma3TextConfig", head_dim=16, sliding_window=5, layer_types=ALTERNATING
    ),
    # The last two layers read the keys that earlier ones cached.
    "gemma4-shared-kv": _like_llama(
        "Gemma4TextConfig",
        head_dim=16,
        num_hidden_layers=4,
        layer_types=ALTERNATING * 2,
        sliding_window=5,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=tiny.VOCAB_SIZE,
    ),
    # Learned positions, and projections around the layers.
    "opt": partial(
        _config,
        "OPTConfig",
        **GPT,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
    ),
    # ALiBi, and layers that return tuples.
    "bloom": partial(_config, "BloomConfig", **GPT, hidden_size=64, n_layer=2, n_head=4),
    "falcon": partial(
        _config, "FalconConfig", **GPT, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    "mpt": partial(_config, "MptConfig", **GPT, d_model=64, n_layers=2, n_heads=4, max_seq_len=64),
    # Fused three-dimensional experts, under other names on disk.
    "mixtral": _like_llama("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    # A shared expert with a gate of its own.
    "qwen2-moe": _like_llama(
        "Qwen2MoeConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
    ),
    "qwen3-moe": _like_llama(
        "Qwen3MoeConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        head_dim=24,
    ),
    "olmoe": _like_llama("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    # A dense layer first, then shared experts, and a router with a bias and groups.
    "deepseek-v3": _like_llama(
        "DeepseekV3Config",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    # Experts that are not split: transposed, with biases, gate and up interleaved.
    "gpt-oss": _like_llama(
        "GptOssConfig", num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=5
    ),
    # Keeps recurrent states beside, or instead of, keys and values.
    "falcon-h1": _like_llama(
        "FalconH1Config", head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_state=8
    ),
    "mamba": partial(
        _config, "MambaConfig", **GPT, hidden_size=64, num_hidden_layers=2, state_size=8
    ),
    # Calls its output head a decoder.
    "modernbert-decoder": _like_llama(
        "ModernBertDecoderConfig", cls_token_id=1, sep_token_id=2, layer_types=ALTERNATING
    ),
}

CONFIGS = {**checkpoints.FAMILIES, **checkpoints.OTHERS, **MORE}


def save(folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a random model of `config` with the tiny tokenizer; return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        checkpoints.randomize(model)
    model.config.dtype = dtype
    model.to(dtype).save_pretrained(folder)
    return tiny.save_tokenizer(folder)


def open_skeleton(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Skeleton:
    """Return the skeleton of a model folder on the CPU."""
    source = open_source(folder)
    return Skeleton(source, source.config(), dtype, torch.device("cpu"))


@torch.no_grad()
def run_whole(
    folder: Path, layer_names: list[str], ids: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Any]:
    """Return each layer's output hidden states, and the cache, of transformers' own forward."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    outputs: list[Tensor] = []

    def record(module: Any, args: Any, output: Any) -> None:
        outputs.append((output if isinstance(output, Tensor) else output[0]).clone())

    for name in layer_names:
        model.get_submodule(name).register_forward_hook(record)
    result = model(ids, use_cache=True)
    return outputs, getattr(result, "cache", None) or result.past_key_values


def dequantized(checkpoint: Path, folder: Path) -> Any:
    """Return transformers' float32 model of a checkpoint's dequantized weights.

    They are saved to `folder` first: transformers merges experts on loading.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.contiguous() for name, tensor in read_checkpoint(checkpoint).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()
