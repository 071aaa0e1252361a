"""The MLP of a mixture-of-experts layer: a router, experts, and one that every token goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.expert_ops import ExpertLinears, expert_mlps
from quantkit.experts import route
from quantkit.ops import FEW_ROWS
from quantkit.runtime.layers import DenseLinear, Linear
from quantkit.runtime.mlp import GatedMlp, PlainMlp, read_mlp
from quantkit.runtime.norms import Norm
from quantkit.runtime.shapes import ExpertShape, ModelShape
from quantkit.runtime.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the likeliest experts of each token. `linear` gives one logit an expert."""

    linear: Linear
    chosen: int
    normalizes: bool  # what is chosen sums to one
    rounds: bool  # to the dtype of the tokens

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the chosen experts and their weights.

        Shapes: [num_tokens, hidden_size] -> int64 and float, [num_tokens, chosen].
        """
        probabilities = self.linear(x).softmax(dim=-1, dtype=torch.float32)
        weights, numbers = probabilities.topk(self.chosen, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return numbers, weights.to(x.dtype) if self.rounds else weights


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Experts whose linears one op runs, on a CPU."""

    linears: ExpertLinears
    activation: str
    many_rows: bool  # the op is fast with any number of rows an expert

    @classmethod
    def of(
        cls, experts: Sequence[GatedMlp | PlainMlp], dtype: torch.dtype
    ) -> GroupedExperts | None:
        """Return the experts for tokens of that dtype; None if the op does not know their kind."""
        gated = [expert for expert in experts if isinstance(expert, GatedMlp)]
        steps = [step for step in (expert.for_step() for expert in gated) if step is not None]
        if not steps or len(steps) < len(experts):
            return None
        linears = ExpertLinears.of(steps)
        return cls(linears, gated[0].activation, linears.multiply_many_rows(dtype))

    def take(self, numbers: Tensor) -> bool:
        """Return whether the op is the faster one for the chosen experts [num_tokens, chosen]."""
        if self.many_rows or numbers.numel() <= FEW_ROWS:
            return True
        return int(numbers.flatten().bincount().max()) <= FEW_ROWS

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts make of x; see `route`."""
        return expert_mlps(x, numbers, weights, self.linears, self.activation)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """`sigmoid(gate(x)) * mlp(x)`, beside what the router chose."""

    gate: Linear
    mlp: GatedMlp | PlainMlp

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [num_tokens, hidden_size] -> the same."""
        return self.gate(x).sigmoid() * self.mlp(x)


@dataclass(frozen=True, slots=True)
class RoutedMlp:
    """The weighted sum of the chosen experts' outputs, and the shared expert's; implements Mlp."""

    router: Router
    experts: tuple[GatedMlp | PlainMlp, ...]
    shared: SharedExpert | None
    grouped: GroupedExperts | None

    @classmethod
    def read(
        cls, reader: WeightSource, shape: ModelShape, experts: ExpertShape, layer: str
    ) -> RoutedMlp:
        """Read the experts of a layer, whose name is given."""
        names, hidden = experts.names, shape.hidden_size
        base = f"{layer}.{names.block}"
        sizes = (hidden, experts.intermediate_size)
        gate = reader.tensor(f"{base}.gate.weight", (experts.count, hidden))
        mlps = tuple(
            read_mlp(reader, f"{base}.experts.{number}", sizes, names.mlp, shape.activation)
            for number in range(experts.count)
        )
        on_cpu = reader.device.type == "cpu"
        return cls(
            Router(DenseLinear(gate), experts.chosen, experts.normalizes, names.rounds),
            mlps,
            cls._read_shared(reader, shape, experts.shared_size, base),
            GroupedExperts.of(mlps, reader.dtype) if on_cpu else None,
        )

    @staticmethod
    def _read_shared(
        reader: WeightSource, shape: ModelShape, size: int | None, base: str
    ) -> SharedExpert | None:
        if size is None:
            return None
        hidden = shape.hidden_size
        gate = reader.tensor(f"{base}.shared_expert_gate.weight", (1, hidden))
        sizes = (hidden, size)
        mlp = read_mlp(reader, f"{base}.shared_expert", sizes, shape.mlp, shape.activation)
        return SharedExpert(DenseLinear(gate), mlp)

    def after_add_norm(
        self, hidden: Tensor, delta: Tensor, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Return `total = hidden + delta` and what the experts make of its norm; see Mlp."""
        if norm is None:
            total = normed = hidden + delta
        else:
            total, normed = norm.after_add(hidden, delta)
        numbers, weights = self.router(normed)
        if self.grouped is not None and self.grouped.take(numbers):
            result = self.grouped(normed, numbers, weights)
        else:
            result = route(normed, numbers, weights, self.experts)
        return total, result if self.shared is None else result + self.shared(normed)

    def for_step(self) -> None:
        """Return None: `decoder_step` knows no experts."""
        return None
