"""One layer of the decoder: its weights, read by the names that a family gives them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.decoder_ops import StepLayers
from quantkit.runtime.layers import Linear
from quantkit.runtime.mlp import Mlp, read_mlp
from quantkit.runtime.moe import RoutedMlp
from quantkit.runtime.norms import LayerNorm, Norm, RmsNorm
from quantkit.runtime.shapes import ModelShape
from quantkit.runtime.weights import WeightSource


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; a norm that a family lacks is None.

    Shapes: q_norm and k_norm, weights of RMS norms, [head_dim], or of all heads together.
    """

    input_norm: Norm | None
    qkv: Linear  # q, k and v rows
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    attention_norm: Norm | None  # of what attention adds
    post_norm: Norm | None  # in front of the MLP
    mlp: Mlp
    mlp_norm: Norm | None  # of what the MLP adds
    window: int | None
    rotary: int | None  # which rotation

    @classmethod
    def read(cls, reader: WeightSource, shape: ModelShape, number: int) -> DecoderLayer:
        """Read layer `number` of a checkpoint."""
        base = f"model.layers.{number}"
        hidden = shape.hidden_size
        qkv = [f"{base}.self_attn.{leaf}" for leaf in shape.qkv]
        qkv_rows = [shape.query_size, *2 * [shape.kv_size]]
        if len(qkv) == 1:
            qkv_rows = [sum(qkv_rows)]
        out = [f"{base}.self_attn.o_proj"]
        norms = shape.norm_names

        def norm(leaf: str | None) -> Norm | None:
            return read_norm(reader, shape, f"{base}.{leaf}") if leaf else None

        def of_heads(leaf: str | None, features: int) -> Tensor | None:
            return _norm_weight(reader, shape, f"{base}.{leaf}", features) if leaf else None

        return cls(
            input_norm=norm(norms.attention_input),
            qkv=reader.linear(qkv, qkv_rows, hidden, shape.qkv_bias),
            q_norm=of_heads(norms.query, shape.query_norm_size),
            k_norm=of_heads(norms.key, shape.key_norm_size),
            out=reader.linear(out, (hidden,), shape.query_size, shape.out_bias),
            attention_norm=norm(norms.attention_output),
            post_norm=norm(norms.mlp_input),
            mlp=_read_mlp(reader, shape, number),
            mlp_norm=norm(norms.mlp_output),
            window=shape.windows[number],
            rotary=shape.rotary[number],
        )

    def add_to(self, step: StepLayers) -> bool:
        """Append the layer to those of a fused step; False if that cannot run it."""
        qkv, out, mlp = self.qkv.for_step(), self.out.for_step(), self.mlp.for_step()
        if qkv is None or out is None or mlp is None:
            return False
        norms = [self.input_norm, self.post_norm, self.attention_norm, self.mlp_norm]
        weights = [None if norm is None else norm.for_step() for norm in norms]
        if [weight is None for weight in weights] != [norm is None for norm in norms]:
            return False
        before, after, *added = weights
        angles = 0 if self.rotary is None else self.rotary + 1
        heads = (self.q_norm, self.k_norm)
        step.add(before, *heads, after, qkv, out, *mlp, self.window, angles, *added)
        return True


def read_norm(reader: WeightSource, shape: ModelShape, module: str) -> Norm:
    """Read the norm of hidden states called `module`."""
    size = shape.hidden_size
    weight = _norm_weight(reader, shape, module, size)
    if not shape.layer_norms:
        return RmsNorm(weight, shape.norm_eps)
    return LayerNorm(weight, reader.tensor(f"{module}.bias", (size,)), shape.norm_eps)


def _norm_weight(reader: WeightSource, shape: ModelShape, module: str, features: int) -> Tensor:
    weight = reader.tensor(f"{module}.weight", (features,))
    return weight.float() + shape.norm_offset if shape.float32_norms else weight


def _read_mlp(reader: WeightSource, shape: ModelShape, number: int) -> Mlp:
    base = f"model.layers.{number}"
    if shape.experts is not None and shape.experts.layers[number]:
        return RoutedMlp.read(reader, shape, shape.experts, base)
    sizes = (shape.hidden_size, shape.intermediate_size)
    return read_mlp(reader, f"{base}.mlp", sizes, shape.mlp, shape.activation, shape.mlp_bias)
