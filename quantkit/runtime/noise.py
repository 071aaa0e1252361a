"""Counter-based noise: a function of (seed, sequence, position, ...), nothing else.

No generator, no state: the noise that decides one token is the same whatever else is in the batch,
in which order it runs, and whether the position is reached by plain decoding or by verifying a
draft. What is done with the noise is in `sampling`.
"""

from __future__ import annotations

from quantkit.sampling_ops import GOLDEN, LAST_SHIFT, MIX_STEPS, signed

_MASK = (1 << 64) - 1


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


def _mix(value: int) -> int:
    """Apply the SplitMix64 finalizer to an unsigned 64-bit integer."""
    for shift, factor in MIX_STEPS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> LAST_SHIFT)
