"""A decoder with random weights, for measuring speed at sizes that no file is at hand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.numerics import E4M3
from quantkit.ops import CUDA_FEW_ROWS
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.layers import DenseLinear, Fp8Linear, InputQuantizer, Linear
from quantkit.runtime.placement import Placement
from quantkit.runtime.rotation import Rotation
from quantkit.runtime.scaled_linear import ScaledLinear
from quantkit.runtime.shapes import ModelShape
from quantkit.scheme import Granularity, QuantSpec

LLAMA_3_8B = ModelShape(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context=131072,
    norm_eps=1e-5,
    activation="silu",
    tied=False,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    softmax_scale=128**-0.5,
    windows=(None,) * 32,
    rotary=(0,) * 32,
)
"""Sizes of Llama 3 8B (its config.json)."""

_TOKEN = QuantSpec(granularity=Granularity.TOKEN, dynamic=True)


class RandomWeights:
    """A WeightSource: normal values of the size that keeps activations near 1.

    Quantized: E4M3 with one scale per output row, inputs quantized per token as an fp8-dynamic
    checkpoint declares; up to `few_rows` rows keep theirs. Otherwise plain values in `dtype`.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantized: bool,
        few_rows: int = CUDA_FEW_ROWS,
        seed: int = 0,
    ) -> None:
        self.device = torch.empty(0, device=device).device  # with the number of its GPU
        self.dtype = dtype
        self._quantized = quantized
        self._few_rows = few_rows
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._elsewhere: dict[torch.device, RandomWeights] = {}

    def on(self, device: torch.device) -> RandomWeights:
        """Return a source of the same kind on another device; always the same one."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            seed = 1 + len(self._elsewhere)
            other = RandomWeights(device, self.dtype, self._quantized, self._few_rows, seed)
            self._elsewhere[device] = other
        return self._elsewhere[device]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return random values; about 1 for norms."""
        values = self._normal(*shape)
        return 1 + 0.1 * values if len(shape) == 1 else values

    def linear(
        self, modules: Sequence[str], rows: Sequence[int], columns: int, bias: bool
    ) -> Linear:
        """Return a layer of `sum(rows)` rows."""
        count = sum(rows)
        offset = self._normal(count) if bias else None
        if not self._quantized:
            return self._dense(count, columns, offset)
        codes = (self._normal(count, columns) * 100).clamp(-448, 448).to(E4M3.dtype)
        scale = torch.full((count, 1), 0.01 * columns**-0.5, device=self.device)
        layer = Fp8Linear(codes, scale, columns, offset, InputQuantizer(_TOKEN))
        scaled = ScaledLinear.wrap(layer, self._few_rows) if self.device.type == "cuda" else None
        return scaled or layer.without_input_quantizer()

    def head(self, module: str, embedding: Tensor, tied: bool) -> Linear:
        """Return an output head that is not quantized."""
        return DenseLinear(embedding) if tied else self._dense(*embedding.shape)

    def check_all_used(self) -> None:
        """Do nothing: there is no end of random weights."""

    def _dense(self, rows: int, columns: int, bias: Tensor | None = None) -> DenseLinear:
        return DenseLinear(self._normal(rows, columns) * columns**-0.5, bias)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)


def random_decoder(
    shape: ModelShape,
    weights: RandomWeights,
    quantized_kv: bool,
    rope_theta: float = 500000.0,
    placement: Placement | None = None,
) -> Decoder:
    """Return a decoder of `shape`; with `quantized_kv` keys and values are E4M3 codes."""
    placement = placement or Placement.on(weights.device, shape.num_layers)
    exponents = torch.arange(0, shape.head_dim, 2, device=weights.device).float() / shape.head_dim
    scales = None
    if quantized_kv:
        units = [torch.full((1,), 1 / 64, device=device) for device in placement.layers]
        scales = [(unit, unit) for unit in units]
    rotation = Rotation(rope_theta**-exponents, 1.0)
    return Decoder(weights, shape, [rotation], scales, placement=placement)
