"""Counter-based noise: a function of (seed, sequence, position, ...), nothing else.

No generator, no state: the noise that decides one token is the same whatever else is in the batch,
in which order it runs, and whether the position is reached by plain decoding or by verifying a
draft. What is done with the noise is in `sampling`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB

Bits = NDArray[np.uint64]


def noise_key(seed: int, sequence: int, position: int, *purpose: int) -> int:
    """Return the 64-bit key of one position of one sequence, as a signed integer.

    `seed` is reduced modulo 2**64. Equal prompts in one batch differ by `sequence`. Whatever needs
    noise of its own at the same position gives a `purpose`, any integers.
    """
    key = 0
    for value in (seed, sequence, position, *purpose):
        key = _mix(((key ^ (value & _MASK)) + _GOLDEN) & _MASK)
    return _signed(key)


def uniform(key: int) -> float:
    """Return the number in (0, 1) that belongs to a key: the u of token 0 in `gumbel`."""
    return ((_mix((key + _GOLDEN) & _MASK) >> 12) + 0.5) * 2.0**-52


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise `-log(-log(u))` for every pair of a key and a token id.

    u is the SplitMix64 stream that starts at the key (Steele, Lea and Flood, OOPSLA 2014), read at
    offset token id + 1 and reduced to 52 bits, so that it lies strictly between 0 and 1.
    Shapes: keys int64 [rows], token_ids int64 [tokens] -> float64 [rows, tokens].
    """
    bits = keys[:, None] + (token_ids + 1) * _signed(_GOLDEN)
    # In place throughout: on a CPU this runs over the vocabulary for every token, memory-bound.
    for shift, factor in ((30, _FACTOR_1), (27, _FACTOR_2)):
        bits.bitwise_xor_(_logical_shift(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_logical_shift(bits, 31))
    uniforms = _logical_shift(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniforms.log_().neg_().log_().neg_()


def token_offsets(token_ids: NDArray[Any]) -> Bits:
    """Return what `noise_bits` takes for token ids; worth keeping for a whole vocabulary."""
    offsets: Bits = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return offsets


def noise_bits(key: int, offsets: Bits) -> Bits:
    """Return the 52 bits behind u of `gumbel`, for one key; numpy's integers are unsigned.

    Shapes: uint64 [tokens] -> uint64 [tokens].
    """
    bits: Bits = offsets + np.uint64(key & _MASK)
    spare = np.empty_like(bits)
    for shift, factor in ((30, _FACTOR_1), (27, _FACTOR_2)):
        np.bitwise_xor(bits, np.right_shift(bits, np.uint64(shift), out=spare), out=bits)
        np.multiply(bits, np.uint64(factor), out=bits)
    np.bitwise_xor(bits, np.right_shift(bits, np.uint64(31), out=spare), out=bits)
    return np.right_shift(bits, np.uint64(12), out=bits)


def gumbel_of_bits(bits: Bits) -> NDArray[np.float64]:
    """Return the noise that `gumbel` makes of these bits. Shapes: any -> the same."""
    noise: NDArray[np.float64] = -np.log(-np.log((bits + 0.5) * 2.0**-52))
    return noise


def bits_below(noise: float) -> int:
    """Return a number of bits whose Gumbel noise, and that of any smaller one, is below `noise`."""
    u = float(np.exp(-np.exp(-noise)))
    # A margin for the roundings of four logarithms and exponentials; near 1, u has few digits.
    return max(0, int(u * 2.0**52 * (1 - 1e-12)) - 16)


def _logical_shift(bits: Tensor, count: int) -> Tensor:
    """Shift right filling with zeros; torch's own shift of int64 keeps the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(value: int) -> int:
    """Apply the SplitMix64 finalizer to an unsigned 64-bit integer."""
    value = ((value ^ (value >> 30)) * _FACTOR_1) & _MASK
    value = ((value ^ (value >> 27)) * _FACTOR_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value
