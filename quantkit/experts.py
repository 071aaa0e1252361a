"""The experts of a mixture-of-experts layer as linear modules, one set an expert.

transformers holds all experts of a layer in two three-dimensional parameters, while checkpoints and
engines know each expert's matrices by names of their own (`experts.3.up_proj.weight`). Split into
those, experts are calibrated, stored and served like any other linear. What the layer computes
stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model_names import merged_names

FUSED = ("gate_up_proj", "down_proj")
"""Parameters of transformers' experts: [experts, 2 * inner, hidden], [experts, hidden, inner]."""


class Expert(nn.Module):
    """One gated MLP, of the linears that `leaves` names: gate, up and down.

    `gate` turns gate and up, side by side in [tokens, 2 * inner], into [tokens, inner].
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        leaves: tuple[str, str, str],
        gate: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self._leaves = leaves
        self._gate = gate
        for leaf, weight in zip(leaves, (*gate_up.chunk(2), down), strict=True):
            self.add_module(leaf, _linear(weight))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [tokens, hidden] -> the same."""
        gate, up, down = (self.get_submodule(leaf) for leaf in self._leaves)
        result: Tensor = down(self._gate(torch.cat((gate(x), up(x)), dim=-1)))
        return result


class SplitExperts(nn.Module):
    """Stands where transformers had all experts of a layer; its children are Experts "0", "1", ...

    Experts whose numbers are in `on_every_token` compute all tokens, whatever the router chose:
    hooks see what it did not choose, which does not count.
    """

    def __init__(self, fused: nn.Module, leaves: tuple[str, str, str]) -> None:
        super().__init__()
        self.on_every_token: frozenset[int] = frozenset()
        gate_up, down = (fused.get_parameter(name).data for name in FUSED)
        for name in FUSED:  # what is left of the module knows the activation, and no weights
            delattr(fused, name)
        gate: Any = fused._apply_gate
        for number, weights in enumerate(zip(gate_up, down, strict=True)):
            self.add_module(str(number), Expert(*weights, leaves, gate))

    def __len__(self) -> int:
        return len(self._modules)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, see `route`."""
        experts = list(self.children())
        return route(hidden, top_k_index, top_k_weights, experts, self.on_every_token)


def route(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: Sequence[Callable[[Tensor], Tensor]],
    on_every_token: Container[int] = (),
) -> Tensor:
    """Give each expert the tokens that chose it; return the weighted sums of what comes out.

    An expert whose number is in `on_every_token` computes all tokens, for whoever looks on.
    Shapes: hidden [tokens, hidden_size], which an expert takes and returns rows of; index and
    weights [tokens, k], an index beyond the last expert standing for none -> like hidden.
    """
    tokens, chosen = top_k_index.shape
    numbers, order = top_k_index.reshape(-1).sort(stable=True)
    counts = torch.bincount(numbers, minlength=len(experts)).tolist()[: len(experts)]
    # Copies and permutations: unlike sums over indices, their gradients have one order.
    rows = hidden.unsqueeze(1).expand(-1, chosen, -1).reshape(tokens * chosen, hidden.shape[-1])
    rows = rows[order]
    parts, start = [], 0
    for number, (expert, count) in enumerate(zip(experts, counts, strict=True)):
        if number in on_every_token:
            parts.append(expert(hidden)[order[start : start + count] // chosen])
        elif count:
            parts.append(expert(rows[start : start + count]))
        start += count
    parts.append(torch.zeros_like(rows[start:]))
    weighted = torch.cat(parts) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    by_token = weighted[order.argsort()].view(tokens, chosen, hidden.shape[-1])
    return by_token.sum(dim=1).to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Experts of a layer that can be split: their module's name, and the linears of each."""

    name: str
    leaves: tuple[str, str, str]  # gate, up, down


def find_fused(model: Any) -> list[FusedExperts]:
    """Return the fused experts of a transformers model that are gated MLPs without biases.

    Only of families whose checkpoints have each expert by itself: engines read no others.
    """
    found = []
    for name, module in model.named_modules():
        if not _is_gated_mlps(module):
            continue
        leaves = [leaf for part in FUSED for leaf in merged_names(model, f"{name}.{part}")]
        if len(leaves) == 3:
            found.append(FusedExperts(name, (leaves[0], leaves[1], leaves[2])))
    return found


def split_experts(model: Any, fused: Collection[FusedExperts]) -> dict[str, SplitExperts]:
    """Replace the given experts of the model by split ones; return these by name.

    Weights are not copied; empty ones stay empty.
    """
    found = {}
    for experts in fused:
        split = SplitExperts(model.get_submodule(experts.name), experts.leaves)
        model.set_submodule(experts.name, split)
        found[experts.name] = split
    return found


def _is_gated_mlps(module: nn.Module) -> bool:
    """Tell whether a module holds what `SplitExperts` takes apart.

    transformers marks its experts with how their parameters are laid out.
    """
    layout = ("has_gate", "is_concatenated", "has_bias", "is_transposed", "has_post_expert_norm")
    if [getattr(module, mark, None) for mark in layout] != [True, True, False, False, False]:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    return set(parameters) == set(FUSED) and all(p.dim() == 3 for p in parameters.values())


def _linear(weight: Tensor) -> nn.Linear:
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
