"""The custom op of linear layers whose inputs are 8-bit too (W8A8), as GPUs multiply them.

Schema, fake kernel and a reference kernel in torch; the CUDA kernels are in csrc/cuda/scaled_mm.cu.
Who rounds the inputs is in `row_ops`; layers with inputs in 16 bits are in `ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import nearest
from quantkit.numerics import E4M3
from quantkit.op_checks import FLOAT_DTYPES, check_float, check_tensor, dtype_name, fail
from quantkit.ops import ACTIVATIONS
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
    `ops.ACTIVATIONS` -> [M, N]. K and N are multiples of `MULTIPLE`. Raises as `ops.fp8_linear`.
    """
    y: Tensor = torch.ops.quantkit.scaled_mm(
        rows.codes, rows.scales, weight, weight_scale, bias, dtype, activation
    )
    return y


torch.library.define(
    "quantkit::scaled_mm",
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
    _check(a, a_scale, weight, weight_scale, bias, dtype, activation)
    y = torch.matmul(a.float(), weight.float().T) * a_scale.view(-1, 1) * weight_scale
    y = y if bias is None else y + bias.float()
    return (y if activation == "none" else ACTIVATIONS[activation](y)).to(dtype)


def _check(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str,
) -> None:
    op = "scaled_mm"
    for name, codes in (("a", a), ("weight", weight)):
        if codes.dtype != E4M3.dtype:
            fail(op, name, "float8_e4m3fn", dtype_name(codes.dtype))
    check_tensor(op, "weight", weight, "[N, K]", (None, None))
    columns = weight.shape[1]
    check_tensor(op, "a", a, "[M, K]", (None, columns))
    for letter, size in (("N", weight.shape[0]), ("K", columns)):
        if size % MULTIPLE:
            fail(op, "weight", f"of {letter} a multiple of {MULTIPLE}", size)
    for name, scale, sizes in (
        ("a_scale", a_scale, {1, a.shape[0]}),
        ("weight_scale", weight_scale, {weight.shape[0]}),
    ):
        if scale.dtype != torch.float32:
            fail(op, name, "float32", dtype_name(scale.dtype))
        if scale.ndim != 1 or scale.shape[0] not in sizes:
            fail(op, name, f"of shape [{' or '.join(map(str, sorted(sizes)))}]", list(scale.shape))
    if bias is not None:
        if bias.dtype not in FLOAT_DTYPES:
            fail(op, "bias", "float32, bfloat16 or float16", dtype_name(bias.dtype))
        check_tensor(op, "bias", bias, "[N]", (weight.shape[0],))
    check_float(op, "dtype", dtype)
    if activation not in ("none", *ACTIVATIONS):
        actual = f"{activation!r}{nearest(activation, ACTIVATIONS)}"
        fail(op, "activation", "none, silu, gelu, gelu_tanh or relu", actual)


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


torch.library.register_fake("quantkit::scaled_mm", _scaled_mm_fake)
