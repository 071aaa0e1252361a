"""The custom op that gates: an activation of one half of the columns, times the other.

Schema, fake kernel and a reference kernel in torch, as in `ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

import quantkit.extension  # noqa: F401 - adds the C++ kernels
from quantkit.errors import nearest
from quantkit.op_checks import check_float, check_tensor, fail

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gate_mul(both: Tensor, activation: str) -> Tensor:
    """Return act(first half of the columns) * second half, in float32 with one rounding.

    Shapes: [num_tokens, 2 * intermediate] -> [num_tokens, intermediate]; `activation` is a key of
    `ACTIVATIONS`.
    """
    out: Tensor = torch.ops.quantkit.gate_mul(both, activation)
    return out


def gate(both: Tensor, activation: str) -> Tensor:
    """Return act(first half of the columns) * second half."""
    first, second = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](first) * second


def check_activation(op: str, activation: str) -> None:
    """Raise UnsupportedError unless `activation` is a key of ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        actual = f"{activation!r}{nearest(activation, ACTIVATIONS)}"
        fail(op, "activation", "silu, gelu, gelu_tanh or relu", actual)


torch.library.define("quantkit::gate_mul", "(Tensor both, str activation) -> Tensor")


@torch.library.impl("quantkit::gate_mul", "default")
def _gate_mul_reference(both: Tensor, activation: str) -> Tensor:
    op = "gate_mul"
    check_float(op, "both", both.dtype)
    check_tensor(op, "both", both, "[num_tokens, 2 * intermediate]", (None, None))
    if both.shape[1] % 2:
        fail(op, "both", "gate columns then as many up columns", list(both.shape))
    check_activation(op, activation)
    return gate(both.float(), activation).to(both.dtype)


def _gate_mul_fake(both: Tensor, activation: str) -> Tensor:
    return both.new_empty(both.shape[0], both.shape[1] // 2)


torch.library.register_fake("quantkit::gate_mul", _gate_mul_fake)
