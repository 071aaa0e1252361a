"""Linear layers that multiply 8-bit inputs with 8-bit weights (W8A8), as GPUs can.

A few rows are no faster that way, because reading the weights is all the time: they keep their
16-bit inputs, which is more accurate. `after_norm` and `after_add_norm` join a layer to the norm in
front of it, so that its input is rounded where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.decoder_ops import StepLinear
from quantkit.gate_ops import gate_mul
from quantkit.numerics import E4M3
from quantkit.row_ops import QuantizedRows, gate_mul_quantize, quantize_rows
from quantkit.runtime.layers import Fp8Linear
from quantkit.runtime.norms import Norm
from quantkit.scaled_ops import MULTIPLE, scaled_gated_mm, scaled_mm
from quantkit.scheme import QuantSpec

FUSED_GATE_FROM: Final[int | None] = None
"""From how many rows act(gate) * up is worked out where the product is, before it is rounded. None:
never, by a second kernel that also rounds for the layer after it, as long as no GPU has shown that
the other is faster; `quantkit bench --kernels` shows both."""


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """An Fp8Linear whose input is rounded to E4M3 when it has more than `few_rows` rows.

    `plain` has the same weights and does not round; `codes` [N', K'] and `scale` float32 [N'] are
    its weight with both sizes rounded up to `MULTIPLE`, the padding being zeros. `input_scale` is
    float32 [1], or None to scale every row on its own.
    """

    plain: Fp8Linear
    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    few_rows: int

    @classmethod
    def wrap(cls, layer: Fp8Linear, few_rows: int) -> Self | None:
        """Return the layer with its input quantizer put to work; None if that does not fit.

        Nor does it where saturation is counted: kernels that round do not count.
        """
        if layer.inputs is None or layer.inputs.saturation is not None:
            return None
        if layer.outliers is not None or layer.scale.shape[1] != 1:
            return None
        if layer.codes.dtype != E4M3.dtype or not _scales_whole_rows(layer.inputs.spec):
            return None
        rows, columns = (-size % MULTIPLE for size in layer.codes.shape)
        codes = layer.codes
        if rows or columns:
            codes = F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(E4M3.dtype)
        return cls(
            plain=layer.without_input_quantizer(),
            codes=codes,
            scale=F.pad(layer.scale.view(-1), (0, rows)),
            bias=None if layer.bias is None else F.pad(layer.bias.float(), (0, rows)),
            input_scale=layer.inputs.scale,
            few_rows=few_rows,
        )

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return y. Shapes: [num_tokens, in_features] -> [num_tokens, out_features]."""
        if len(x) <= self.few_rows:
            return self.plain(x, dtype)
        return self.multiply(quantize_rows(x, self.input_scale), dtype or x.dtype)

    def multiply(self, x: QuantizedRows, dtype: torch.dtype) -> Tensor:
        """Return y of an input that is in 8 bits already."""
        y = scaled_mm(self._padded(x), self.codes, self.scale, self.bias, dtype)
        rows = self.plain.codes.shape[0]
        return y if y.shape[1] == rows else y[:, :rows].contiguous()

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up, the first half of the rows being gate."""
        if len(x) <= self.few_rows:
            return self.plain.gated(x, activation)
        return self.multiply_gated(quantize_rows(x, self.input_scale), activation, x.dtype)

    def multiply_gated(self, x: QuantizedRows, activation: str, dtype: torch.dtype) -> Tensor:
        """Return `gated` of an input that is in 8 bits already."""
        if not self._fuses_gate(x):
            return gate_mul(self.multiply(x, dtype), activation)
        padded = self._padded(x)
        return scaled_gated_mm(padded, self.codes, self.scale, self.bias, dtype, activation)

    def multiply_gated_quantize(
        self, x: QuantizedRows, activation: str, dtype: torch.dtype, scale: Tensor | None
    ) -> QuantizedRows:
        """Return `multiply_gated` as `quantize_rows` rounds it, with `scale`."""
        if self._fuses_gate(x):
            return quantize_rows(self.multiply_gated(x, activation, dtype), scale)
        return gate_mul_quantize(self.multiply(x, dtype), activation, scale)

    def _padded(self, x: QuantizedRows) -> QuantizedRows:
        missing = self.codes.shape[1] - x.codes.shape[1]
        if not missing:
            return x
        padded = F.pad(x.codes.view(torch.uint8), (0, missing)).view(E4M3.dtype)
        return QuantizedRows(padded, x.scales)

    def _fuses_gate(self, x: QuantizedRows) -> bool:
        if FUSED_GATE_FROM is None or len(x.codes) < FUSED_GATE_FROM:
            return False
        whole = self.codes.shape[0] == self.plain.codes.shape[0]  # padding would be half of up
        return whole and gates_in_product(self.codes.device)

    def for_step(self) -> StepLinear | None:
        """Return None: `decoder_step` is for CPUs."""
        return None

    def scaled(self, num_rows: int) -> ScaledLinear | None:
        """Return the layer if it multiplies `num_rows` rows in 8 bits."""
        return self if num_rows > self.few_rows else None

    def decoding(self, num_rows: int) -> Fp8Linear | None:
        """Return the layer for inputs as they are, where it does not round them."""
        return self.plain if num_rows <= self.few_rows else None


class Projection(Protocol):
    """The part of `Linear` that joins it to a norm."""

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [num_tokens, in_features] -> [num_tokens, ...]."""
        ...

    def scaled(self, num_rows: int) -> ScaledLinear | None:
        """Return the layer as one that takes 8-bit rows; None if that is not how it multiplies."""
        ...


def after_norm(linear: Projection, hidden: Tensor, norm: Norm) -> Tensor:
    """Return `linear(norm(hidden))`."""
    scaled = linear.scaled(len(hidden))
    if scaled is None:
        return linear(norm(hidden))
    return scaled.multiply(norm.quantized(hidden, scaled.input_scale), hidden.dtype)


def after_add_norm(
    linear: Projection, hidden: Tensor, delta: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Return `total = hidden + delta` and `linear(norm(total))`."""
    scaled = linear.scaled(len(hidden))
    if scaled is None:
        total, normed = norm.after_add(hidden, delta)
        return total, linear(normed)
    total, rows = norm.quantized_after_add(hidden, delta, scaled.input_scale)
    return total, scaled.multiply(rows, hidden.dtype)


@cache
def gates_in_product(device: torch.device) -> bool:
    """Return whether `scaled_gated_mm` has a kernel for this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _scales_whole_rows(spec: QuantSpec) -> bool:
    return spec.fmt == E4M3 and spec.group_size is None and spec.block_shape is None
