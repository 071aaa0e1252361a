"""Counter-based noise: a function of (seed, sequence, position, ...), nothing else.

No generator, no state: the noise that decides one token is the same whatever else is in the batch,
in which order it runs, and whether the position is reached by plain decoding or by verifying a
draft. What is done with the noise is in `sampling`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.sampling_ops import GOLDEN, LAST_SHIFT, MIX_STEPS, signed

_MASK = (1 << 64) - 1

Bits = NDArray[np.uint64]


def noise_key(seed: int, sequence: int, position: int, *purpose: int) -> int:
    """Return the 64-bit key of one position of one sequence, as a signed integer.

    `seed` is reduced modulo 2**64. Equal prompts in one batch differ by `sequence`. Whatever needs
    noise of its own at the same position gives a `purpose`, any integers.
    """
    key = 0
    for value in (seed, sequence, position, *purpose):
        key = _mix(((key ^ (value & _MASK)) + GOLDEN) & _MASK)
    return signed(key)


def uniform(key: int) -> float:
    """Return the number in (0, 1) that belongs to a key: the u of token 0 in `gumbel`."""
    return ((_mix((key + GOLDEN) & _MASK) >> 12) + 0.5) * 2.0**-52


def token_offsets(token_ids: NDArray[Any]) -> Bits:
    """Return what `noise_bits` takes for token ids; worth keeping for a whole vocabulary."""
    offsets: Bits = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return offsets


def noise_bits(key: int, offsets: Bits) -> Bits:
    """Return the 52 bits behind u of `gumbel`, for one key; numpy's integers are unsigned.

    Shapes: uint64 [tokens] -> uint64 [tokens].
    """
    bits: Bits = offsets + np.uint64(key & _MASK)
    spare = np.empty_like(bits)
    for shift, factor in MIX_STEPS:
        np.bitwise_xor(bits, np.right_shift(bits, np.uint64(shift), out=spare), out=bits)
        np.multiply(bits, np.uint64(factor), out=bits)
    np.bitwise_xor(bits, np.right_shift(bits, np.uint64(LAST_SHIFT), out=spare), out=bits)
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


def _mix(value: int) -> int:
    """Apply the SplitMix64 finalizer to an unsigned 64-bit integer."""
    for shift, factor in MIX_STEPS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> LAST_SHIFT)
