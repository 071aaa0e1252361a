"""Linear layers with a scale for each block of 128 x 128 weights, on GPUs with tensor cores.

There are two ways: decode the weight to 16 bits and multiply it with inputs as they are, or round
inputs in groups of 128 and multiply codes, scaling sums as they go. Which is faster is measured:
`quantkit bench --kernels` shows both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from quantkit.block_ops import BLOCK, block_scaled_mm, quantize_groups
from quantkit.decoder_ops import StepLinear
from quantkit.gate_ops import gate_mul
from quantkit.numerics import E4M3
from quantkit.runtime.layers import Fp8Linear
from quantkit.scaled_ops import MULTIPLE
from quantkit.scheme import QuantSpec

CODES_FROM: Final[int | None] = None
"""From how many rows codes are multiplied with codes; None: never, as long as no GPU has shown that
it is faster. Asking for `activations="quantized"` does it for any number."""


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """An Fp8Linear whose input is rounded in groups when it has at least `from_rows` rows.

    `plain` has the same weights and does not round; `blocks` float32 [ceil(N / 128), K / 128] are
    its scales.
    """

    plain: Fp8Linear
    blocks: Tensor
    from_rows: int

    @classmethod
    def wrap(cls, layer: Fp8Linear, from_rows: int) -> Self | None:
        """Return the layer with its input quantizer put to work; None if that does not fit."""
        rows, columns = layer.codes.shape
        if layer.inputs is None or layer.outliers is not None or layer.group_size != BLOCK:
            return None
        if layer.codes.dtype != E4M3.dtype or not _groups_inputs(layer.inputs.spec):
            return None
        if rows % MULTIPLE or columns % BLOCK:
            return None
        blocks = layer.scale[::BLOCK].contiguous()
        if not torch.equal(blocks.repeat_interleave(BLOCK, dim=0)[:rows], layer.scale):
            return None  # stacked layers whose blocks do not line up
        return cls(layer.without_input_quantizer(), blocks, from_rows)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return y. Shapes: [num_tokens, in_features] -> [num_tokens, out_features]."""
        if len(x) < self.from_rows:
            return self.plain(x, dtype)
        codes, wanted = self.plain.codes, dtype or x.dtype
        return block_scaled_mm(quantize_groups(x), codes, self.blocks, self.plain.bias, wanted)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up, the first half of the rows being gate."""
        if len(x) < self.from_rows:
            return self.plain.gated(x, activation)
        return gate_mul(self(x), activation)

    def for_step(self) -> StepLinear | None:
        """Return None: `decoder_step` is for CPUs."""
        return None

    def scaled(self, num_rows: int) -> None:
        """Return None: a norm does not round in groups."""
        return None

    def decoding(self, num_rows: int) -> Fp8Linear | None:
        """Return the layer for inputs as they are, where it does not round them."""
        return self.plain if num_rows < self.from_rows else None


def codes_from(few_rows: int, device: torch.device) -> int | None:
    """Return from how many rows a GPU multiplies codes in blocks; None if it does not at all.

    `few_rows`: how many rows keep their 16 bits anyway; 0 where all are to be rounded.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if few_rows == 0:
        return 1
    return None if CODES_FROM is None else max(CODES_FROM, few_rows + 1)


def _groups_inputs(spec: QuantSpec) -> bool:
    return spec.fmt == E4M3 and spec.group_size == BLOCK and spec.dynamic
