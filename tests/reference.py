"""Oracles: what the package must compute, written from the definitions in float64 numpy.

Slow and plain on purpose, and free of any import from quantkit: a mistake there cannot hide here.
Sections: numerics (formats, scales, tiles); linear ops; attention; calibration; evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Codes = NDArray[np.uint8]


# Numerics: 8-bit floats by their definition.


@dataclass(frozen=True)
class Float8:
    """Sign, exponent, mantissa. `ieee`: the top exponent is for infinity and NaN, as in IEEE 754;
    otherwise only the code with all bits set is NaN and there is no infinity (OCP "FN")."""

    exponent_bits: int
    mantissa_bits: int
    ieee: bool

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1


FLOAT8 = {
    "e4m3": Float8(4, 3, ieee=False),
    "e5m2": Float8(5, 2, ieee=True),
    "e3m4": Float8(3, 4, ieee=True),
}


def float8_value(code: int, name: str) -> float:
    """Return the value of one code."""
    fmt = FLOAT8[name]
    sign = -1.0 if code & 0x80 else 1.0
    steps = 2**fmt.mantissa_bits
    exponent, mantissa = divmod(code & 0x7F, steps)
    top = 2**fmt.exponent_bits - 1
    if exponent == top and fmt.ieee:
        return sign * np.inf if mantissa == 0 else np.nan
    if exponent == top and mantissa == steps - 1:
        return np.nan
    if exponent == 0:
        return sign * mantissa / steps * 2.0 ** (1 - fmt.bias)
    return sign * (1 + mantissa / steps) * 2.0 ** (exponent - fmt.bias)


def float8_values(name: str) -> Float64:
    """Return the values of all 256 codes, in the order of the codes."""
    return np.array([float8_value(code, name) for code in range(256)])


def float8_max(name: str) -> float:
    """Return the largest finite value."""
    values = float8_values(name)
    return float(values[np.isfinite(values)].max())


def float8_encode(x: Float64, name: str) -> Codes:
    """Return the nearest codes, ties to the even code, saturating; NaN gives a NaN code.

    x holds float32 or float64 numbers of any shape; infinities saturate.
    """
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = np.asarray(x, dtype=np.float64)
    positive = float8_values(name)[:128]
    finite = positive[np.isfinite(positive)]  # codes 0, 1, 2, ... in ascending order of value
    magnitude = np.minimum(np.abs(np.nan_to_num(x, posinf=np.inf, neginf=-np.inf)), finite[-1])
    upper = np.searchsorted(finite, magnitude)
    lower = np.maximum(upper - 1, 0)
    middle = (finite[lower] + finite[upper]) / 2
    take_upper = (magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0))
    code = np.where(take_upper, upper, lower)
    nan_code = int(np.flatnonzero(np.isnan(positive))[-1])
    code = np.where(np.isnan(x), nan_code, code)
    return (code | (np.signbit(x).astype(np.int64) << 7)).astype(np.uint8)


def expand_grid(grid: Float64, shape: tuple[int, int], tile: tuple[int, int]) -> Float64:
    """Repeat one value per tile to one per element; tiles at the right and lower edge are cut."""
    rows, columns = shape
    return np.repeat(np.repeat(grid, tile[0], axis=0), tile[1], axis=1)[:rows, :columns]


def tile_amax(x: Float64, tile: tuple[int, int]) -> Float64:
    """Return max |x| of each tile."""
    rows, columns = x.shape
    return np.array(
        [
            [
                np.abs(x[top : top + tile[0], left : left + tile[1]]).max()
                for left in range(0, columns, tile[1])
            ]
            for top in range(0, rows, tile[0])
        ]
    )


def quantize(x: Float64, grid: Float64, name: str, tile: tuple[int, int]) -> Codes:
    """Return codes of x / scale; the quotient is rounded to float32 once, as the package says."""
    scale = expand_grid(grid, x.shape, tile)
    return float8_encode(x.astype(np.float32) / scale.astype(np.float32), name)


def dequantize(codes: Codes, grid: Float64, name: str, tile: tuple[int, int]) -> Float64:
    """Return code values times scale, exactly."""
    return float8_values(name)[codes] * expand_grid(grid, codes.shape, tile)


# Linear ops: products with 8-bit weights. The tile of a weight scale is (1, group_size).


def fp8_linear(
    x: Float64, codes: Codes, grid: Float64, name: str, group_size: int, bias: Float64 | None = None
) -> Float64:
    """Return x @ W.T + bias. Shapes: x [M, K], codes [N, K], grid [N, ceil(K / group_size)]."""
    y = x @ dequantize(codes, grid, name, (1, group_size)).T
    return y if bias is None else y + bias


def outliers(x: Float64, columns: NDArray[np.int64], weight: Float64) -> Float64:
    """Return what input channels add whose weights are kept apart: x[:, columns] @ weight.

    Shapes: x [M, K], columns [n], weight [n, N].
    """
    y = np.zeros((x.shape[0], weight.shape[1]))
    for column, row in zip(columns, weight, strict=True):
        y += np.outer(x[:, column], row)
    return y


def expert_mlps(
    x: Float64,
    numbers: NDArray[np.int64],
    weights: Float64,
    experts: list[tuple[Float64, Float64]],
    activation: str,
) -> Float64:
    """Return the weighted sums of what the chosen experts make of each token.

    Shapes: x [M, H]; numbers and weights [M, k]; an expert's matrices [2 * I, H], [H, I]. A number
    beyond the last expert's stands for none.
    """
    y = np.zeros_like(x)
    for token in range(x.shape[0]):
        for number, weight in zip(numbers[token], weights[token], strict=True):
            if number < len(experts):
                gate_up, down = experts[number]
                inner = gated(x[token : token + 1] @ gate_up.T, activation)
                y[token] += weight * (inner @ down.T)[0]
    return y


ACTIVATIONS: dict[str, Callable[[Float64], Float64]] = {
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(z / np.sqrt(2))),
    "gelu_tanh": lambda z: z * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "relu": lambda z: np.maximum(z, 0),
}


def gated(both: Float64, activation: str) -> Float64:
    """Return act(gate) * up, where gate is the first half of the columns and up the second."""
    gate, up = np.split(both, 2, axis=1)
    return ACTIVATIONS[activation](gate) * up


# Attention: norm, rotary embedding, attention over a paged cache.


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def rotary(x: Float64, positions: NDArray[np.int64], frequencies: Float64) -> Float64:
    """Turn the pair (i, i + D/2) of every head, seen as a complex number, by position * frequency.

    Shapes: x [tokens, heads, D], frequencies [D/2].
    """
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * positions[:, None, None] * frequencies
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(
    query: Float64,
    key: Float64,
    value: Float64,
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float64:
    """Return causal attention, one query and one head at a time.

    The queries [Q, H, D] are the last Q of the L positions of key and value [L, H_kv, D].
    """
    out = np.empty_like(query)
    offset = key.shape[0] - query.shape[0]
    groups = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        end = offset + row + 1
        start = 0 if window is None else max(0, end - window)
        for head in range(query.shape[1]):
            scores = key[start:end, head // groups] @ query[row, head] * softmax_scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ value[start:end, head // groups]
    return out


def paged(cache: NDArray[Any], table: list[int], length: int) -> NDArray[Any]:
    """Return the first `length` tokens of a cache [blocks, block_size, ...], block by block."""
    return np.concatenate([cache[block] for block in table])[:length]


# Calibration: what is stored of a weight, and of a KV cache.


def stored_scale(amax: Float64, name: str = "e4m3") -> Float64:
    """Return amax / max as it is stored: the next bfloat16 up; 1 where amax is 0."""
    exact = (amax.astype(np.float32) / np.float32(float8_max(name))).astype(np.float64)
    mantissa, exponent = np.frexp(np.maximum(exact, 2.0**-126))
    rounded_up = np.ldexp(np.ceil(mantissa * 256) / 256, exponent)  # bfloat16 keeps 8 bits
    return np.where(amax == 0, 1.0, rounded_up)


def quantize_weight(
    weight: Float64, tile: tuple[int, int], amax: Float64 | None = None
) -> tuple[Codes, Float64]:
    """Return (E4M3 codes, grid of scales); `amax` replaces the weight's own where it is shared."""
    grid = stored_scale(tile_amax(weight, tile) if amax is None else amax)
    return quantize(weight, grid, "e4m3", tile), grid


# Evaluation: what a model says about each token, each from a context of its own.


def log_softmax(logits: Float64) -> Float64:
    """Return log(exp(x) / sum(exp(x))) over the last dimension."""
    centred = logits - logits.max(axis=-1, keepdims=True)
    return centred - np.log(np.exp(centred).sum(axis=-1, keepdims=True))


def scored_log_probabilities(
    next_logits: Callable[[list[int]], Float64],
    text: list[int],
    window: int,
    stride: int,
    prefix: tuple[int, ...] = (),
) -> dict[int, Float64]:
    """Return {position: log probabilities [vocab]} of every token of a text that is scored.

    A window reads at most `window` tokens, `prefix` included; window k begins k * stride later than
    the first. A token belongs to the first window that reaches it.
    """
    first = 0 if prefix else 1
    reach = window - max(len(prefix) - 1, 0)
    found = {}
    for position in range(first, len(text)):
        begin = first + max(0, math.ceil((position - first + 1 - reach) / stride)) * stride
        context = [*prefix, *text[begin if prefix else begin - 1 : position]]
        found[position] = log_softmax(next_logits(context))
    return found


def perplexity(log_probabilities: dict[int, Float64], text: list[int]) -> float:
    """Return exp(-mean log p) over all scored tokens."""
    terms = [row[text[position]] for position, row in log_probabilities.items()]
    return math.exp(-math.fsum(terms) / len(terms))


def divergences(original: dict[int, Float64], other: dict[int, Float64]) -> Float64:
    """Return KL(original || other) of every scored token."""
    pairs = ((original[position], other[position]) for position in original)
    return np.array([(np.exp(p) * (p - q)).sum() for p, q in pairs])


# Accuracy tiers: scales by search, error feedback, smoothing.


def weighted_tile_errors(
    weight: Float64, grid: Float64, name: str, tile: tuple[int, int], moments: Float64
) -> Float64:
    """Return the weighted squared error of rounding with `grid`, per tile.

    moments [K]: sum_k m_k e_k^2. moments [K, K]: e^T M e with the columns within the tile only.
    """
    error = dequantize(quantize(weight, grid, name, tile), grid, name, tile) - weight
    full = np.diag(moments) if moments.ndim == 1 else moments
    result = np.zeros_like(grid)
    for row in range(weight.shape[0]):
        for left in range(0, weight.shape[1], tile[1]):
            part = error[row, left : left + tile[1]]
            inner = full[left : left + tile[1], left : left + tile[1]]
            result[row // tile[0], left // tile[1]] += part @ inner @ part
    return result


def output_errors(values: Float64, target: Float64, moments: Float64) -> Float64:
    """Return e M e^T for every row e of target - values: the mean squared output error."""
    error = target - values
    return np.einsum("ni,ij,nj->n", error, moments, error)


def feed_back_errors(
    weight: Float64, moments: Float64, scale: Float64, name: str, order: list[int]
) -> Float64:
    """Return the quantized values by the textbook: round a column, repair with the rest, drop it.

    After rounding column k by an error e, the best change of all columns that are left is
    -e / [H^-1]_kk * [H^-1]_k; then k is taken out of H^-1 by one step of Gaussian elimination.
    scale: one for each element.
    """
    weight, inverse = weight.copy(), np.linalg.inv(moments)
    values = np.empty_like(weight)
    for place, k in enumerate(order):
        rest = order[place + 1 :]
        codes = float8_encode(weight[:, k] / scale[:, k], name)
        values[:, k] = float8_values(name)[codes] * scale[:, k]
        error = (weight[:, k] - values[:, k]) / inverse[k, k]
        weight[:, rest] -= np.outer(error, inverse[k, rest])
        inverse -= np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return values


def repeat_kv_channels(
    channels: NDArray[Any], num_heads: int, num_kv_heads: int, head_dim: int
) -> NDArray[Any]:
    """Return, for each channel of the attention's output, that of the value head behind it."""
    return np.array(
        [
            channels[(head * num_kv_heads // num_heads) * head_dim + lane]
            for head in range(num_heads)
            for lane in range(head_dim)
        ]
    )


# KV cache: what rounding keys and values costs at the output of attention.


def round_states(states: Float64, scale: Float64) -> Float64:
    """Return E4M3 keys or values [tokens, heads, D], given one scale or one a head."""
    by_head = np.broadcast_to(scale, states.shape[1])
    rounded = np.empty_like(states)
    for head, one in enumerate(by_head):
        grid, x = np.array([[one]]), states[:, head]
        rounded[:, head] = dequantize(quantize(x, grid, "e4m3", x.shape), grid, "e4m3", x.shape)
    return rounded


def attention_errors(
    query: Float64,
    key: Float64,
    value: Float64,
    scales: tuple[Float64, Float64],
    softmax_scale: float,
    window: int | None = None,
) -> Float64:
    """Return the squared error of each head's output [heads] with keys and values of 8 bits."""
    key_scale, value_scale = scales
    rounded = round_states(key, key_scale), round_states(value, value_scale)
    exact = attention(query, key, value, softmax_scale, window)
    error = attention(query, *rounded, softmax_scale, window) - exact
    return (error**2).sum(axis=(0, 2))


# Smoothing: what 8-bit weights and inputs cost with factors folded in.


def smoothed_output_error(
    inputs: Float64,
    weight: Float64,
    factors: Float64,
    weight_tile: tuple[int, int],
    input_tile: tuple[int, int] | None,
    input_amax: float | None = None,
) -> Float64:
    """Return `sum |x W^T - Q(x / s) Q(W s)^T|^2`, E4M3; `input_amax` is that of a static scale.

    Shapes: inputs [tokens, K], weight [N, K], factors [K]. No `input_tile` leaves inputs as is.
    """
    codes, grid = quantize_weight(weight * factors, weight_tile)
    rounded, seen = dequantize(codes, grid, "e4m3", weight_tile), inputs / factors
    if input_tile is not None:
        amax = None if input_amax is None else np.array([[input_amax]])
        codes, grid = quantize_weight(seen, input_tile, amax)
        seen = dequantize(codes, grid, "e4m3", input_tile)
    error: Float64 = ((inputs @ weight.T - seen @ rounded.T) ** 2).sum()
    return error
