"""Which modules of a transformers model are linear layers and nothing else: what may be quantized.

Calibration and the runtime ask here, so that what one quantizes the other can serve.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

from quantkit.errors import UnsupportedError

REFUSED = {"rwkv": "it rescales weights in place while it runs, which 8-bit codes cannot follow"}
"""Models, by model_type, that compute with the weights of linear layers in a way of their own."""

SAME_FUNCTION = ("FalconLinear",)
"""Subclasses of nn.Linear that compute `x @ weight.T + bias` too, rounding otherwise."""


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell whether a module is a linear layer; a subclass may compute anything, and is none."""
    if type(module) is nn.Linear:
        return True
    return isinstance(module, nn.Linear) and type(module).__name__ in SAME_FUNCTION


def check_model_type(model_type: str) -> None:
    """Raise UnsupportedError for a model whose linear layers cannot stand in 8 bits."""
    reason = REFUSED.get(model_type)
    if reason is not None:
        raise UnsupportedError(f"models of type {model_type!r} cannot be quantized: {reason}")
