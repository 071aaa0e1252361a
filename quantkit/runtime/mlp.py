"""The MLP of a decoder layer, joined to the residual and the norm in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantkit.decoder_ops import StepLinear
from quantkit.ops import gate_mul
from quantkit.row_ops import add_rms_norm, add_rms_norm_quantize, gate_mul_quantize
from quantkit.runtime.layers import Linear
from quantkit.runtime.weights import WeightSource


class Mlp(Protocol):
    """What follows attention in a layer."""

    def after_add_norm(
        self, hidden: Tensor, delta: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `total = hidden + delta` and what the MLP makes of `rms_norm(total, weight, eps)`.

        Without a weight there is no norm. Shapes: hidden, delta [num_tokens, hidden_size], weight
        [hidden_size] -> two like hidden.
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

    @classmethod
    def read(
        cls,
        reader: WeightSource,
        base: str,
        sizes: tuple[int, int],
        activation: str,
        leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        fused: bool = False,
    ) -> GatedMlp:
        """Read the linears `leaves` (gate, up, down) below `base`; `sizes` are hidden and inner.

        `fused` reads gate and up from one matrix, `gate_up_proj`.
        """
        hidden, inner = sizes
        gate, up, down = (f"{base}.{leaf}" for leaf in leaves)
        inputs, rows = ([gate, up], [inner, inner])
        if fused:
            inputs, rows = [f"{base}.gate_up_proj"], [2 * inner]
        return cls(
            reader.linear(inputs, rows, hidden, bias),
            reader.linear([down], (hidden,), inner, bias),
            activation,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the MLP's output. Shapes: [num_tokens, hidden_size] -> the same."""
        return self.down(self.gate_up.gated(x, self.activation))

    def for_step(self) -> tuple[StepLinear, StepLinear] | None:
        """Return gate/up and down for `decoder_step`; None if it does more than that can do."""
        gate_up, down = self.gate_up.for_step(), self.down.for_step()
        return None if gate_up is None or down is None else (gate_up, down)

    def after_add_norm(
        self, hidden: Tensor, delta: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `total = hidden + delta` and what the MLP makes of its norm; see Mlp."""
        if weight is None:
            total = hidden + delta
            return total, self(total)
        scaled = self.gate_up.scaled(len(hidden))
        if scaled is None:
            total, normed = add_rms_norm(hidden, delta, weight, eps)
            return total, self(normed)
        scale = scaled.input_scale
        total, rows = add_rms_norm_quantize(hidden, delta, weight, eps, scale)
        return total, self._down(scaled.multiply(rows, hidden.dtype))

    def _down(self, both: Tensor) -> Tensor:
        scaled = self.down.scaled(len(both))
        if scaled is None:
            return self.down(gate_mul(both, self.activation))
        rows = gate_mul_quantize(both, self.activation, scaled.input_scale)
        return scaled.multiply(rows, both.dtype)
