"""Move range between layers by per-channel factors that leave the model's function as it is.

Owns the factors, what is divided and multiplied by them, and how their strength is chosen
(SmoothQuant, arXiv 2211.10438; activation-aware factors, arXiv 2306.00978). Works on dicts of
tensors by name; which modules form a pair, and which error decides, is up to the caller.

The division must commute with all that lies between the two ends: nothing between a norm and the
linears that read it, a product between up and down, a weighted sum over tokens between v and o.
A factor that is a power of two changes no bit of the function, in any floating-point type; the
exception is a norm that adds an offset to its weight, see `apply_pair`.

On what to expect: an 8-bit *float* keeps its relative precision over many octaves, so equal ranges
buy little where scales follow each token. They matter where one static scale must serve channels,
or tokens, that are 2^13 and more apart, and for the smallest values beside a huge one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.errors import CalibrationError

ALPHAS: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
"""Strengths to try; 0 would only equalize the weights' columns."""

Strength = tuple[str, float]
"""How factors came about: ("smoothquant" or "awq", alpha)."""


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Query heads that share key and value heads; query head i reads KV head i // group.

    `reduce` and `expand` translate between channels of v_proj's output, [num_kv_heads * head_dim],
    and of o_proj's input, [num_heads * head_dim], in the order of transformers' repeat_kv.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        """Raise CalibrationError where heads cannot be grouped evenly."""
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1 or (
            self.num_heads % self.num_kv_heads
        ):
            raise CalibrationError(
                f"{self.num_heads} query heads of {self.head_dim} channels cannot share "
                f"{self.num_kv_heads} key/value heads"
            )

    def reduce(self, amax: Tensor) -> Tensor:
        """Return the maximum over the query heads of each KV head.

        Shapes: [num_heads * head_dim] -> [num_kv_heads * head_dim].
        """
        grouped = amax.view(self.num_kv_heads, -1, self.head_dim)
        return grouped.amax(dim=1).reshape(-1)

    def expand(self, factors: Tensor) -> Tensor:
        """Repeat each KV head's factors for its query heads.

        Shapes: [num_kv_heads * head_dim] -> [num_heads * head_dim].
        """
        by_head = factors.view(self.num_kv_heads, self.head_dim)
        repeats = self.num_heads // self.num_kv_heads
        return by_head.repeat_interleave(repeats, dim=0).reshape(-1)


@dataclass(frozen=True, slots=True)
class SmoothingPair:
    """Two ends of a factor: the module whose outputs are divided, the linears that multiply.

    `source` is a norm (weight [C]) or a linear (weight [C, in]); `targets` are all linears that
    read its output, and nothing else may read it. `heads` is given for v -> o. `norm_offset` is
    what a norm adds to its stored weight before use (1 in Gemma). `rows` = (start, stop) are the
    rows of a fused source (qkv, gate and up) that are meant; None is all of them.
    """

    source: str
    targets: tuple[str, ...]
    heads: HeadGroups | None = None
    norm_offset: float = 0.0
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """What the report calls it."""
        return f"{self.source} -> {', '.join(self.targets)}"

    def columns(self, factors: Tensor) -> Tensor:
        """Return the factor of each channel that the targets read.

        Shapes: [source channels] -> [target channels].
        """
        return factors if self.heads is None else self.heads.expand(factors)

    def channels(self, amax: Tensor) -> Tensor:
        """Return the maximum over all target channels that one factor serves.

        Shapes: [target channels] -> [source channels].
        """
        return amax if self.heads is None else self.heads.reduce(amax)


@dataclass(frozen=True, slots=True)
class ChosenFactors:
    """The factors with the least error; strength is None where leaving all as it is was best."""

    factors: Tensor
    strength: Strength | None
    plain_error: float
    error: float


def smoothing_factors(
    input_amax: Tensor, weight_amax: Tensor, alpha: float, power_of_two: bool = True
) -> Tensor:
    """Return the factors `s_j = amax(X_j)^alpha / amax(W_j)^(1 - alpha)`, SmoothQuant's.

    X_j is divided by s_j, column j of the weights multiplied by it. Channels that are dead at
    either end get 1. Shapes: [C], [C] -> float32 [C]; the amax of v -> o's inputs is to be reduced
    by `HeadGroups` first, and the weights' as well.
    Raises CalibrationError for an alpha outside [0, 1] or amax values that are not finite.
    """
    _check_alpha(alpha)
    inputs, weights = input_amax.double(), weight_amax.double()
    return _finish(inputs**alpha / weights ** (1 - alpha), inputs, weights, power_of_two)


def awq_factors(
    input_mean: Tensor, weight_amax: Tensor, alpha: float, power_of_two: bool = True
) -> Tensor:
    """Return activation-aware factors `s_j = mean|X_j|^alpha`, scaled to centre around 1.

    They give channels with large inputs more of the weights' precision, which pays where weights
    are coarser than inputs. Shapes, dead channels and errors as for `smoothing_factors`.
    """
    _check_alpha(alpha)
    inputs, weights = input_mean.double(), weight_amax.double()
    factors = inputs**alpha
    alive = factors[(inputs > 0) & (weights > 0)]
    if alive.numel():
        factors = factors / (alive.amax() * alive.amin()).sqrt()
    return _finish(factors, inputs, weights, power_of_two)


def column_amax(weights: Sequence[Tensor]) -> Tensor:
    """Return max |W_nk| over all rows of all weights. Shapes: each [N_i, K] -> float32 [K]."""
    return torch.stack([weight.abs().amax(dim=0).float() for weight in weights]).amax(dim=0)


def choose_factors(
    candidates: Mapping[Strength, Tensor],
    error: Callable[[Tensor], float],
    min_gain_db: float = 0.0,
) -> ChosenFactors:
    """Return the candidate with the least `error(factors)`; no smoothing at all is one of them.

    A candidate must lower the squared error by more than `min_gain_db` dB: of several that differ
    by chance only, one is always a little better. A tie goes to the first; an error that is not a
    number never wins. Shapes: factors [C]. Raises CalibrationError without candidates.
    """
    if not candidates:
        raise CalibrationError("no smoothing factors to choose from")
    ones = torch.ones_like(next(iter(candidates.values())))
    plain = error(ones)
    best = ChosenFactors(ones, None, plain, plain * 10 ** (-min_gain_db / 10))
    for strength, factors in candidates.items():
        found = error(factors)
        if found < best.error:
            best = ChosenFactors(factors, strength, plain, found)
    return best if best.strength else ChosenFactors(ones, None, plain, plain)


def apply_pair(
    weights: Mapping[str, Tensor], pair: SmoothingPair, factors: Tensor
) -> dict[str, Tensor]:
    """Return the tensors of both ends with the factors folded in: the same function.

    `weights` holds at least `{module}.weight` of both ends, and `.bias` of the source if it has
    one; the result holds new tensors of the same dtypes under these names and nothing else.

    A norm's weight is rounded first, and the targets get the factor that this rounding realized;
    so with an offset (1 + w), where no factor is exact in bfloat16, only the targets' products are
    rounded, like those of factors that are not powers of two. A channel whose 1 + w would round to
    zero is left as it is.
    Shapes: factors [C], one per output channel of the source (per row of `pair.rows`).
    """
    return _folded(weights, pair, factors)[0]


def _folded(
    weights: Mapping[str, Tensor], pair: SmoothingPair, factors: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return what `apply_pair` does, and the factors that were realized, float32 [C]."""
    source, bias = weights[f"{pair.source}.weight"], weights.get(f"{pair.source}.bias")
    rows = slice(*(pair.rows or (0, source.shape[0])))
    if factors.shape != source[rows].shape[:1]:
        raise CalibrationError(
            f"{pair.source} has {source[rows].shape[0]} output channels, got "
            f"{list(factors.shape)} smoothing factors"
        )
    folded, factors = {f"{pair.source}.weight": source.clone()}, factors.float()
    if source.dim() == 1:
        folded[f"{pair.source}.weight"], factors = _divide_norm(source, factors, pair.norm_offset)
    else:
        folded[f"{pair.source}.weight"][rows] = _divide(source[rows], factors)
    if bias is not None:
        folded[f"{pair.source}.bias"] = bias.clone()
        folded[f"{pair.source}.bias"][rows] = _divide(bias[rows], factors)
    columns = pair.columns(factors)
    for target in pair.targets:
        weight = weights[f"{target}.weight"]
        if columns.shape[0] != weight.shape[1]:
            raise CalibrationError(
                f"{target} reads {weight.shape[1]} channels and {pair.source} gives "
                f"{columns.shape[0]}; they cannot be smoothed together"
            )
        folded[f"{target}.weight"] = (weight.float() * columns).to(weight.dtype)
    return folded, factors


@dataclass(frozen=True, slots=True)
class Folded:
    """What `fold` did: tensors that the parameters held before, and the factors in force, [C]."""

    before: dict[str, Tensor]
    factors: Tensor


def fold(layer: nn.Module, pair: SmoothingPair, factors: Tensor) -> Folded:
    """Fold factors into the parameters of a loaded layer, as `apply_pair` does.

    Names in `pair` are relative to `layer`. The tensors that were there are not written to, so
    `restore` can undo it with them. Shapes: factors [C]. Raises CalibrationError as `apply_pair`.
    """
    names = [f"{pair.source}.bias", *(f"{end}.weight" for end in (pair.source, *pair.targets))]
    parameters = dict(layer.named_parameters())
    before = {name: parameters[name].data for name in names if name in parameters}
    folded, realized = _folded(before, pair, factors.to(before[names[-1]].device))
    restore(layer, folded)
    return Folded(before, realized)


def restore(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make parameters of the layer hold these tensors, by names relative to it."""
    for name, tensor in tensors.items():
        layer.get_parameter(name).data = tensor


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise CalibrationError(f"smoothing.alpha must be in [0, 1], got {alpha}")


def _finish(factors: Tensor, inputs: Tensor, weights: Tensor, power_of_two: bool) -> Tensor:
    """Check, round to powers of two if asked, and set dead channels to 1."""
    if not (inputs.isfinite().all() and weights.isfinite().all()):
        raise CalibrationError(
            "channel ranges for smoothing have NaN or infinite values; the model itself is broken "
            "at this layer"
        )
    if power_of_two:
        factors = torch.exp2(factors.log2().round())
    factors = torch.where((inputs > 0) & (weights > 0), factors, 1.0)
    return factors.float()


def _divide(tensor: Tensor, factors: Tensor) -> Tensor:
    """Divide the rows of a weight, or the entries of a bias."""
    by_row = factors.float().view(-1, *[1] * (tensor.dim() - 1))
    return (tensor.float() / by_row).to(tensor.dtype)


def _divide_norm(stored: Tensor, factors: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """Divide what a norm multiplies by, `offset + stored`; return it and the factors it realized.

    Shapes: [C], [C] -> [C] as stored, float32 [C].
    """
    used = stored.float() + offset
    divided = (used / factors - offset).to(stored.dtype)
    realized = used / (divided.float() + offset)
    lost = ~(realized.isfinite() & (realized > 0))
    realized = torch.where(lost, 1.0, realized)
    return torch.where(lost, stored, divided), torch.where(used == 0, factors, realized)
