"""Argument checks of the reference kernels; the C++ kernels raise the same texts.

They read `op: argument must be <expected>, got <actual>`. Nothing here knows what an op computes.
"""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch import Tensor

from quantkit.errors import UnsupportedError

FLOAT_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations, biases and weights that are not quantized."""


def check_input(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check the input [M, K] and the bias [N] of a linear layer of weight [N, K]."""
    rows, columns = weight.shape
    check_float(op, "x", x.dtype)
    check_tensor(op, "x", x, "[M, K]", (None, columns))
    check_bias(op, bias, rows)


def check_products(
    op: str, a: Tensor, weight: Tensor, bias: Tensor | None, multiples: tuple[int, int]
) -> None:
    """Check E4M3 codes [M, K], a weight of E4M3 codes [N, K] and the bias [N] of a W8A8 product.

    N and K must be multiples of the two `multiples`.
    """
    for name, codes in (("a", a), ("weight", weight)):
        if codes.dtype != torch.float8_e4m3fn:
            fail(op, name, "float8_e4m3fn", dtype_name(codes.dtype))
    check_tensor(op, "weight", weight, "[N, K]", (None, None))
    check_tensor(op, "a", a, "[M, K]", (None, weight.shape[1]))
    for letter, size, multiple in zip("NK", weight.shape, multiples, strict=True):
        if size % multiple:
            fail(op, "weight", f"of {letter} a multiple of {multiple}", size)
    check_bias(op, bias, weight.shape[0])


def check_bias(op: str, bias: Tensor | None, rows: int) -> None:
    """Check the bias of a linear layer of `rows` outputs, where it has one."""
    if bias is not None:
        check_float(op, "bias", bias.dtype)
        check_tensor(op, "bias", bias, "[N]", (rows,))


def check_scale(
    op: str, argument: str, scale: Tensor, letters: str, shape: tuple[int | None, ...]
) -> None:
    """Raise UnsupportedError unless `scale` is float32, and as `check_tensor` does."""
    if scale.dtype != torch.float32:
        fail(op, argument, "float32", dtype_name(scale.dtype))
    check_tensor(op, argument, scale, letters, shape)


def check_float(op: str, argument: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedError unless `dtype` is one of FLOAT_DTYPES."""
    if dtype not in FLOAT_DTYPES:
        fail(op, argument, "float32, bfloat16 or float16", dtype_name(dtype))


def check_tensor(
    op: str, argument: str, tensor: Tensor, letters: str, shape: tuple[int | None, ...]
) -> None:
    """Raise UnsupportedError unless `tensor` is contiguous and fits `shape`; None fits any size."""
    fits = tensor.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        fail(op, argument, f"of shape {letters} = [{sizes}]", list(tensor.shape))
    if not tensor.is_contiguous():
        fail(op, argument, "contiguous", f"strides {list(tensor.stride())}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def fail(op: str, argument: str, expected: str, actual: object) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(f"{op}: {argument} must be {expected}, got {actual}")
