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
    if bias is not None:
        check_float(op, "bias", bias.dtype)
        check_tensor(op, "bias", bias, "[N]", (rows,))


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
