"""A few linear modules without a model around them."""

from __future__ import annotations

import torch
from torch import nn

from quantkit.calibrate.quantized_layer import QuantizedLinear
from quantkit.scheme import Granularity, QuantSpec

STATIC = QuantSpec(Granularity.TENSOR)


def block(features: int = 32) -> tuple[nn.Module, dict[str, nn.Linear]]:
    """An attention-like block: q, k and v read x, o reads another tensor."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    modules = {f"attn.{name}": nn.Linear(features, features) for name in names}
    return nn.ModuleList(modules.values()), modules


def linears_for(modules: dict[str, nn.Linear]) -> dict[str, QuantizedLinear]:
    return {
        name: QuantizedLinear(name, STATIC, torch.zeros(0), torch.ones(1), 0.0, 1.0, 0)
        for name in modules
    }
