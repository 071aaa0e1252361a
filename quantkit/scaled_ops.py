"""The custom ops of linear layers whose inputs are 8-bit too (W8A8), as GPUs multiply them.

Schema, fake and reference kernels in torch; the CUDA kernels are in csrc/cuda/scaled_mm.cu.
Who rounds the inputs is in `row_ops`; layers with inputs in 16 bits are in `ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import nearest
from quantkit.gate_ops import ACTIVATIONS, check_activation, gate
from quantkit.op_checks import check_float, check_products, check_scale, fail
from quantkit.row_ops import QuantizedRows

MULTIPLE = 16
"""The matrix units read 16 codes at once: both sizes of the weight are multiples of this."""


def scaled_mm(
    rows: QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str = "none",
) -> Tensor:
    """Return `act((codes @ weight.T) * scales[m] * weight_scale[n] + bias[n])`, in `dtype`.

    float32 accumulation (on Hopper and Ada in the tensor cores' shorter accumulator, about 14 bits,
    between additions to float32), one rounding at the end. Shapes: rows.codes [M, K]; weight E4M3
    [N, K]; weight_scale float32 [N]; bias [N] in any float dtype; `activation` "none" or a key of
    `gate_ops.ACTIVATIONS` -> [M, N]. K and N are multiples of `MULTIPLE`. Raises as
    `ops.fp8_linear`.
    """
    y: Tensor = torch.ops.quantkit.scaled_mm(
        rows.codes, rows.scales, weight, weight_scale, bias, dtype, activation
    )
    return y


def scaled_gated_mm(
    rows: QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    """Return `act(gate) * up`, the halves of what `scaled_mm` gives without activation, in `dtype`.

    All is float32 until one rounding. weight [N, K] holds all gate rows, then all up rows -> [M,
    N / 2]; `activation` is a key of `gate_ops.ACTIVATIONS`, the rest as for `scaled_mm`. The CUDA
    kernel is for compute capability 9.0.
    """
    op = torch.ops.quantkit.scaled_gated_mm
    y: Tensor = op(rows.codes, rows.scales, weight, weight_scale, bias, dtype, activation)
    return y


for _name in ("scaled_mm", "scaled_gated_mm"):
    torch.library.define(
        f"quantkit::{_name}",
        "(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
        " ScalarType dtype, str activation) -> Tensor",
    )


@torch.library.impl("quantkit::scaled_mm", "default")
def _scaled_mm_reference(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    _check("scaled_mm", a, a_scale, weight, weight_scale, bias, dtype)
    if activation not in ("none", *ACTIVATIONS):
        actual = f"{activation!r}{nearest(activation, ACTIVATIONS)}"
        fail("scaled_mm", "activation", "none, silu, gelu, gelu_tanh or relu", actual)
    y = _multiply(a, a_scale, weight, weight_scale, bias)
    return (y if activation == "none" else ACTIVATIONS[activation](y)).to(dtype)


@torch.library.impl("quantkit::scaled_gated_mm", "default")
def _scaled_gated_mm_reference(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    _check("scaled_gated_mm", a, a_scale, weight, weight_scale, bias, dtype)
    check_activation("scaled_gated_mm", activation)
    return gate(_multiply(a, a_scale, weight, weight_scale, bias), activation).to(dtype)


def _multiply(
    a: Tensor, a_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    y = torch.matmul(a.float(), weight.float().T) * a_scale.view(-1, 1) * weight_scale
    return y if bias is None else y + bias.float()


def _check(
    op: str,
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    check_products(op, a, weight, bias, (MULTIPLE, MULTIPLE))
    check_scale(op, "weight_scale", weight_scale, "[N]", (weight.shape[0],))
    one_for_all = a_scale.numel() == 1
    check_scale(op, "a_scale", a_scale, "[M] or [1]", (1 if one_for_all else len(a),))
    check_float(op, "dtype", dtype)


def _scaled_mm_fake(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    return a.new_empty(a.shape[0], weight.shape[0], dtype=dtype)


def _scaled_gated_mm_fake(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    return a.new_empty(a.shape[0], weight.shape[0] // 2, dtype=dtype)


torch.library.register_fake("quantkit::scaled_mm", _scaled_mm_fake)
torch.library.register_fake("quantkit::scaled_gated_mm", _scaled_gated_mm_fake)
