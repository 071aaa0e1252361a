"""Custom torch ops: schema, shapes, and a reference kernel in torch for each; and the C++ kernels.

Every op is registered in the namespace `quantkit` with a reference kernel that runs on any device
and a fake kernel for tracing. The extension `quantkit._cpu`, if it was built, adds C++ kernels for
the CPU to the same ops, and those win. The functions of this module are what the rest of quantkit
calls; they choose between ops by the number of rows. No file formats, no modules, no state here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit import numerics
from quantkit.errors import UnsupportedError, nearest

FEW_ROWS: Final = 16
"""Up to this many rows of x, decoding weights inside the product beats decoding them first."""

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

FLOAT_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

_FORMAT_OF: Final = {fmt.dtype: fmt for fmt in numerics.FORMATS.values()}


def load_extension(folder: Path = Path(__file__).parent) -> bool:
    """Load the C++ kernels built into `folder`; return whether they are in use.

    `QUANTKIT_DISABLE_EXT=1` leaves them out. A library that does not load (built for another
    system, say) is reported, and the reference kernels stay.
    """
    libraries = sorted(folder.glob("_cpu*.so"))
    if os.environ.get("QUANTKIT_DISABLE_EXT") == "1" or not libraries:
        return False
    try:
        torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    except OSError as error:
        logger = logging.getLogger("quantkit")
        logger.warning("cannot load %s, using slow reference kernels: %s", libraries[0], error)
        return False
    return True


# ---- linear layers with 8-bit weights


def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    """Multiply by an 8-bit weight: `y = x @ (decode(weight) * scale).T + bias`.

    Shapes: x (num_tokens, in_features), float32, bfloat16 or float16; weight (out_features,
    in_features), codes whose dtype names the format: float8_e4m3fn, float8_e5m2, or uint8 for E3M4;
    weight_scale float32 (out_features, ceil(in_features / group_size)), one scale per output row
    and group of `group_size` columns; bias (out_features,) in any of x's dtypes, or None. All
    contiguous. Returns (num_tokens, out_features) in x's dtype.

    Up to `FEW_ROWS` rows: float32 accumulation, one rounding at the end, and with the C++ kernels
    every row is the same bits whatever rows it shares the call with. More rows: the weight is
    rounded to x's dtype first, and torch multiplies.

    Raises UnsupportedError (reference kernels) or RuntimeError (C++ kernels) with the same text,
    naming the argument, if an argument does not fit.
    """
    if x.shape[0] <= FEW_ROWS:
        y: Tensor = torch.ops.quantkit.fp8_linear(x, weight, weight_scale, bias, group_size)
        return y
    return _dense_linear(x, weight, weight_scale, bias, group_size)


def fp8_gated_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    activation: str,
) -> Tensor:
    """Apply both input projections of a gated MLP: `y = act(gate) * up`.

    `gate` and `up` are the halves of `fp8_linear`'s result, whose arguments these are: weight
    (2 * intermediate, in_features) holds all gate rows, then all up rows. `activation` is a key of
    `ACTIVATIONS`. Returns (num_tokens, intermediate) in x's dtype; up to `FEW_ROWS` rows all is
    float32 until one rounding at the end. Raises as `fp8_linear` does.
    """
    if x.shape[0] <= FEW_ROWS:
        y: Tensor = torch.ops.quantkit.fp8_gated_linear(
            x, weight, weight_scale, bias, group_size, activation
        )
        return y
    both = _dense_linear(x, weight, weight_scale, bias, group_size)
    return _gate(both.float(), activation).to(x.dtype)


def dequantize_weight(
    weight: Tensor, weight_scale: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Return `decode(weight) * scale`, computed in float32 and rounded once to `dtype`.

    Shapes and errors as in `fp8_linear`; `dtype` is one of `FLOAT_DTYPES`. The result is that of
    `numerics.dequantize`, bit for bit.
    """
    dense: Tensor = torch.ops.quantkit.dequantize_weight(weight, weight_scale, group_size, dtype)
    return dense


def _dense_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    dense = dequantize_weight(weight, weight_scale, group_size, x.dtype)
    return F.linear(x, dense, None if bias is None else bias.to(x.dtype))


def _gate(both: Tensor, activation: str) -> Tensor:
    """Return act(first half of the columns) * second half."""
    gate, up = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


torch.library.define(
    "quantkit::fp8_linear",
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int group_size) -> Tensor",
)
torch.library.define(
    "quantkit::fp8_gated_linear",
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int group_size, str activation)"
    " -> Tensor",
)
torch.library.define(
    "quantkit::dequantize_weight",
    "(Tensor weight, Tensor weight_scale, int group_size, ScalarType dtype) -> Tensor",
)


@torch.library.impl("quantkit::fp8_linear", "default")
def _fp8_linear_reference(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    _check_linear("fp8_linear", x, weight, weight_scale, bias, group_size)
    return _linear_float32(x, weight, weight_scale, bias, group_size).to(x.dtype)


@torch.library.impl("quantkit::fp8_gated_linear", "default")
def _fp8_gated_linear_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    activation: str,
) -> Tensor:
    op = "fp8_gated_linear"
    _check_linear(op, x, weight, weight_scale, bias, group_size)
    if weight.shape[0] % 2:
        _fail(op, "weight", "gate rows then as many up rows", list(weight.shape))
    if activation not in ACTIVATIONS:
        actual = f"{activation!r}{nearest(activation, ACTIVATIONS)}"
        _fail(op, "activation", "silu, gelu, gelu_tanh or relu", actual)
    both = _linear_float32(x, weight, weight_scale, bias, group_size)
    return _gate(both, activation).to(x.dtype)


@torch.library.impl("quantkit::dequantize_weight", "default")
def _dequantize_weight_reference(
    weight: Tensor, weight_scale: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    op = "dequantize_weight"
    _check_weight(op, weight, weight_scale, group_size)
    _check_float(op, "dtype", dtype)
    fmt = _FORMAT_OF[weight.dtype]
    return numerics.dequantize(weight, weight_scale, fmt, (1, group_size), dtype)


def _linear_float32(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    dense = numerics.dequantize(weight, weight_scale, _FORMAT_OF[weight.dtype], (1, group_size))
    return F.linear(x.float(), dense, None if bias is None else bias.float())


def _fp8_linear_fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fp8_gated_linear_fake(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    activation: str,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def _dequantize_weight_fake(
    weight: Tensor, weight_scale: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    return weight.new_empty(weight.shape, dtype=dtype)


torch.library.register_fake("quantkit::fp8_linear", _fp8_linear_fake)
torch.library.register_fake("quantkit::fp8_gated_linear", _fp8_gated_linear_fake)
torch.library.register_fake("quantkit::dequantize_weight", _dequantize_weight_fake)


def _check_linear(
    op: str, x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group_size: int
) -> None:
    _check_weight(op, weight, weight_scale, group_size)
    rows, columns = weight.shape
    _check_float(op, "x", x.dtype)
    _check_tensor(op, "x", x, "[M, K]", (None, columns))
    if bias is not None:
        _check_float(op, "bias", bias.dtype)
        _check_tensor(op, "bias", bias, "[N]", (rows,))


def _check_weight(op: str, weight: Tensor, weight_scale: Tensor, group_size: int) -> None:
    if weight.dtype not in _FORMAT_OF:
        expected = "float8_e4m3fn, float8_e5m2 or uint8 (E3M4 codes)"
        _fail(op, "weight", expected, _dtype_name(weight.dtype))
    _check_tensor(op, "weight", weight, "[N, K]", (None, None))
    if group_size < 1:
        _fail(op, "group_size", "at least 1", group_size)
    if weight_scale.dtype != torch.float32:
        _fail(op, "weight_scale", "float32", _dtype_name(weight_scale.dtype))
    rows, columns = weight.shape
    groups = ceil(columns / group_size)
    _check_tensor(op, "weight_scale", weight_scale, "[N, ceil(K / group_size)]", (rows, groups))


# ---- checks shared by all reference kernels; the C++ kernels give the same texts


def _check_float(op: str, argument: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        _fail(op, argument, "float32, bfloat16 or float16", _dtype_name(dtype))


def _check_tensor(
    op: str, argument: str, tensor: Tensor, letters: str, shape: tuple[int | None, ...]
) -> None:
    fits = tensor.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        _fail(op, argument, f"of shape {letters} = [{sizes}]", list(tensor.shape))
    if not tensor.is_contiguous():
        _fail(op, argument, "contiguous", f"strides {list(tensor.stride())}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fail(op: str, argument: str, expected: str, actual: object) -> None:
    raise UnsupportedError(f"{op}: {argument} must be {expected}, got {actual}")


EXTENSION_LOADED: Final = load_extension()
"""Whether CPU tensors go to the C++ kernels; if not, the reference kernels serve, slowly."""
