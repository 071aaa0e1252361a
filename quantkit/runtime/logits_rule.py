"""What a model does to the products of its output head before they are logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """Logits are `products / divisor` (Granite), or `cap * tanh(products / cap)` (Gemma 2)."""

    divisor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitsRule:
        """Return the rule of a transformers config."""
        return cls(
            float(getattr(config, "logits_scaling", 1.0)),
            getattr(config, "final_logit_softcapping", None),
        )

    def __call__(self, products: Tensor) -> Tensor:
        """Shapes: float [..., vocab] -> the same."""
        scaled = products if self.divisor == 1.0 else products / self.divisor
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap
