"""Second moments of what linear modules read, and of how much each input channel carries.

Owns the accumulation of `H = sum x x^T` over the calibration tokens, in two parts: one that tiers
are fitted on, and one held out, on which their worth is judged. Modules that read one input (q/k/v,
gate/up) share one record of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.scheme import fused_siblings

HOLD_OUT_EVERY = 8
"""Each eighth sequence is held out."""


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
    _num_sequences: int = field(default=0, repr=False)

    @classmethod
    def empty(cls, channels: int, device: torch.device) -> InputMoments:
        """Return moments of nothing."""
        fit, held_out = torch.zeros(2, channels, channels, device=device)
        return cls(fit, held_out, torch.zeros(channels, device=device))

    def update(self, x: Tensor) -> None:
        """Take in sequences. Shapes: x [sequences, tokens, K], or [tokens, K] for one sequence.

        One product a sequence, added in order, so that sums do not depend on the batch size.
        """
        for rows in x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3):
            self._num_sequences += 1
            is_held_out = self._num_sequences % HOLD_OUT_EVERY == 0
            product = _gram(rows)
            (self.held_out if is_held_out else self.fit).add_(product)
            self.amax = torch.maximum(self.amax, rows.abs().amax(dim=0).float())
            self.num_tokens += rows.shape[0]
            self.num_held_out += rows.shape[0] if is_held_out else 0

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


class MomentObservers:
    """Forward hooks that record the input of every given module, once for each fused group."""

    def __init__(self, modules: Mapping[str, nn.Linear]) -> None:
        self._moments: dict[str, InputMoments] = {}
        self._handles: list[RemovableHandle] = []
        self._group_of = {name: group_name(name, modules) for name in modules}
        for name in dict.fromkeys(self._group_of.values()):
            self._handles.append(modules[name].register_forward_pre_hook(self._hook(name)))

    def finish(self) -> dict[str, InputMoments]:
        """Remove the hooks; return {module: moments}, without the modules that never ran."""
        for handle in self._handles:
            handle.remove()
        return {
            name: self._moments[group]
            for name, group in self._group_of.items()
            if group in self._moments
        }

    def _hook(self, name: str) -> Any:
        def observe(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            if not x.numel():
                return  # an expert that no token of this batch was sent to
            if name not in self._moments:
                self._moments[name] = InputMoments.empty(x.shape[-1], x.device)
            self._moments[name].update(x)

        return observe


def group_name(name: str, modules: Container[str]) -> str:
    """Return the first member of the fused group of `name` that is among `modules`."""
    return next((s for s in fused_siblings(name) if s in modules), name)


def _gram(rows: Tensor) -> Tensor:
    """Return `rows^T rows` in float32. Shapes: [tokens, K] -> [K, K]."""
    wide = rows.float()
    if rows.dtype != torch.bfloat16 or rows.device.type != "cpu":
        return wide.t() @ wide
    # Products of bfloat16 numbers are exact in float32, so its fast units lose nothing here.
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
