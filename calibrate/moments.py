"""Second moments of what linear modules read, and of how much each input channel carries.

Owns the accumulation of `H = sum x x^T` over the calibration tokens, in two parts: one that tiers
are fitted on, and one held out, on which their worth is judged. Modules that read one input (q/k/v,
gate/up) share one record of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.calibrate.ranks import ALONE, BLOCK_SEQUENCES, Ranks
from quantkit.moment_ops import gram
from quantkit.scheme import fused_siblings

HOLD_OUT_EVERY = BLOCK_SEQUENCES
"""Each eighth sequence is held out: the last of a block."""
GRAM_TOKENS = 4096
"""Tokens that are multiplied at once."""


@dataclass(slots=True)
class InputMoments:
    """Sums over tokens of one input with K channels.

    fit, held_out: float32 [K, K]; amax: float32 [K], max |x| per channel.
    """

    fit: Tensor
    held_out: Tensor
    amax: Tensor
    num_tokens: int = 0
    num_held_out: int = 0

    @classmethod
    def empty(cls, channels: int, device: torch.device) -> InputMoments:
        """Return moments of nothing."""
        fit, held_out = torch.zeros(2, channels, channels, device=device)
        return cls(fit, held_out, torch.zeros(channels, device=device))

    def divide(self, factors: Tensor) -> None:
        """Account for inputs that are divided by `factors` from now on. Shapes: [K]."""
        for moments in (self.fit, self.held_out):
            moments.div_(factors).div_(factors.unsqueeze(1))
        self.amax = self.amax / factors

    @property
    def judge(self) -> Tensor:
        """The moments to judge by: those held out, or all there are when nothing could be."""
        return self.held_out if self.num_held_out else self.fit

    @property
    def rms(self) -> Tensor:
        """Root mean square of each channel. Shapes: float32 [K]."""
        total = self.fit.diagonal() + self.held_out.diagonal()
        return (total / max(self.num_tokens, 1)).sqrt()

    @property
    def summary(self) -> InputSummary:
        """What reports need of the moments."""
        return InputSummary(self.amax.max().item(), self.rms.cpu())


@dataclass(frozen=True, slots=True)
class InputSummary:
    """The largest |x| of an input, and the root mean square of each channel, float32 [K]."""

    amax: float
    rms: Tensor


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How many tokens an input had, and how many of them were held out."""

    tokens: int = 0
    held_out: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.tokens + other.tokens, self.held_out + other.held_out)


@dataclass(frozen=True, slots=True)
class BlockMoments:
    """What one block of sequences adds to moments; None where it has none of that part."""

    fit: Tensor | None
    held_out: Tensor | None
    amax: Tensor
    counts: TokenCounts


class MomentSums:
    """Moments of one input while they are summed up, block by block; `counts` are of the current.

    All fitted sequences of a block are multiplied together when it ends, so sums depend neither on
    the batch size nor, blocks being added in order, on which process has which block.
    """

    def __init__(self, channels: int, device: torch.device) -> None:
        self.moments: InputMoments | None = None
        self.counts = TokenCounts()
        self._channels, self._device = channels, device
        self._fitted: list[Tensor] = []
        self._held_out: list[Tensor] = []

    def update(self, x: Tensor, first: int) -> None:
        """Take in sequences of the current block; `first` is the number of the first of them.

        Shapes: x [sequences, tokens, K], or [tokens, K] for one sequence.
        """
        for number, rows in enumerate(x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3), first):
            is_held_out = (number + 1) % HOLD_OUT_EVERY == 0
            # A copy: the model may go on to write into its tensor.
            (self._held_out if is_held_out else self._fitted).append(rows.clone())
            self.counts += TokenCounts(rows.shape[0], rows.shape[0] if is_held_out else 0)

    def take(self) -> BlockMoments:
        """Return what the current block adds, and forget it; there must be some tokens."""
        rows = self._fitted + self._held_out
        found = BlockMoments(
            _grams(self._fitted),
            _grams(self._held_out),
            torch.stack([each.abs().amax(dim=0) for each in rows]).amax(dim=0).float(),
            self.counts,
        )
        self._fitted, self._held_out, self.counts = [], [], TokenCounts()
        return found

    def merge(self, block: BlockMoments) -> None:
        """Add the next block."""
        known = self.moments = self.moments or InputMoments.empty(self._channels, self._device)
        if block.fit is not None:
            known.fit.add_(block.fit)
        if block.held_out is not None:
            known.held_out.add_(block.held_out)
        known.amax = torch.maximum(known.amax, block.amax)
        known.num_tokens += block.counts.tokens
        known.num_held_out += block.counts.held_out

    def end_block(self) -> None:
        """Add the current block, if there is any of it."""
        if self.counts.tokens:
            self.merge(self.take())

    def finish(self) -> InputMoments:
        """End the current block; return the moments of all."""
        self.end_block()
        return self.moments or InputMoments.empty(self._channels, self._device)


class MomentObservers:
    """Forward hooks that record the input of every given module, once for each fused group.

    That is when the first of its members, in the order of `modules`, reads. `owners` are the
    processes that get the moments of each group; the first by default. `counts` are of all
    processes, by group.
    """

    def __init__(
        self, modules: Mapping[str, nn.Linear], owners: Mapping[str, int] | None = None
    ) -> None:
        self.counts: dict[str, TokenCounts] = {}
        self.owners = owners or {}
        self._modules = modules
        self._sums: dict[str, MomentSums] = {}
        self._first = 0
        self._handles: list[RemovableHandle] = []
        self._group_of = {name: group_name(name, modules) for name in modules}
        for group, name in first_members(self._group_of).items():
            hook = self._hook(group)
            self._handles.append(modules[name].register_forward_pre_hook(hook, prepend=True))

    def begin(self, first: int) -> None:
        """Announce the sequences from number `first` on."""
        self._first = first

    def end_block(self, ranks: Ranks = ALONE) -> None:
        """Add this round's block of each process to the moments, at the owner of each group."""
        pending = {name: s.counts for name, s in self._sums.items() if s.counts.tokens}
        everywhere = ranks.share(pending)
        for name in dict.fromkeys(self._group_of.values()):
            owner = self.owners.get(name, 0)
            for source in range(ranks.size):
                if name not in everywhere[source]:
                    continue
                self.counts[name] = self.counts.get(name, TokenCounts()) + everywhere[source][name]
                block = self._sums[name].take() if source == ranks.rank else None
                received = ranks.send(block, source, owner)
                if received is not None:
                    self._sums_of(name).merge(received)

    def finish(self) -> dict[str, InputMoments]:
        """Remove the hooks; return {module: moments}, without the modules that never ran.

        And without those whose moments another process has.
        """
        for handle in self._handles:
            handle.remove()
        if any(sums.counts.tokens for sums in self._sums.values()):
            self.end_block()
        known = {group: s.moments for group, s in self._sums.items() if s.moments is not None}
        return {name: known[group] for name, group in self._group_of.items() if group in known}

    def counts_of(self, name: str) -> TokenCounts:
        """Return what a module's input had in all processes."""
        return self.counts.get(self._group_of[name], TokenCounts())

    def _sums_of(self, name: str) -> MomentSums:
        if name not in self._sums:
            module = self._modules[name]
            self._sums[name] = MomentSums(module.in_features, module.weight.device)
        return self._sums[name]

    def _hook(self, name: str) -> Any:
        def observe(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
            if args[0].numel():  # else an expert that no token of this batch was sent to
                self._sums_of(name).update(args[0], self._first)

        return observe


def group_name(name: str, modules: Container[str]) -> str:
    """Return the first member of the fused group of `name` that is among `modules`."""
    return next((s for s in fused_siblings(name) if s in modules), name)


def first_members(group_of: Mapping[str, str]) -> dict[str, str]:
    """Return the first module of each group, of modules in the order in which they are given."""
    firsts: dict[str, str] = {}
    for name, group in group_of.items():
        firsts.setdefault(group, name)
    return firsts


def _grams(sequences: list[Tensor]) -> Tensor | None:
    """Return the sum of `rows^T rows` over sequences, float32 [K, K]. Shapes: each [tokens, K]."""
    if not sequences:
        return None
    first, *others = torch.split(torch.cat(sequences), GRAM_TOKENS)
    total = _gram(first)
    for rows in others:
        total.add_(_gram(rows))
    return total


def _gram(rows: Tensor) -> Tensor:
    """Return `rows^T rows` in float32. Shapes: [tokens, K] -> [K, K]."""
    is_simple = rows.dtype == torch.bfloat16 and rows.device.type == "cpu"
    if is_simple and not torch.cpu._is_amx_tile_supported():
        return gram(rows)
    wide = rows.float()
    if not is_simple:
        return wide.t() @ wide
    # Products of bfloat16 numbers are exact in float32, so the matrix unit loses nothing here.
    with _bfloat16_products():
        return wide.t() @ wide


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Let float32 matmuls on CPU round their operands to bfloat16; sums stay float32."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
