"""The layers a decoder is made of: FP8 and plain linears, input quantization.

Layers that read one input (q/k/v, gate/up) are stacked by rows into one. Nothing here knows the
names of tensors or the order of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quantkit import dense_ops, ops
from quantkit.decoder_ops import StepLinear
from quantkit.errors import CheckpointError
from quantkit.numerics import Format, amax_to_scale, decode, fake_quantize, tile_amax
from quantkit.outliers import Outliers
from quantkit.quantized_weight import QuantizedWeight
from quantkit.runtime.saturation import Saturation
from quantkit.scheme import QuantSpec

if TYPE_CHECKING:
    from quantkit.runtime.scaled_linear import ScaledLinear


class Linear(Protocol):
    """Rows in, rows out. `gated` is for a stack of gate and up: `act(gate) * up`."""

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Shapes: [num_tokens, in_features] -> [num_tokens, out_features], `dtype` or as x."""
        ...

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Shapes: [num_tokens, in_features] -> [num_tokens, out_features / 2]."""
        ...

    def for_step(self) -> StepLinear | None:
        """Return the layer as `decoder_step` takes it; None if it does more than that can do."""
        ...

    def scaled(self, num_rows: int) -> ScaledLinear | None:
        """Return the layer as one that takes 8-bit rows; None if that is not how it multiplies."""
        ...

    def decoding(self, num_rows: int) -> Fp8Linear | None:
        """Return what decodes weights inside the product of `num_rows` rows, if that is done."""
        ...


@dataclass(frozen=True, slots=True)
class InputQuantizer:
    """Round the inputs of a linear to 8 bits, as an engine with 8-bit matmuls does.

    `scale` is float32 [1] when the spec is static, otherwise None. A dynamic spec takes its scale
    from each token or group; with granularity *tensor* it would depend on the other rows of the
    batch, so there every token is scaled on its own too. What a static scale cannot hold is
    counted in `saturation`, under `name`.
    """

    spec: QuantSpec
    scale: Tensor | None = None
    name: str = ""
    saturation: Saturation | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return what is left of x. Shapes: [num_tokens, in_features], dtype of x."""
        if self.scale is not None:
            if self.saturation is not None:
                self.saturation.count(self.name, x, self.scale * self.spec.fmt.max)
            whole = (x.shape[0], x.shape[1])
            return fake_quantize(x, self.scale.view(1, 1), self.spec.fmt, whole)
        tile = (1, self.spec.group_size or x.shape[1])
        scale = amax_to_scale(tile_amax(x, tile), self.spec.fmt)
        return fake_quantize(x, scale, self.spec.fmt, tile)


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """`y = x @ (codes * scale).T + bias`, the weight decoded inside the kernel.

    Shapes: codes [out_features, in_features]; scale float32 [out_features, groups], a group being
    `group_size` columns; bias [out_features] or None.
    """

    codes: Tensor
    scale: Tensor
    group_size: int
    bias: Tensor | None = None
    inputs: InputQuantizer | None = None
    outliers: Outliers | None = None

    @classmethod
    def stack(cls, weights: Sequence[QuantizedWeight], inputs: QuantSpec | None) -> Fp8Linear:
        """Stack layers that read the same input; `inputs` says how to quantize it, if at all.

        A single layer stays in its file's memory, several are copied into one.
        """
        scales, group_sizes = zip(*(weight.row_scales() for weight in weights), strict=True)
        if len(set(group_sizes)) > 1:
            raise CheckpointError(f"layers with group sizes {group_sizes} cannot be stacked")
        formats = {weight.spec.format for weight in weights}
        if len(formats) > 1:
            raise CheckpointError(
                f"layers that read the same input have the formats {', '.join(sorted(formats))}; "
                "they must agree"
            )
        return cls(
            codes=_stack_rows([weight.codes for weight in weights]),
            scale=_stack_rows(scales),
            group_size=group_sizes[0],
            bias=_stack_biases(weights),
            inputs=_input_quantizer(weights, inputs),
            outliers=_stack_outliers(weights),
        )

    def to(self, device: torch.device) -> Fp8Linear:
        """Return the same layer on another device."""
        bias = None if self.bias is None else self.bias.to(device)
        inputs = self.inputs
        if inputs is not None and inputs.scale is not None:
            inputs = replace(inputs, scale=inputs.scale.to(device))
        outliers = None if self.outliers is None else self.outliers.to(device)
        codes, scale = self.codes.to(device), self.scale.to(device)
        return Fp8Linear(codes, scale, self.group_size, bias, inputs, outliers)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return y. Shapes: [num_tokens, in_features] -> [num_tokens, out_features]."""
        x = x if self.inputs is None else self.inputs(x)
        return ops.fp8_linear(
            x, self.codes, self.scale, self.bias, self.group_size, dtype, self.outliers
        )

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up, the first half of the rows being gate."""
        x = x if self.inputs is None else self.inputs(x)
        return ops.fp8_gated_linear(
            x, self.codes, self.scale, self.bias, self.group_size, activation, self.outliers
        )

    def for_step(self) -> StepLinear | None:
        """Return the layer for `decoder_step`; None if it has more to do than the kernel can."""
        if self.inputs is not None:
            return None
        return StepLinear(self.codes, self.scale, self.bias, self.group_size, self.outliers)

    def scaled(self, num_rows: int) -> None:
        """Return None: inputs are rounded, if at all, to values of their own dtype."""
        return None

    def decoding(self, num_rows: int) -> Fp8Linear | None:
        """Return the layer, unless it rounds its inputs."""
        return self if self.inputs is None else None

    def counting(self, name: str, saturation: Saturation) -> Fp8Linear:
        """Return the layer with the saturation of its inputs counted under `name`."""
        if self.inputs is None:
            return self
        return replace(self, inputs=replace(self.inputs, name=name, saturation=saturation))

    def without_input_quantizer(self) -> Fp8Linear:
        """Return the layer for inputs as they are."""
        return replace(self, inputs=None)


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """`y = x @ weight.T + bias` for layers that were left unquantized.

    Shapes: weight [out_features, in_features], bias [out_features] or None, in any float dtype.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return y. Shapes: [num_tokens, in_features] -> [num_tokens, out_features]."""
        return dense_ops.linear(x, self.weight, self.bias, dtype)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up, the first half of the rows being gate."""
        return dense_ops.gated_linear(x, self.weight, self.bias, activation)

    def for_step(self) -> StepLinear:
        """Return the layer for `decoder_step`."""
        return StepLinear(self.weight, bias=self.bias)

    def scaled(self, num_rows: int) -> None:
        """Return None: nothing is in 8 bits."""
        return None

    def decoding(self, num_rows: int) -> None:
        """Return None: nothing is in 8 bits."""
        return None


def check_codes(name: str, codes: Tensor, fmt: Format) -> None:
    """Raise CheckpointError if any code of tensor `name` is NaN or infinite."""
    every = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    special = ~decode(every, fmt).isfinite()
    lowest = int(special.nonzero()[0])  # in every format, all magnitudes from some code on
    if not _any_magnitude_from(lowest, codes.view(torch.uint8)):
        return
    magnitude = codes.view(torch.uint8) & 0x7F
    row, column = (int(i) for i in (magnitude >= lowest).nonzero()[0])
    kind = "a NaN" if fmt.name == "e4m3" else "a NaN or infinity"
    raise CheckpointError(
        f"{name} has {kind} at [{row}, {column}]; the file is damaged, quantize the model again"
    )


def _any_magnitude_from(lowest: int, codes: Tensor) -> bool:
    """Return whether a code without its sign is at least `lowest`; every load waits for this.

    Eight codes at a time, as one integer: adding 0x80 - lowest to each raises its top bit.
    """
    flat = codes.flatten()
    whole = flat.numel() // 8 * 8 if flat.storage_offset() % 8 == 0 else 0
    rest = flat[whole:] & 0x7F
    if rest.numel() and int(rest.max()) >= lowest:
        return True
    if whole == 0:
        return False
    words = flat[:whole].view(torch.int64) & _spread(0x7F)
    return bool(words.add_(_spread(0x80 - lowest)).bitwise_and_(_spread(0x80)).any())


def _spread(byte: int) -> int:
    return int.from_bytes(bytes([byte]) * 8, "little", signed=True)


def _stack_rows(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].dtype.itemsize == 1:  # torch.cat knows no 8-bit floats
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.cat(list(parts))


def _stack_outliers(weights: Sequence[QuantizedWeight]) -> Outliers | None:
    """Stack by rows; a layer whose codes hold a channel that others keep apart adds 0 there."""
    pairs = [(w.columns, w.exact) for w in weights]
    chosen = {int(number) for columns, _ in pairs if columns is not None for number in columns}
    if not chosen:
        return None
    numbers = torch.tensor(sorted(chosen), dtype=torch.int32)
    parts = []
    for (columns, exact), weight in zip(pairs, weights, strict=True):
        part = torch.zeros(len(numbers), weight.codes.shape[0], dtype=torch.bfloat16)
        if columns is not None and exact is not None:
            part[torch.searchsorted(numbers, columns)] = exact.T.to(part.dtype)
        parts.append(part)
    return Outliers(numbers, torch.cat(parts, dim=1))


def _stack_biases(weights: Sequence[QuantizedWeight]) -> Tensor | None:
    if all(weight.bias is None for weight in weights):
        return None
    parts = [
        torch.zeros(weight.codes.shape[0]) if weight.bias is None else weight.bias
        for weight in weights
    ]
    return torch.cat(parts)


def _input_quantizer(
    weights: Sequence[QuantizedWeight], spec: QuantSpec | None
) -> InputQuantizer | None:
    if spec is None:
        return None
    if spec.dynamic:
        return InputQuantizer(spec)
    scales = [weight.input_scale for weight in weights if weight.input_scale is not None]
    # One input, one scale: the largest saturates nothing; engines that fuse layers take it too.
    return InputQuantizer(spec, torch.cat(scales).amax().reshape(1))
