"""Custom ops of linear layers whose weight is not quantized: the output head, ignored layers.

Schema, fake kernel and a reference kernel in torch; the C++ kernels are those of the FP8 layers, in
`quantkit.ops`, and promise the same: rows that do not depend on the batch, float32 accumulation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.errors import nearest
from quantkit.gate_ops import ACTIVATIONS, gate, gate_mul
from quantkit.op_checks import check_float, check_input, check_tensor, fail
from quantkit.ops import FEW_ROWS, multiplies_many_rows


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply by a weight that is not quantized: `y = x @ weight.T + bias`, in `dtype`.

    Shapes: x (num_tokens, in_features), weight (out_features, in_features), bias (out_features,) or
    None, each float32, bfloat16 or float16, contiguous. `dtype` is that of the result, x's if None;
    float32 keeps every bit of the sums. Where `quantkit.ops.multiplies_many_rows` does not hold,
    more than `FEW_ROWS` rows go to torch: they need the weight in x's dtype, and their sums are
    rounded to it. So do all rows on a GPU, but for a float32 result, which is not rounded before.
    Errors as in `quantkit.ops.fp8_linear`.
    """
    dtype = dtype or x.dtype
    if x.is_cuda:
        return _cuda_linear(x, weight, bias, dtype)
    if _has_kernel(x, weight):
        y: Tensor = torch.ops.quantkit.linear(x, weight, bias, dtype)
        return y
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return `act(gate) * up`, the halves of `linear`'s result; see `ops.fp8_gated_linear`.

    Shapes: x (num_tokens, in_features), weight (2 * intermediate, in_features) -> (num_tokens,
    intermediate) in x's dtype.
    """
    if not x.is_cuda and _has_kernel(x, weight):
        y: Tensor = torch.ops.quantkit.gated_linear(x, weight, bias, activation)
        return y
    if x.is_cuda:  # its product comes in float32 as fast
        return gate(linear(x, weight, bias, torch.float32), activation).to(x.dtype)
    return gate_mul(linear(x, weight, bias), activation)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether the CPU's kernel, and not torch, is the one for x [M, K], weight [N, K]."""
    return x.shape[0] <= FEW_ROWS or multiplies_many_rows(x, weight, max(1, weight.shape[1]))


def _cuda_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float32 or x.dtype == torch.float32:
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(dtype)
    y = torch.mm(x, weight.T, out_dtype=dtype)
    return y if bias is None else y + bias


torch.library.define(
    "quantkit::linear", "(Tensor x, Tensor weight, Tensor? bias, ScalarType dtype) -> Tensor"
)
torch.library.define(
    "quantkit::gated_linear",
    "(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
)


@torch.library.impl("quantkit::linear", "default")
def _linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    _check("linear", x, weight, bias)
    check_float("linear", "dtype", dtype)
    return _float32(x, weight, bias).to(dtype)


@torch.library.impl("quantkit::gated_linear", "default")
def _gated_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    op = "gated_linear"
    _check(op, x, weight, bias)
    if weight.shape[0] % 2:
        fail(op, "weight", "gate rows then as many up rows", list(weight.shape))
    if activation not in ACTIVATIONS:
        actual = f"{activation!r}{nearest(activation, ACTIVATIONS)}"
        fail(op, "activation", "silu, gelu, gelu_tanh or relu", actual)
    return gate(_float32(x, weight, bias), activation).to(x.dtype)


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_float(op, "weight", weight.dtype)
    check_tensor(op, "weight", weight, "[N, K]", (None, None))
    check_input(op, x, weight, bias)


def _float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _gated_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


torch.library.register_fake("quantkit::linear", _linear_fake)
torch.library.register_fake("quantkit::gated_linear", _gated_linear_fake)
