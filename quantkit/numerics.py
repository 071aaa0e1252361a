"""8-bit float formats, and the arithmetic of scales: pure functions on tensors.

One convention for scale, here and on disk: `scale` is the float32 dequantization multiplier,
`x ~ codes * scale`, `scale = amax / Format.max`. Which elements share a scale is given as a *tile*
(rows, columns) over the last two dimensions: (1, in_features) is per output channel or per token,
(rows, in_features) per tensor, (1, g) per group, (128, 128) per block. Every function accepts every
tile. Nothing here knows about layers, files or calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

from quantkit.errors import UnsupportedError

Tile = tuple[int, int]
"""Rows and columns of the elements that share one scale."""

CHUNK_ELEMENTS = 2**19
"""Elements that are converted at once where it makes no difference to the result."""

MIN_SCALE = 2.0**-126
"""Smallest normal float32 (and bf16); a smaller scale would be flushed to zero by some hardware."""


@dataclass(frozen=True, slots=True)
class Format:
    """An 8-bit float: one sign bit, then exponent and mantissa.

    `max` is the largest finite value. `dtype` is what torch stores it in; torch has no type for
    E3M4, whose codes are kept as uint8.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    dtype: torch.dtype


E4M3 = Format("e4m3", 4, 3, 448.0, torch.float8_e4m3fn)
"""OCP OFP8 E4M3 (`float8_e4m3fn`): no infinities, NaN is 0x7f and 0xff. The portable format."""
E5M2 = Format("e5m2", 5, 2, 57344.0, torch.float8_e5m2)
"""OCP OFP8 E5M2: IEEE-like, with infinities."""
E3M4 = Format("e3m4", 3, 4, 15.5, torch.uint8)
"""IEEE-like with exponent bias 3, as `float8_e3m4` in ml_dtypes; weights in native checkpoints."""

FORMATS = {f.name: f for f in (E4M3, E5M2, E3M4)}


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Round to the nearest code, ties to even, saturating: |x| > max and infinities become +-max.

    NaN stays NaN, the sign of zero is kept. Shapes: any. Returns codes in `fmt.dtype`.
    """
    return _encode_(x.to(torch.float32, copy=True), fmt)


def _encode_(x: Tensor, fmt: Format) -> Tensor:
    """Encode a float32 tensor that may be overwritten."""
    # What a bare cast does beyond the range has changed between torch versions.
    x.clamp_(-fmt.max, fmt.max)
    return _encode_e3m4(x) if fmt is E3M4 else x.to(fmt.dtype)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Return the float32 values of codes. Shapes: any. Raises UnsupportedError on a wrong dtype."""
    if codes.dtype != fmt.dtype:
        raise UnsupportedError(f"{fmt.name} codes are stored as {fmt.dtype}, got {codes.dtype}")
    if fmt is E3M4:
        return _e3m4_values().to(codes.device)[codes.int()]
    return _decode_by_bits(codes, fmt) if codes.device.type == "cpu" else codes.float()


def _decode_by_bits(codes: Tensor, fmt: Format) -> Tensor:
    """Decode E4M3 or E5M2 by moving their bits into a float16, exactly.

    Same values as `codes.float()`, which takes ten times as long on CPU.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(10 - fmt.mantissa_bits)
    if fmt is E5M2:
        return bits.view(torch.float16).float()  # E5M2 is the upper half of a float16
    # The exponents' biases differ by 8. Bit 14 is a copy of the sign, from widening to 16 bits.
    values = bits.bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)
    if values.numel():
        low, high = torch.aminmax(values)
        if max(-low.item(), high.item()) > fmt.max:
            values[values.abs() > fmt.max] = torch.nan  # 0x7f and 0xff
    return values


def _encode_e3m4(x: Tensor) -> Tensor:
    """Encode float32 values that are within +-15.5 or NaN."""
    magnitude = x.abs()
    bits = magnitude.view(torch.int32)
    # Keep 4 of 23 mantissa bits, ties to even; a carry moves into the exponent, as it should.
    rounded = bits + 0x3FFFF + ((bits >> 19) & 1)
    normal = (rounded >> 19) - ((127 - 3) << 4)
    # Below 2**-2 the step is fixed at 2**-6; the 16th step is the first normal code.
    subnormal = (magnitude * 64.0).round().nan_to_num().to(torch.int32)
    code = torch.where(magnitude < 0.25, subnormal, normal)
    code = torch.where(x.isnan(), 0x78, code)
    return (code | (torch.signbit(x).to(torch.int32) << 7)).to(torch.uint8)


@lru_cache(maxsize=1)
def _e3m4_values() -> Tensor:
    """Values of the 256 E3M4 codes, from the definition of the format."""
    code = torch.arange(256)
    sign = torch.where(code >= 128, -1.0, 1.0)
    exponent, mantissa = (code >> 4) & 7, (code & 15).float()
    normal = (1 + mantissa / 16) * torch.exp2(exponent.float() - 3)
    value = torch.where(exponent == 0, mantissa / 64, normal)
    value = torch.where((exponent == 7) & (mantissa > 0), torch.nan, value)
    return sign * torch.where((exponent == 7) & (mantissa == 0), torch.inf, value)


def tile_amax(x: Tensor, tile: Tile) -> Tensor:
    """Return max |x| of every tile.

    Shapes: x (rows, columns) -> float32 (ceil(rows / tile rows), ceil(columns / tile columns)).
    A tile at the edge may be smaller. An empty matrix has amax 0. NaN propagates.
    """
    rows, columns = x.shape
    grid_rows, grid_columns = ceil(rows / tile[0]), ceil(columns / tile[1])
    if x.numel() == 0:
        return torch.zeros(max(grid_rows, 1), max(grid_columns, 1), device=x.device)
    magnitude = x.abs()
    if grid_rows * tile[0] != rows or grid_columns * tile[1] != columns:
        padding = (0, grid_columns * tile[1] - columns, 0, grid_rows * tile[0] - rows)
        magnitude = torch.nn.functional.pad(magnitude, padding)
    return magnitude.view(grid_rows, tile[0], grid_columns, tile[1]).amax(dim=(1, 3)).float()


def amax_to_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Return the scale that maps amax onto the largest code: `scale = amax / fmt.max`.

    float32, > 0, bf16-representable and rounded *up*, so that a loader which casts scales to bf16
    sees the same number and nothing saturates. Where amax is 0 every scale is exact; 1.0 is taken
    because it keeps any later product in range. Shapes: any. NaN and infinity propagate.
    """
    scale = (amax.float() / fmt.max).clamp(min=MIN_SCALE)
    # Adding just under one bf16 step and cutting the low half rounds a positive float up.
    rounded_up = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scale = torch.where(scale.isfinite(), rounded_up, scale)
    return torch.where(amax == 0, 1.0, scale)


def expand_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], tile: Tile) -> Tensor:
    """Return `scale`, one per tile, in a shape that broadcasts against a (rows, columns) matrix."""
    rows, columns = shape
    if scale.shape[0] not in (1, rows):
        scale = scale.repeat_interleave(tile[0], dim=0)[:rows]
    if scale.shape[1] not in (1, columns):
        scale = scale.repeat_interleave(tile[1], dim=1)[:, :columns]
    return scale


def quantize(x: Tensor, scale: Tensor, fmt: Format, tile: Tile) -> Tensor:
    """Quantize by `round(x / scale)`, saturating at +-fmt.max.

    Shapes: x (rows, columns); scale float32 (ceil(rows / tile rows), ceil(columns / tile columns)).
    Returns codes (rows, columns) in `fmt.dtype`.
    """
    # Dividing by a float32 matrix promotes x on the fly, without a float32 copy of it.
    return _encode_(torch.div(x, expand_scale(scale, x.shape, tile)).float(), fmt)


def dequantize(
    codes: Tensor, scale: Tensor, fmt: Format, tile: Tile, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `codes * scale`, computed in float32 and rounded once to `dtype`. Shapes as above."""
    return decode(codes, fmt).mul_(expand_scale(scale, codes.shape, tile)).to(dtype)


def fake_quantize(x: Tensor, scale: Tensor, fmt: Format, tile: Tile) -> Tensor:
    """Quantize and dequantize: what is left of x after storage. Shapes as above, dtype of x."""
    if x.numel() <= CHUNK_ELEMENTS or tile[0] not in (1, x.shape[0]):
        return dequantize(quantize(x, scale, fmt, tile), scale, fmt, tile, x.dtype)
    # By rows in pieces that stay in cache: the float32 intermediates are what takes the time.
    result = torch.empty_like(x)
    step = max(1, CHUNK_ELEMENTS // x.shape[1])
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        part = scale if scale.shape[0] == 1 else scale[rows]
        codes = quantize(x[rows], part, fmt, tile)
        result[rows] = dequantize(codes, part, fmt, tile, x.dtype)
    return result


def round_to_format(x: Tensor, fmt: Format) -> Tensor:
    """Return the code values nearest to x, as `decode(encode(x))`, in fewer operations.

    Shapes: any, float32. Finite or infinite values only.
    """
    x = x.clamp(-fmt.max, fmt.max)
    # The power of two at or below |x|; below the smallest normal value the step is fixed.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    power.clamp_(min=2.0 ** (2 - 2 ** (fmt.exponent_bits - 1)))
    # Adding a number of which the last bit is worth one step rounds to whole steps, ties to even.
    power.mul_(1.5 * 2.0 ** (23 - fmt.mantissa_bits))
    return x.add_(power).sub_(power)
