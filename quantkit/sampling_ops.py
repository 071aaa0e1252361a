"""Custom ops that choose one token a row: the largest score, without or with Gumbel noise.

Schema, fake kernel and a reference kernel in torch; the kernels in C++ (csrc/cpu/sampling.cpp) and
CUDA (csrc/cuda/sampling.cu) choose the same tokens without a noise tensor. What scores mean, and
where keys come from, is in `quantkit.runtime.sampling` and `quantkit.runtime.noise`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

import quantkit.extension  # noqa: F401 - adds the C++ kernels

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT: Final = 31
"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the increment, shifts and factors in turn."""


def argmax_rows(scores: Tensor) -> Tensor:
    """Return the first largest column of every row; the place of a NaN if there is one.

    Shapes: float32 [rows, vocab], contiguous -> int64 [rows].
    """
    chosen: Tensor = torch.ops.quantkit.argmax_rows(scores)
    return chosen


def sample_gumbel(scores: Tensor, keys: Tensor) -> Tensor:
    """Return argmax(scores + noise) per row, the noise being `gumbel` of the row's key.

    Shapes: scores float32 [rows, vocab], contiguous, -inf where a token is excluded; keys int64
    [rows] -> int64 [rows].
    """
    chosen: Tensor = torch.ops.quantkit.sample_gumbel(scores, keys)
    return chosen


def draw_rows(
    scores: Tensor,
    keys: Tensor | None,
    token_ids: Tensor | None,
    vocab: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return a token a row, and how likely it was: its part of `softmax(scores / temperature)`.

    The token is the argmax of the scores, or with keys of `(scores - their maximum) / temperature`
    plus the noise of `sample_gumbel`. Columns are the `token_ids`, in ascending order, of `vocab`
    in all; or without them the tokens. Where a score is NaN the likelihood is too.

    Shapes: scores float32 [rows, columns], contiguous, the largest of a row finite; keys int64
    [rows]; token_ids int64 [columns] -> int64 [rows], float32 [rows].
    """
    drawn: tuple[Tensor, Tensor] = torch.ops.quantkit.draw_rows(
        scores, keys, token_ids, vocab, temperature
    )
    return drawn


def widen(scores: Tensor, token_ids: Tensor, vocab: int) -> Tensor:
    """Return scores of all tokens, -inf for those that have no column.

    Shapes: float32 [rows, columns], int64 [columns] -> [rows, vocab].
    """
    wide = scores.new_full((len(scores), vocab), -torch.inf)
    return wide.index_copy_(1, token_ids, scores)


def nucleus_bound(probabilities: Tensor, top_p: float) -> Tensor:
    """Return the probability of the last token needed to reach the mass `top_p`, 0 if none does.

    Tokens with less are excluded; in the order of their probabilities, those are what remains when
    the mass is reached. Shapes: float32 [rows, vocab], contiguous -> float32 [rows, 1].
    """
    bound: Tensor = torch.ops.quantkit.nucleus_bound(probabilities, top_p)
    return bound


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise `-log(-log(u))` for every pair of a key and a token id.

    u is the SplitMix64 stream that starts at the key, read at offset token id + 1 and reduced to 52
    bits, so that it lies strictly between 0 and 1.
    Shapes: keys int64 [rows], token_ids int64 [tokens] -> float64 [rows, tokens].
    """
    bits = keys[:, None] + (token_ids + 1) * signed(GOLDEN)
    for shift, factor in MIX_STEPS:
        bits.bitwise_xor_(_logical_shift(bits, shift)).mul_(signed(factor))
    bits.bitwise_xor_(_logical_shift(bits, LAST_SHIFT))
    uniforms = _logical_shift(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniforms.log_().neg_().log_().neg_()


def signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value


def _logical_shift(bits: Tensor, count: int) -> Tensor:
    """Shift right filling with zeros; torch's own shift of int64 keeps the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


torch.library.define("quantkit::argmax_rows", "(Tensor scores) -> Tensor")
torch.library.define(
    "quantkit::draw_rows",
    "(Tensor scores, Tensor? keys, Tensor? token_ids, int vocab, float temperature)"
    " -> (Tensor, Tensor)",
)
torch.library.define("quantkit::nucleus_bound", "(Tensor probabilities, float top_p) -> Tensor")
torch.library.define("quantkit::sample_gumbel", "(Tensor scores, Tensor keys) -> Tensor")


def _argmax_rows_reference(scores: Tensor) -> Tensor:
    return scores.argmax(dim=-1)


def _sample_gumbel_reference(scores: Tensor, keys: Tensor) -> Tensor:
    token_ids = torch.arange(scores.shape[-1], device=scores.device)
    return gumbel(keys, token_ids).add_(scores).argmax(dim=-1)


def _draw_rows_reference(
    scores: Tensor, keys: Tensor | None, token_ids: Tensor | None, vocab: int, temperature: float
) -> tuple[Tensor, Tensor]:
    wide = scores if token_ids is None else widen(scores, token_ids, vocab)
    if keys is None:
        tokens, weights = argmax_rows(wide), wide / temperature
    else:
        weights = (wide - wide.amax(-1, keepdim=True)) / temperature
        tokens = sample_gumbel(weights, keys)
    return tokens, weights.softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _nucleus_bound_reference(probabilities: Tensor, top_p: float) -> Tensor:
    # Sorting a whole vocabulary costs more than a decode step of a small model, and the nucleus is
    # nearly always found in its head.
    vocab = probabilities.shape[-1]
    for count in (256, 8192, vocab):
        largest = probabilities.topk(min(count, vocab)).values
        mass = largest.double().cumsum(dim=-1)
        if bool((mass[:, -1] >= top_p).all()):
            break
    # A token is needed while those before it have not reached the mass.
    needed = (mass - largest < top_p).sum(dim=-1, keepdim=True)
    return largest.gather(-1, needed.clamp(min=1) - 1)


def _argmax_rows_fake(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape[:1], dtype=torch.int64)


def _draw_rows_fake(
    scores: Tensor, keys: Tensor | None, token_ids: Tensor | None, vocab: int, temperature: float
) -> tuple[Tensor, Tensor]:
    return _argmax_rows_fake(scores), scores.new_empty(scores.shape[:1])


def _nucleus_bound_fake(probabilities: Tensor, top_p: float) -> Tensor:
    return probabilities.new_empty(probabilities.shape[0], 1)


def _sample_gumbel_fake(scores: Tensor, keys: Tensor) -> Tensor:
    return _argmax_rows_fake(scores)


torch.library.impl("quantkit::argmax_rows", "default")(_argmax_rows_reference)
torch.library.impl("quantkit::draw_rows", "default")(_draw_rows_reference)
torch.library.impl("quantkit::nucleus_bound", "default")(_nucleus_bound_reference)
torch.library.impl("quantkit::sample_gumbel", "default")(_sample_gumbel_reference)
torch.library.register_fake("quantkit::argmax_rows", _argmax_rows_fake)
torch.library.register_fake("quantkit::sample_gumbel", _sample_gumbel_fake)
torch.library.register_fake("quantkit::draw_rows", _draw_rows_fake)
torch.library.register_fake("quantkit::nucleus_bound", _nucleus_bound_fake)
