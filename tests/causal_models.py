"""A tiny config for every causal language model that transformers has.

Configs of different models call the same size by the same few names, so one table of sizes shrinks
nearly all of them; `SPECIAL` has what some need beside it.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests import tiny

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_SIZES = {
    64: ("hidden_size", "d_model", "n_embd", "dim", "mamba_d_ssm"),
    96: ("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
        "encoder_layers", "num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok",
        "n_group", "expand"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "encoder_attention_heads", "linear_num_value_heads", "num_experts", "num_local_experts",
        "n_routed_experts"),
    16: ("head_dim", "kv_lora_rank", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim",
         "hidden_size_per_layer_input", "mamba_head_dim", "mamba_d_head"),
    48: ("moe_intermediate_size", "shared_expert_intermediate_size"),
    32: ("q_lora_rank",),
    8: ("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "ssm_state_size", "mamba_d_state",
        "chunk_size", "mamba_chunk_size", "mamba_n_heads", "mamba_num_heads", "rotary_dim"),
    5: ("sliding_window",),
    1: ("n_shared_experts", "topk_group", "first_k_dense_replace"),
    0: ("num_kv_shared_layers",),
    tiny.VOCAB_SIZE: ("vocab_size", "vocab_size_per_layer_input"),
}  # fmt: skip
_FIELDS: dict[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names},
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    "bos_token_id": tiny.BOS_ID,
    "eos_token_id": tiny.EOS_ID,
    "pad_token_id": tiny.PAD_ID,
    "is_decoder": True,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _LINEAR_FIRST,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen3_5_moe_text": _LINEAR_FIRST,
    "qwen3_5_text": _LINEAR_FIRST,
    "qwen3_next": _LINEAR_FIRST,
}


def tiny_config(model_type: str) -> Any:
    """Return the config of a model of two layers, 64 wide."""
    kind = CONFIG_MAPPING[model_type]
    aliases = getattr(kind, "attribute_map", {})
    names = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    fields = {name: size for name, size in _FIELDS.items() if name in names or name in aliases}
    for alias, name in aliases.items():
        if name in fields:
            fields.pop(alias, None)
    return kind(**{**fields, **SPECIAL.get(model_type, {})})
