"""Which models the decoder can run: a table from `model_type` to what is particular about each.

The sizes of one model come from its config, see `shapes`.
"""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Names of `hidden_act` in configs, and ours."""


@dataclass(frozen=True, slots=True)
class MlpNames:
    """What checkpoints call the linears of an MLP, and whether it is a gated one.

    `inputs` are stacked: gate and up, or one matrix that holds both; without a gate, up alone.
    """

    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    output: str = "down_proj"
    gated: bool = True


QKV = ("q_proj", "k_proj", "v_proj")
GATED = MlpNames()


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What checkpoints call a layer's experts, and what is particular about their router."""

    block: str = "mlp"  # holds the router, `gate`, and `experts`
    mlp: MlpNames = GATED
    normalizes: bool = False  # chosen probabilities sum to one, whatever the config says
    rounds: bool = True  # probabilities are rounded to the dtype of activations


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type does beside the plain Llama decoder."""

    qkv: tuple[str, ...] = QKV  # or one matrix that holds all three
    mlp: MlpNames = GATED
    qkv_bias: bool = False  # q, k and v have biases whatever the config says
    biases: tuple[str, str] | None = None  # options that give attention and MLP biases
    qk_norm: bool = False  # RMS norm over each head of q and k, before the rotary embedding
    qk_norm_together: bool = False  # that norm is over all heads at once
    layer_norms: bool = False  # norms with mean and bias, not RMS norms
    input_norms: bool = True  # norms in front of attention and of the MLP
    output_norms: bool = False  # norms of what attention and the MLP add
    float32_norms: bool = False  # the weight multiplies before the normalized value is rounded
    norm_offset: float = 0.0  # added to the weights of norms
    scales_embedding: bool = False  # by the root of the hidden size
    window_everywhere: bool = False  # sliding_window counts in all layers, not by layer_types
    experts: ExpertNames | None = None  # MLPs are lists of experts


_BIASES = ("attention_bias", "mlp_bias")

_OLMO = Family(
    biases=_BIASES,
    qk_norm=True,
    qk_norm_together=True,
    input_norms=False,
    output_norms=True,
    float32_norms=True,
)

FAMILIES = {
    "llama": Family(biases=_BIASES),
    "mistral": Family(window_everywhere=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(biases=_BIASES, qk_norm=True),
    "smollm3": Family(biases=_BIASES),
    "phi3": Family(
        window_everywhere=True, qkv=("qkv_proj",), mlp=MlpNames(inputs=("gate_up_proj",))
    ),
    "starcoder2": Family(
        mlp=MlpNames(inputs=("c_fc",), output="c_proj", gated=False),
        biases=("use_bias", "use_bias"),
        layer_norms=True,
        window_everywhere=True,
    ),
    "granite": Family(biases=_BIASES),
    "gemma": Family(biases=_BIASES, float32_norms=True, norm_offset=1.0, scales_embedding=True),
    "gemma2": Family(
        biases=_BIASES,
        output_norms=True,
        float32_norms=True,
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "gemma3_text": Family(
        biases=_BIASES,
        qk_norm=True,
        output_norms=True,
        float32_norms=True,
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "mixtral": Family(
        window_everywhere=True,
        experts=ExpertNames(
            "block_sparse_moe", MlpNames(("w1", "w3"), "w2"), normalizes=True, rounds=False
        ),
    ),
    "qwen2_moe": Family(experts=ExpertNames()),
    "qwen3_moe": Family(
        biases=_BIASES, qk_norm=True, window_everywhere=True, experts=ExpertNames()
    ),
}
