"""The sizes and options of one model, as the decoder needs them.

What is not in the table of `families`, or sets an option that the decoder does not have, raises
UnsupportedError here, and is then run through transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedError, first_line
from quantkit.runtime.families import (
    ACTIVATIONS,
    FAMILIES,
    GATED,
    QKV,
    ExpertNames,
    Family,
    MlpNames,
)
from quantkit.runtime.logits_rule import LogitsRule
from quantkit.runtime.rope import check_rope, head_dim, long_from, rotary_layers

_KNOWN_OPTIONS = frozenset(
    (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache",
        "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp", "tie_word_embeddings",
        "rope_parameters", "attention_bias", "attention_dropout", "mlp_bias",
        "use_sliding_window", "sliding_window", "max_window_layers", "layer_types",
        "no_rope_layers", "no_rope_layer_interval", "qkv_bias",
        "resid_pdrop", "embd_pdrop", "original_max_position_embeddings",
        "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
        "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob",
        "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step",
        "hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping",
        "attn_logit_softcapping", "use_bidirectional_attention", "norm_epsilon", "use_bias",
        "residual_dropout", "embedding_dropout",
        "mlp_only_layers", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    )
)  # fmt: skip


_SPECIAL_FLOATS = ("Infinity", "-Infinity", "NaN")
"""Numbers that JSON lacks, as transformers spells them."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of each layer that has some; `names` as in Family."""

    names: ExpertNames
    count: int
    chosen: int  # experts a token
    intermediate_size: int  # of one expert
    shared_size: int | None  # of the expert that every token goes to; None if there is none
    normalizes: bool
    layers: tuple[bool, ...]  # per layer; False has a plain MLP


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a layer, by their names within it; None where there is none."""

    attention_input: str | None
    attention_output: str | None
    mlp_input: str | None
    mlp_output: str | None
    query: str | None
    key: str | None


_MLP_INPUT = {False: "post_attention_layernorm", True: "pre_feedforward_layernorm"}
"""The norm in front of the MLP, without norms of what is added and with them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes and options of one model, as the decoder needs them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int  # tokens
    norm_eps: float
    activation: str  # a value of ACTIVATIONS
    tied: bool  # the output head is the embedding
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    softmax_scale: float
    windows: tuple[int | None, ...]  # per layer; tokens a query sees, itself included
    rotary: tuple[int | None, ...]  # per layer, which rotation; None leaves positions out
    qkv: tuple[str, ...] = QKV
    mlp: MlpNames = GATED
    layer_norms: bool = False
    long_from: int | None = None  # tokens beyond which a sequence takes rotation 1 in place of 0
    qk_norm_together: bool = False
    input_norms: bool = True
    output_norms: bool = False
    float32_norms: bool = False
    norm_offset: float = 0.0
    experts: ExpertShape | None = None
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False  # to the dtype of activations
    scores_cap: float | None = None  # scores of attention become cap * tanh(scores / cap)
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits: LogitsRule = field(default_factory=LogitsRule)

    @property
    def norm_names(self) -> NormNames:
        """What a layer's norms are called."""
        return NormNames(
            "input_layernorm" if self.input_norms else None,
            "post_attention_layernorm" if self.output_norms else None,
            _MLP_INPUT[self.output_norms] if self.input_norms else None,
            "post_feedforward_layernorm" if self.output_norms else None,
            "self_attn.q_norm" if self.qk_norm else None,
            "self_attn.k_norm" if self.qk_norm else None,
        )

    @property
    def query_norm_size(self) -> int:
        """Features that a norm of q goes over."""
        return self.query_size if self.qk_norm_together else self.head_dim

    @property
    def key_norm_size(self) -> int:
        """Features that a norm of k goes over."""
        return self.kv_size if self.qk_norm_together else self.head_dim

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    @property
    def query_size(self) -> int:
        """Rows of q_proj."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.num_kv_heads * self.head_dim


def parse_config(config: Mapping[str, Any]) -> Any:
    """Return the transformers config object for the contents of a config.json.

    It fills in the defaults that old files leave out. Raises UnsupportedError for a model_type
    that the installed transformers does not know.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"config.json has model_type {repr(model_type)[:80]}, which transformers "
            f"{transformers.__version__} does not know; a newer one may"
        )
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        return CONFIG_MAPPING[model_type].from_dict(_with_floats(plain))
    except Exception as error:  # its own checks of a config raise of every kind
        raise CheckpointError(
            f"config.json is not a valid {model_type} config: {first_line(error)}"
        ) from error


def _with_floats(value: Any) -> Any:
    """Return a value of a config.json with infinities as numbers: `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in _SPECIAL_FLOATS:
        return float(value["__float__"])
    return {key: _with_floats(item) for key, item in value.items()}


def model_shape(config: Any) -> ModelShape:
    """Return the shape of the model that a transformers config describes.

    Raises UnsupportedError, saying which option, when the decoder cannot run it.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedError(f"model_type {config.model_type!r} has no entry in the table")
    unknown = sorted(set(type(config).__annotations__) - _KNOWN_OPTIONS)
    if unknown:
        raise UnsupportedError(f"option {unknown[0]!r} of {config.model_type} is not known")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act {activation!r} is not known")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError("use_bidirectional_attention is not known")
    check_rope(config)
    attention_bias, mlp_bias = (
        bool(getattr(config, option, False)) for option in family.biases or ("", "")
    )
    query_size = getattr(config, "query_pre_attn_scalar", None) or head_dim(config)
    softmax_scale = getattr(config, "attention_multiplier", None) or query_size**-0.5
    multiplier = getattr(config, "embedding_multiplier", 1.0)
    if family.scales_embedding:
        multiplier = config.hidden_size**0.5
    return ModelShape(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        max_context=config.max_position_embeddings,
        norm_eps=config.norm_epsilon if family.layer_norms else config.rms_norm_eps,
        activation=ACTIVATIONS[activation],
        tied=bool(config.tie_word_embeddings),
        qkv_bias=family.qkv_bias or attention_bias or bool(getattr(config, "qkv_bias", False)),
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
        qkv=family.qkv,
        mlp=family.mlp,
        layer_norms=family.layer_norms,
        qk_norm=family.qk_norm,
        qk_norm_together=family.qk_norm_together,
        input_norms=family.input_norms,
        output_norms=family.output_norms,
        float32_norms=family.float32_norms,
        norm_offset=family.norm_offset,
        softmax_scale=float(softmax_scale),
        windows=_windows(config, family),
        rotary=rotary_layers(config),
        long_from=long_from(config),
        experts=_experts(config, family.experts) if family.experts else None,
        embedding_multiplier=float(multiplier),
        rounds_multiplier=family.scales_embedding,
        scores_cap=getattr(config, "attn_logit_softcapping", None),
        residual_multiplier=float(getattr(config, "residual_multiplier", 1.0)),
        logits=LogitsRule.of(config),
    )


def _windows(config: Any, family: Family) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None)
    if family.window_everywhere or window is None or not kinds:
        everywhere = window if family.window_everywhere else None
        return (everywhere,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(config: Any, names: ExpertNames) -> ExpertShape:
    count = int(getattr(config, "num_experts", None) or config.num_local_experts)
    step = getattr(config, "decoder_sparse_step", 1)
    plain = getattr(config, "mlp_only_layers", None) or ()
    numbers = range(int(config.num_hidden_layers))
    return ExpertShape(
        names=names,
        count=count,
        chosen=int(config.num_experts_per_tok),
        intermediate_size=getattr(config, "moe_intermediate_size", config.intermediate_size),
        shared_size=getattr(config, "shared_expert_intermediate_size", None),
        normalizes=names.normalizes or bool(getattr(config, "norm_topk_prob", False)),
        layers=tuple(n not in plain and (n + 1) % step == 0 for n in numbers),
    )
