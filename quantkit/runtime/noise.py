"""Counter-based Gumbel noise: a function of (seed, sequence, position, token id), nothing else.

No generator, no state: the noise that decides one token is the same whatever else is in the batch,
in which order it runs, and whether the position is reached by plain decoding or by verifying a
draft. What is done with the noise is in `sampling`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB


def noise_key(seed: int, sequence: int, position: int) -> int:
    """Return the 64-bit key of one position of one sequence, as a signed integer.

    `seed` is reduced modulo 2**64. Equal prompts in one batch differ by `sequence`.
    """
    key = 0
    for value in (seed, sequence, position):
        key = _mix(((key ^ (value & _MASK)) + _GOLDEN) & _MASK)
    return _signed(key)


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
    uniform = _logical_shift(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


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


def noise_keys(seed: int, places: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Return the keys of (sequence, position) pairs as int64 [len(places)]."""
    keys = [noise_key(seed, sequence, position) for sequence, position in places]
    return torch.tensor(keys, dtype=torch.int64, device=device)
