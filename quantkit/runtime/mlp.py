"""The gated MLP of a decoder layer, joined to the residual and the norm in front of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.ops import gate_mul
from quantkit.row_ops import add_rms_norm, add_rms_norm_quantize, gate_mul_quantize
from quantkit.runtime.layers import Linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(act(gate(x)) * up(x))`, gate and up stacked in one linear."""

    gate_up: Linear
    down: Linear
    activation: str

    def after_add_norm(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `total = hidden + delta` and what the MLP makes of `rms_norm(total, weight, eps)`.

        Shapes: hidden, delta [num_tokens, hidden_size], weight [hidden_size] -> two like hidden.
        """
        scaled = self.gate_up.scaled(len(hidden))
        if scaled is None:
            total, normed = add_rms_norm(hidden, delta, weight, eps)
            return total, self.down(self.gate_up.gated(normed, self.activation))
        scale = scaled.input_scale
        total, rows = add_rms_norm_quantize(hidden, delta, weight, eps, scale)
        return total, self._down(scaled.multiply(rows, hidden.dtype))

    def _down(self, both: Tensor) -> Tensor:
        scaled = self.down.scaled(len(both))
        if scaled is None:
            return self.down(gate_mul(both, self.activation))
        rows = gate_mul_quantize(both, self.activation, scaled.input_scale)
        return scaled.multiply(rows, both.dtype)
