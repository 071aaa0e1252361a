"""The MLP of a decoder layer, joined to the residual and the norm in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.decoder_ops import StepLinear
from quantkit.gate_ops import ACTIVATIONS
from quantkit.row_ops import QuantizedRows
from quantkit.runtime.families import MlpNames
from quantkit.runtime.layers import Linear
from quantkit.runtime.norms import Norm
from quantkit.runtime.scaled_linear import ScaledLinear, after_add_norm
from quantkit.runtime.weights import WeightSource


class Mlp(Protocol):
    """What follows attention in a layer."""

    def after_add_norm(
        self, hidden: Tensor, delta: Tensor, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Return `total = hidden + delta` and what the MLP makes of `norm(total)`.

        Shapes: hidden, delta [num_tokens, hidden_size] -> two like hidden.
        """
        ...

    def for_step(self) -> tuple[StepLinear, StepLinear] | None:
        """Return gate/up and down for `decoder_step`; None if it does more than that can do."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(act(gate(x)) * up(x))`, gate and up stacked in one linear."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        """Return the MLP's output. Shapes: [num_tokens, hidden_size] -> the same."""
        return self.down(self.gate_up.gated(x, self.activation))

    def for_step(self) -> tuple[StepLinear, StepLinear] | None:
        """Return gate/up and down for `decoder_step`; None if it does more than that can do."""
        gate_up, down = self.gate_up.for_step(), self.down.for_step()
        return None if gate_up is None or down is None else (gate_up, down)

    def after_add_norm(
        self, hidden: Tensor, delta: Tensor, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Return `total = hidden + delta` and what the MLP makes of its norm; see Mlp."""
        if norm is None:
            total = hidden + delta
            return total, self(total)
        scaled = self.gate_up.scaled(len(hidden))
        if scaled is None:
            total, normed = norm.after_add(hidden, delta)
            return total, self(normed)
        total, rows = norm.quantized_after_add(hidden, delta, scaled.input_scale)
        return total, self._from_rows(scaled, rows, hidden.dtype)

    def _from_rows(self, gate_up: ScaledLinear, x: QuantizedRows, dtype: torch.dtype) -> Tensor:
        down = self.down.scaled(len(x.codes))
        if down is None:
            return self.down(gate_up.multiply_gated(x, self.activation, dtype))
        rows = gate_up.multiply_gated_quantize(x, self.activation, dtype, down.input_scale)
        return down.multiply(rows, dtype)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """`down(act(up(x)))`, rounded after each of the three."""

    up: Linear
    down: Linear
    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        """Return the MLP's output. Shapes: [num_tokens, hidden_size] -> the same."""
        return self._down(self.up(x))

    def for_step(self) -> None:
        """Return None: `decoder_step` has gated MLPs only."""
        return None

    def after_add_norm(
        self, hidden: Tensor, delta: Tensor, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Return `total = hidden + delta` and what the MLP makes of its norm; see Mlp."""
        if norm is None:
            total = hidden + delta
            return total, self(total)
        total, inner = after_add_norm(self.up, hidden, delta, norm)
        return total, self._down(inner)

    def _down(self, inner: Tensor) -> Tensor:
        return self.down(ACTIVATIONS[self.activation](inner))


def read_mlp(
    reader: WeightSource,
    base: str,
    sizes: tuple[int, int],
    names: MlpNames,
    activation: str,
    bias: bool = False,
) -> GatedMlp | PlainMlp:
    """Read the linears that `names` tells below `base`; `sizes` are hidden and inner."""
    hidden, inner = sizes
    parts = 2 if names.gated else 1  # of inner rows
    rows = [parts * inner // len(names.inputs)] * len(names.inputs)
    inputs = reader.linear([f"{base}.{leaf}" for leaf in names.inputs], rows, hidden, bias)
    down = reader.linear([f"{base}.{names.output}"], (hidden,), inner, bias)
    return (GatedMlp if names.gated else PlainMlp)(inputs, down, activation)
