"""The op that runs the experts of a mixture-of-experts layer, all in one call.

Schema, fake kernel, and a reference kernel that applies one expert after another; the C++ kernel
gives the same bits. Which experts a token goes to is the router's part, see `quantkit.runtime.moe`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit import ops
from quantkit.decoder_ops import StepLinear, apply_gated, apply_linear
from quantkit.gate_ops import check_activation
from quantkit.op_checks import check_float, check_tensor, dtype_name, fail


@dataclass(slots=True)
class ExpertLinears:
    """Gate/up and down of every expert, flattened into lists once.

    Per expert ten tensors, five for each linear (an empty one stands for None), and two group
    sizes.
    """

    tensors: list[Tensor] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, experts: Iterable[tuple[StepLinear, StepLinear]]) -> ExpertLinears:
        """Return the linears of experts in the order of their numbers."""
        flat, none = cls(), torch.empty(0)
        for expert in experts:
            for linear in expert:
                flat.tensors += [none if tensor is None else tensor for tensor in linear.tensors()]
                flat.group_sizes.append(linear.group_size)
        return flat

    def __len__(self) -> int:
        return len(self.group_sizes) // 2

    def chosen(self, numbers: Tensor) -> tuple[ExpertLinears, Tensor]:
        """Return the experts that occur in `numbers`, at least one, and their numbers among those.

        Handing a tensor to an op costs a quarter of a microsecond, and there may be thousands.
        Shapes: int64 -> the same.
        """
        flat = numbers.flatten().tolist()
        kept = sorted({number for number in flat if 0 <= number < len(self)}) or [0]
        place = {number: index for index, number in enumerate(kept)}
        some = ExpertLinears(
            [tensor for number in kept for tensor in self.tensors[10 * number : 10 * number + 10]],
            [size for number in kept for size in self.group_sizes[2 * number : 2 * number + 2]],
        )
        renumbered = [place.get(number, len(kept)) for number in flat]
        return some, torch.tensor(renumbered, dtype=torch.int64).view(numbers.shape)

    def multiply_many_rows(self, dtype: torch.dtype) -> bool:
        """Return whether `ops.multiplies_many_rows` holds for all of them and x of that dtype."""
        return all(
            ops.multiplies_many_rows(torch.empty(0, weight.shape[1], dtype=dtype), weight, size)
            for weight, size in zip(self.tensors[::5], self.group_sizes, strict=True)
        )


def expert_mlps(
    x: Tensor, numbers: Tensor, weights: Tensor, experts: ExpertLinears, activation: str
) -> Tensor:
    """Return the weighted sum of what each token's experts make of it.

    An expert is `down(act(gate(x)) * up(x))`; what is between its linears is rounded to x's dtype,
    and nothing else before the end: results are multiplied and added in float32, in the order of a
    token's choices. More rows an expert than `ops.FEW_ROWS` need `multiply_many_rows` to be fast.

    Shapes: x [num_tokens, hidden]; numbers int64 [num_tokens, chosen], one that is no expert's
    standing for none; weights [num_tokens, chosen], a float dtype -> like x. Raises as
    `ops.fp8_linear` does.
    """
    if numbers.numel() < len(experts) and numbers.dtype == torch.int64:
        experts, numbers = experts.chosen(numbers)
    out: Tensor = torch.ops.quantkit.expert_mlps(
        x, numbers, weights, experts.tensors, experts.group_sizes, activation
    )
    return out


torch.library.define(
    "quantkit::expert_mlps",
    "(Tensor x, Tensor numbers, Tensor weights, Tensor[] linears, int[] group_sizes,"
    " str activation) -> Tensor",
)


def expert_mlps_reference(
    x: Tensor,
    numbers: Tensor,
    weights: Tensor,
    linears: Sequence[Tensor],
    group_sizes: Sequence[int],
    activation: str,
) -> Tensor:
    """Apply one expert after another; the op's arguments, see `expert_mlps`."""
    _check(x, numbers, weights, linears, group_sizes, activation)
    results = x.new_zeros(*numbers.shape, x.shape[1], dtype=torch.float32)
    for expert in range(len(group_sizes) // 2):
        tokens, choices = (numbers == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate_up, down = (linears[5 * i : 5 * i + 5] for i in (2 * expert, 2 * expert + 1))
        sizes = group_sizes[2 * expert :][:2]
        inner = apply_gated(gate_up, sizes[0], x[tokens], activation)
        results[tokens, choices] = apply_linear(down, sizes[1], inner, torch.float32)
    exists = (numbers >= 0) & (numbers < len(group_sizes) // 2)
    factors = weights.float().masked_fill(~exists, 0.0).unsqueeze(-1)
    total = torch.zeros_like(x, dtype=torch.float32)
    for choice in range(numbers.shape[1]):  # in this order, as the C++ kernel does
        total += results[:, choice] * factors[:, choice]
    return total.to(x.dtype)


def _expert_mlps_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


torch.library.impl("quantkit::expert_mlps", "default")(expert_mlps_reference)
torch.library.register_fake("quantkit::expert_mlps", _expert_mlps_fake)


def _check(
    x: Tensor,
    numbers: Tensor,
    weights: Tensor,
    linears: Sequence[Tensor],
    group_sizes: Sequence[int],
    activation: str,
) -> None:
    op = "expert_mlps"
    check_tensor(op, "x", x, "[num_tokens, hidden]", (None, None))
    if numbers.dtype != torch.int64:
        fail(op, "numbers", "int64", dtype_name(numbers.dtype))
    check_tensor(op, "numbers", numbers, "[num_tokens, chosen]", (len(x), None))
    check_tensor(op, "weights", weights, "numbers's", (len(x), numbers.shape[1]))
    check_activation(op, activation)
    check_float(op, "x", x.dtype)
    count = len(group_sizes) // 2
    if not count or len(group_sizes) != 2 * count or len(linears) != 10 * count:
        lengths = f"{len(linears)} and {len(group_sizes)}"
        fail(op, "linears and group_sizes", "10 and 2 an expert", lengths)
    check_float(op, "weights", weights.dtype)
    hidden, inner = x.shape[1], linears[0].shape[0] // 2
    for gate_up, down in zip(linears[::10], linears[5::10], strict=True):
        check_tensor(op, "weight", gate_up, "[N, K]", (2 * inner, hidden))
        check_tensor(op, "weight", down, "[N, K]", (hidden, inner))
