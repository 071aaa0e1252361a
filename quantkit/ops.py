"""Custom ops of linear layers with 8-bit weights; gating without one is in `gate_ops`.

Every op is registered in the namespace `quantkit` with a reference kernel that runs on any device
and a fake kernel for tracing. The C++ extension (`quantkit.extension`) adds kernels for the CPU to
the same ops, and those win. The functions of this module are what the rest of quantkit calls; they
choose between ops by the number of rows, and by what the processor can do. No file formats, no
modules, no state here.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

import quantkit.extension  # noqa: F401 - adds the C++ kernels
from quantkit import numerics
from quantkit.gate_ops import check_activation, gate, gate_mul
from quantkit.op_checks import (
    check_float,
    check_input,
    check_scale,
    check_tensor,
    dtype_name,
    fail,
)
from quantkit.outliers import Outliers, check_outliers

FEW_ROWS: Final = 16
"""Up to this many rows of x, decoding weights inside the product beats decoding them first on any
CPU; where `multiplies_many_rows` says so, it always does. Also the most tokens of a step that runs
as one op, see `quantkit.decoder_ops`."""
CUDA_FEW_ROWS: Final = 16
"""The same on a GPU; measured on an H200."""
SM80_FEW_ROWS: Final = 64
"""The same on GPUs that cannot multiply in 8 bits (sm_80 to sm_87): what they can do otherwise,
decode first, moves five times the bytes. Not measured."""

_FORMAT_OF: Final = {fmt.dtype: fmt for fmt in numerics.FORMATS.values()}
_NO_OUTLIERS: Final = (None, None)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    dtype: torch.dtype | None = None,
    outliers: Outliers | None = None,
) -> Tensor:
    """Multiply by an 8-bit weight: `y = x @ (decode(weight) * scale).T + bias`.

    Shapes: x (num_tokens, in_features), float32, bfloat16 or float16; weight (out_features,
    in_features), codes whose dtype names the format: float8_e4m3fn, float8_e5m2, or uint8 for E3M4;
    weight_scale float32 (out_features, ceil(in_features / group_size)), one scale per output row
    and group of `group_size` columns; bias (out_features,) in any of x's dtypes, or None. All
    contiguous. Returns (num_tokens, out_features) in `dtype`, by default x's; float32 keeps every
    bit of the sums (on a CPU). `outliers` adds `x[:, columns] @ outliers.weight` before that.

    Up to `FEW_ROWS` rows (on a GPU `cuda_few_rows`, in 16 bits), and on CPUs with a matrix unit any
    number of bfloat16 rows: float32 accumulation and one rounding at the end. Otherwise the weight
    is rounded to x's dtype first, and torch multiplies. With the compiled kernels for CPUs a row is
    the same bits whatever rows it shares the call with, but for this: a matrix unit, which takes
    over at 4 rows, sums in another order than the kernels for fewer.

    Raises UnsupportedError (reference kernels) or RuntimeError (C++ kernels) with the same text,
    naming the argument, if an argument does not fit.
    """
    wanted = dtype or x.dtype
    arguments = (x, weight, weight_scale, bias, group_size)
    if not decodes_inside(x, weight, group_size):
        return _dense_linear(*arguments, outliers).to(wanted)
    inside = None if x.is_cuda else dtype
    y: Tensor = torch.ops.quantkit.fp8_linear(*arguments, inside, *(outliers or _NO_OUTLIERS))
    return y.to(wanted)


def fp8_gated_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    activation: str,
    outliers: Outliers | None = None,
) -> Tensor:
    """Apply both input projections of a gated MLP: `y = act(gate) * up`.

    `gate` and `up` are the halves of `fp8_linear`'s result, whose arguments these are: weight
    (2 * intermediate, in_features) holds all gate rows, then all up rows. `activation` is a key of
    `gate_ops.ACTIVATIONS`. Returns (num_tokens, intermediate) in x's dtype; where `fp8_linear`
    rounds once, all is float32 until one rounding at the end. Raises as `fp8_linear` does.
    """
    arguments = (x, weight, weight_scale, bias, group_size)
    if not decodes_inside(x, weight, group_size):
        return gate_mul(_dense_linear(*arguments, outliers), activation)
    pair = outliers or _NO_OUTLIERS
    y: Tensor = torch.ops.quantkit.fp8_gated_linear(*arguments, activation, *pair)
    return y


def decodes_inside(x: Tensor, weight: Tensor, group_size: int) -> bool:
    """Return whether a kernel that decodes weights inside the product is the one for x [M, K]."""
    if x.is_cuda:  # its kernel multiplies in 16 bits
        return x.dtype != torch.float32 and x.shape[0] <= cuda_few_rows(x.device)
    return x.shape[0] <= FEW_ROWS or multiplies_many_rows(x, weight, group_size)


@cache
def cuda_few_rows(device: torch.device) -> int:
    """Return for how many rows of x a GPU decodes inside the product."""
    if not torch.cuda.is_available():  # a tensor without data
        return CUDA_FEW_ROWS
    older = torch.cuda.get_device_capability(device) < (8, 9)
    return SM80_FEW_ROWS if older else CUDA_FEW_ROWS


def multiplies_many_rows(x: Tensor, weight: Tensor, group_size: int) -> bool:
    """Return whether the kernels for this processor are fast with any number of rows of x [M, K].

    They are with a matrix unit (AMX) that takes x's dtype, bfloat16, and the weight [N, K]: codes
    with one scale a row or with groups of a multiple of 64 columns, or plain bfloat16.
    """
    answer: bool = torch.ops.quantkit.multiplies_many_rows(x, weight, group_size)
    return answer


def dequantize_weight(
    weight: Tensor, weight_scale: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Return `decode(weight) * scale`, computed in float32 and rounded once to `dtype`.

    Shapes and errors as in `fp8_linear`; `dtype` is float32, bfloat16 or float16. The result is
    that of `numerics.dequantize`, bit for bit.
    """
    dense: Tensor = torch.ops.quantkit.dequantize_weight(weight, weight_scale, group_size, dtype)
    return dense


def _dense_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    outliers: Outliers | None,
) -> Tensor:
    dense = dequantize_weight(weight, weight_scale, group_size, x.dtype)
    if outliers is not None:
        dense = outliers.add_to_weight(dense)
    return F.linear(x, dense, None if bias is None else bias.to(x.dtype))


torch.library.define(
    "quantkit::fp8_linear",
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int group_size,"
    " ScalarType? dtype=None, Tensor? outlier_columns=None, Tensor? outlier_weight=None) -> Tensor",
)
torch.library.define(
    "quantkit::fp8_gated_linear",
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int group_size, str activation,"
    " Tensor? outlier_columns=None, Tensor? outlier_weight=None) -> Tensor",
)
torch.library.define(
    "quantkit::dequantize_weight",
    "(Tensor weight, Tensor weight_scale, int group_size, ScalarType dtype) -> Tensor",
)
torch.library.define(
    "quantkit::multiplies_many_rows", "(Tensor x, Tensor weight, int group_size) -> bool"
)


@torch.library.impl("quantkit::fp8_linear", "default")
def _fp8_linear_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    dtype: torch.dtype | None = None,
    outlier_columns: Tensor | None = None,
    outlier_weight: Tensor | None = None,
) -> Tensor:
    op = "fp8_linear"
    _check_linear(op, x, weight, weight_scale, bias, group_size)
    if dtype is not None:
        check_float(op, "dtype", dtype)
    outliers = check_outliers(op, outlier_columns, outlier_weight, weight.shape)
    y = _linear_float32(x, weight, weight_scale, bias, group_size, outliers)
    return y.to(dtype or x.dtype)


@torch.library.impl("quantkit::fp8_gated_linear", "default")
def _fp8_gated_linear_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    activation: str,
    outlier_columns: Tensor | None = None,
    outlier_weight: Tensor | None = None,
) -> Tensor:
    op = "fp8_gated_linear"
    _check_linear(op, x, weight, weight_scale, bias, group_size)
    if weight.shape[0] % 2:
        fail(op, "weight", "gate rows then as many up rows", list(weight.shape))
    check_activation(op, activation)
    outliers = check_outliers(op, outlier_columns, outlier_weight, weight.shape)
    both = _linear_float32(x, weight, weight_scale, bias, group_size, outliers)
    return gate(both, activation).to(x.dtype)


@torch.library.impl("quantkit::dequantize_weight", "default")
def _dequantize_weight_reference(
    weight: Tensor, weight_scale: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    op = "dequantize_weight"
    _check_weight(op, weight, weight_scale, group_size)
    check_float(op, "dtype", dtype)
    fmt = _FORMAT_OF[weight.dtype]
    return numerics.dequantize(weight, weight_scale, fmt, (1, group_size), dtype)


@torch.library.impl("quantkit::multiplies_many_rows", "default")
def _multiplies_many_rows_reference(x: Tensor, weight: Tensor, group_size: int) -> bool:
    return False


def _linear_float32(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    outliers: Outliers | None,
) -> Tensor:
    dense = numerics.dequantize(weight, weight_scale, _FORMAT_OF[weight.dtype], (1, group_size))
    y = F.linear(x.float(), dense, None if bias is None else bias.float())
    return y if outliers is None else outliers.add_to(y, x)


def _fp8_linear_fake(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    dtype: torch.dtype | None = None,
    outlier_columns: Tensor | None = None,
    outlier_weight: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype or x.dtype)


def _fp8_gated_linear_fake(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    activation: str,
    outlier_columns: Tensor | None = None,
    outlier_weight: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def _dequantize_weight_fake(
    weight: Tensor, weight_scale: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    return weight.new_empty(weight.shape, dtype=dtype)


def _multiplies_many_rows_fake(x: Tensor, weight: Tensor, group_size: int) -> bool:
    return False


torch.library.register_fake("quantkit::fp8_linear", _fp8_linear_fake)
torch.library.register_fake("quantkit::fp8_gated_linear", _fp8_gated_linear_fake)
torch.library.register_fake("quantkit::dequantize_weight", _dequantize_weight_fake)
torch.library.register_fake("quantkit::multiplies_many_rows", _multiplies_many_rows_fake)


def _check_linear(
    op: str, x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group_size: int
) -> None:
    _check_weight(op, weight, weight_scale, group_size)
    check_input(op, x, weight, bias)


def _check_weight(op: str, weight: Tensor, weight_scale: Tensor, group_size: int) -> None:
    if weight.dtype not in _FORMAT_OF:
        expected = "float8_e4m3fn, float8_e5m2 or uint8 (E3M4 codes)"
        fail(op, "weight", expected, dtype_name(weight.dtype))
    check_tensor(op, "weight", weight, "[N, K]", (None, None))
    if group_size < 1:
        fail(op, "group_size", "at least 1", group_size)
    rows, columns = weight.shape
    shape = (rows, ceil(columns / group_size))
    check_scale(op, "weight_scale", weight_scale, "[N, ceil(K / group_size)]", shape)
