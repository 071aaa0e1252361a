"""Custom ops on rows between linear layers: residual and norm, rounding inputs to 8 bits.

Each is what one or two plain ops do, with the same roundings, in one pass over memory: GPUs wait
for memory here. Schema, fake kernel and a reference kernel that is those plain ops; the CUDA
kernels (csrc/cuda/rows.cu), and the CPU's of `add_rms_norm`, give the same bits. Gating without
rounding is in `gate_ops`; `scaled_ops` multiplies what is rounded here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.attention_ops import rms_norm
from quantkit.gate_ops import gate_mul
from quantkit.numerics import E4M3, amax_to_scale, quantize, tile_amax


class QuantizedRows(NamedTuple):
    """Inputs of a linear layer in 8 bits: `x ~ codes * scales`.

    Shapes: codes E4M3 [num_tokens, features]; scales float32 [num_tokens], or [1] for all.
    """

    codes: Tensor
    scales: Tensor


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `total = x + delta` and `rms_norm(total, weight, eps)`.

    The total is rounded to x.dtype before it is normalized. Shapes: x, delta [num_tokens,
    features], weight [features] -> two like x.
    """
    total, normed = torch.ops.quantkit.add_rms_norm(x, delta, weight, eps)
    return total, normed


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> QuantizedRows:
    """Round every row to E4M3 codes; with one given `scale`, saturating, or with its own.

    A row's own scale is amax / 448, see `numerics.amax_to_scale`. Shapes: x [num_tokens, features],
    scale float32 [1].
    """
    return QuantizedRows(*torch.ops.quantkit.quantize_rows(x, scale))


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None
) -> QuantizedRows:
    """Return `quantize_rows(rms_norm(x, weight, eps), scale)`."""
    return QuantizedRows(*torch.ops.quantkit.rms_norm_quantize(x, weight, eps, scale))


def add_rms_norm_quantize(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None
) -> tuple[Tensor, QuantizedRows]:
    """Return `add_rms_norm` with its second result quantized as by `quantize_rows`."""
    op = torch.ops.quantkit.add_rms_norm_quantize
    total, codes, scales = op(x, delta, weight, eps, scale)
    return total, QuantizedRows(codes, scales)


def gate_mul_quantize(both: Tensor, activation: str, scale: Tensor | None = None) -> QuantizedRows:
    """Return `quantize_rows(gate_mul(both, activation), scale)`."""
    return QuantizedRows(*torch.ops.quantkit.gate_mul_quantize(both, activation, scale))


torch.library.define(
    "quantkit::add_rms_norm",
    "(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)",
)
torch.library.define("quantkit::quantize_rows", "(Tensor x, Tensor? scale) -> (Tensor, Tensor)")
torch.library.define(
    "quantkit::rms_norm_quantize",
    "(Tensor x, Tensor weight, float eps, Tensor? scale) -> (Tensor, Tensor)",
)
torch.library.define(
    "quantkit::add_rms_norm_quantize",
    "(Tensor x, Tensor delta, Tensor weight, float eps, Tensor? scale) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "quantkit::gate_mul_quantize",
    "(Tensor both, str activation, Tensor? scale) -> (Tensor, Tensor)",
)


def _add_rms_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm(total, weight, eps)


def _quantize_rows_reference(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    tile = (1, x.shape[1])
    if scale is None:
        scales = amax_to_scale(tile_amax(x, tile), E4M3)
        return quantize(x, scales, E4M3, tile), scales.view(-1)[: x.shape[0]]
    return quantize(x, scale.view(1, 1), E4M3, (max(1, x.shape[0]), x.shape[1])), scale.clone()


def _rms_norm_quantize_reference(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _quantize_rows_reference(rms_norm(x, weight, eps), scale)


def _add_rms_norm_quantize_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    total, normed = _add_rms_norm_reference(x, delta, weight, eps)
    return total, *_quantize_rows_reference(normed, scale)


def _gate_mul_quantize_reference(
    both: Tensor, activation: str, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _quantize_rows_reference(gate_mul(both, activation), scale)


torch.library.impl("quantkit::add_rms_norm", "default")(_add_rms_norm_reference)
torch.library.impl("quantkit::quantize_rows", "default")(_quantize_rows_reference)
torch.library.impl("quantkit::rms_norm_quantize", "default")(_rms_norm_quantize_reference)
torch.library.impl("quantkit::add_rms_norm_quantize", "default")(_add_rms_norm_quantize_reference)
torch.library.impl("quantkit::gate_mul_quantize", "default")(_gate_mul_quantize_reference)


def _codes_like(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    scales = x.new_empty(x.shape[:1] if scale is None else (1,), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=E4M3.dtype), scales


def _add_rms_norm_fake(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _rms_norm_quantize_fake(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _codes_like(x, scale)


def _add_rms_norm_quantize_fake(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_codes_like(x, scale)


def _gate_mul_quantize_fake(
    both: Tensor, activation: str, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _codes_like(gate_mul(both, activation), scale)


torch.library.register_fake("quantkit::add_rms_norm", _add_rms_norm_fake)
torch.library.register_fake("quantkit::quantize_rows", _codes_like)
torch.library.register_fake("quantkit::rms_norm_quantize", _rms_norm_quantize_fake)
torch.library.register_fake("quantkit::add_rms_norm_quantize", _add_rms_norm_quantize_fake)
torch.library.register_fake("quantkit::gate_mul_quantize", _gate_mul_quantize_fake)
