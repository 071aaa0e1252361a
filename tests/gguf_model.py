"""A Llama as GGUF, as llama.cpp's converter writes it. Needs the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from torch import Tensor

from tests import tiny

LLAMA = tiny.LLAMA
HEADS, KV_HEADS = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"]
TOKENS = ["t", "1", "2", *(f"t{number}" for number in range(LLAMA["vocab_size"] - 3))]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of Llama."""
    module = name.removesuffix(".weight")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def as_llama_cpp(name: str, weight: np.ndarray) -> np.ndarray:
    """Return a weight as llama.cpp keeps it: rotary pairs side by side, not half a head apart."""
    heads = {"q": HEADS, "k": KV_HEADS}.get(name.removesuffix("_proj.weight")[-1])
    if heads is None or "self_attn" not in name:
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    kind: str = "F32",
    architecture: str = "llama",
    tokenizer: bool = False,
) -> Path:
    """Write a Llama with the metadata that llama.cpp's converter writes, a tokenizer if asked."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(LLAMA["max_position_embeddings"])
    writer.add_embedding_length(LLAMA["hidden_size"])
    writer.add_block_count(LLAMA["num_hidden_layers"])
    writer.add_feed_forward_length(LLAMA["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(TOKENS)
    writer.add_bos_token_id(tiny.BOS_ID)
    writer.add_eos_token_id(tiny.EOS_ID)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_types([gguf.TokenType.NORMAL] * LLAMA["vocab_size"])
        writer.add_token_merges(["t 1", "t 2"])
    for name, tensor in tensors.items():
        values = as_llama_cpp(name, tensor.float().numpy())
        exact = kind == "F32" or values.ndim == 1 or values.shape[-1] % 32
        ggml = gguf.GGMLQuantizationType["F32" if exact else kind]
        data = gguf.quants.quantize(values, ggml)
        writer.add_tensor(gguf_name(name), data, raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
