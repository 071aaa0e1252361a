"""All experts of a layer in one op: float64, the same bits as one expert at a time, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import expert_ops, ops
from quantkit.decoder_ops import StepLinear
from quantkit.errors import UnsupportedError
from quantkit.expert_ops import ExpertLinears, expert_mlps
from quantkit.extension import EXTENSION_LOADED
from quantkit.numerics import E3M4, E4M3, E5M2, FORMATS, dequantize
from quantkit.outliers import Outliers
from tests import reference
from tests.test_ops import EVERY_DTYPE, Layer

REJECTED = (UnsupportedError, RuntimeError)
HIDDEN, INNER = 72, 40
# What a result may be off by, relative to its norm: of x and of what is between the linears, half a
# unit each, and float16 sums where they are allowed; see `Layer.oracle`.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1.5e-3}


def fp8(rows: int, columns: int, number: int) -> StepLinear:
    """Formats, groups, biases and outlier columns that differ between experts."""
    fmt, group = (E4M3, E3M4, E5M2)[number % 3], (columns, 32, 16)[number // 2 % 3]
    layer = Layer.random(rows, columns, fmt, group)
    outliers = None
    if number % 2:
        outliers = Outliers(torch.tensor([1, 7, 39]).int(), torch.randn(3, rows).bfloat16() / 8)
    bias = layer.bias if number == 3 else None
    return StepLinear(layer.weight, layer.scale / columns**0.5 * 4, bias, group, outliers)


def same_kind(rows: int, columns: int, number: int) -> StepLinear:
    layer = Layer.random(rows, columns, E4M3, columns)
    return StepLinear(layer.weight, layer.scale / columns**0.5 * 4, None, columns)


def plain(rows: int, columns: int, number: int) -> StepLinear:
    return StepLinear((torch.randn(rows, columns) / columns**0.5).bfloat16())


def dense(linear: StepLinear) -> Tensor:
    """Return the weight in float64, outlier columns included; none has a bias."""
    if linear.scale is None:
        return linear.weight.double()
    fmt = next(fmt for fmt in FORMATS.values() if fmt.dtype == linear.weight.dtype)
    grid = (1, linear.group_size)
    weight = dequantize(linear.weight, linear.scale, fmt, grid, torch.float32).double()
    if linear.outliers is not None:
        weight[:, linear.outliers.columns.long()] += linear.outliers.weight.double().T
    return weight


@dataclass
class Experts:
    pairs: list[tuple[StepLinear, StepLinear]]

    @classmethod
    def random(cls, count: int, make: Callable[[int, int, int], StepLinear]) -> Experts:
        return cls([(make(2 * INNER, HIDDEN, n), make(HIDDEN, INNER, n)) for n in range(count)])

    def arguments(self, tokens: int, chosen: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return arguments with choices as a router makes them, a few of which are no expert's."""
        scores = torch.rand(tokens, len(self.pairs) + 1)
        numbers = scores.topk(chosen, dim=-1).indices
        return {
            "x": torch.randn(tokens, HIDDEN).to(dtype),
            "numbers": numbers,
            "weights": torch.rand(tokens, chosen),
            "experts": ExpertLinears.of(self.pairs),
            "activation": "silu",
        }


def one_at_a_time(arguments: dict[str, Any]) -> Tensor:
    x, numbers, weights, experts, activation = arguments.values()
    return expert_ops.expert_mlps_reference(
        x, numbers, weights, experts.tensors, experts.group_sizes, activation
    )


MAKERS = pytest.mark.parametrize("make", [fp8, same_kind, plain])


@MAKERS
@EVERY_DTYPE
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_experts_match_the_oracle(
    activation: str, dtype: torch.dtype, make: Callable[[int, int, int], StepLinear]
) -> None:
    experts = Experts.random(3 if make is fp8 else 5, make)  # the fourth has a bias
    pairs = [tuple(dense(linear).numpy() for linear in pair) for pair in experts.pairs]
    for tokens, chosen in ((1, 1), (1, 2), (4, 2), (9, 3), (40, 2)):
        arguments = experts.arguments(tokens, chosen, dtype) | {"activation": activation}
        x, numbers, weights = list(arguments.values())[:3]
        expected = torch.from_numpy(
            reference.expert_mlps(
                x.double().numpy(), numbers.numpy(), weights.double().numpy(), pairs, activation
            )
        )
        actual = expert_mlps(**arguments)
        assert actual.dtype == dtype
        assert (actual.double() - expected).norm() <= ERROR[dtype] * expected.norm() + 1e-12


@pytest.mark.skipif(not EXTENSION_LOADED, reason="the reference is all there is")
@MAKERS
@EVERY_DTYPE
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_as_one_expert_at_a_time(
    weights_dtype: torch.dtype,
    dtype: torch.dtype,
    make: Callable[[int, int, int], StepLinear],
) -> None:
    experts = Experts.random(6, make)
    for tokens, chosen in ((1, 1), (1, 2), (2, 6), (7, 2), (16, 1), (13, 3)):
        arguments = experts.arguments(tokens, chosen, dtype)
        arguments["weights"] = arguments["weights"].to(weights_dtype)
        assert torch.equal(expert_mlps(**arguments), one_at_a_time(arguments))


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's matmul does not promise it")
@EVERY_DTYPE
def test_many_tokens_are_the_same_bits_as_some_of_them(dtype: torch.dtype) -> None:
    # All to one expert and both sides of 1024, the tokens that are computed at a time.
    experts = Experts.random(2, same_kind)
    arguments = experts.arguments(1100, 1, dtype)
    arguments["numbers"] = torch.zeros(1100, 1, dtype=torch.int64)
    whole = expert_mlps(**arguments)
    for first, last in ((0, 1024), (1000, 1100), (1024, 1034)):
        part = dict(arguments)
        for name in ("x", "numbers", "weights"):
            part[name] = arguments[name][first:last].contiguous()
        assert torch.equal(expert_mlps(**part), whole[first:last])


@pytest.mark.skipif(not EXTENSION_LOADED, reason="torch's matmul does not promise it")
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_threads_do_not_change_a_bit(tokens: int) -> None:
    torch.manual_seed(1)
    pairs = [(same_kind(2 * 520, 576, number), same_kind(576, 520, number)) for number in range(4)]
    arguments = {
        "x": torch.randn(tokens, 576).bfloat16(),
        "numbers": torch.rand(tokens, 4).topk(2).indices,
        "weights": torch.rand(tokens, 2),
        "experts": ExpertLinears.of(pairs),
        "activation": "silu",
    }
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(expert_mlps(**arguments))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@EVERY_DTYPE
def test_no_tokens_no_choices_and_no_experts_chosen_give_nothing(dtype: torch.dtype) -> None:
    experts = Experts.random(3, fp8)
    assert expert_mlps(**experts.arguments(0, 2, dtype)).shape == (0, HIDDEN)
    arguments = experts.arguments(4, 2, dtype)
    arguments["numbers"] = torch.full((4, 2), 3)
    arguments["weights"] = torch.full((4, 2), torch.nan)
    assert torch.equal(expert_mlps(**arguments), torch.zeros(4, HIDDEN, dtype=dtype))
    arguments["numbers"], arguments["weights"] = torch.zeros(4, 0).long(), torch.zeros(4, 0)
    assert torch.equal(expert_mlps(**arguments), torch.zeros(4, HIDDEN, dtype=dtype))


def test_only_the_chosen_experts_are_handed_over() -> None:
    linears = ExpertLinears.of(Experts.random(9, fp8).pairs)
    some, numbers = linears.chosen(torch.tensor([[7, 3, 9], [3, -1, 7]]))
    assert numbers.tolist() == [[1, 0, 2], [0, 2, 1]]
    assert some.group_sizes == [*linears.group_sizes[6:8], *linears.group_sizes[14:16]]
    kept = [*linears.tensors[30:40], *linears.tensors[70:80]]
    assert all(a is b for a, b in zip(some.tensors, kept, strict=True))
    none, numbers = linears.chosen(torch.full((2, 1), 9))
    assert (len(none), numbers.tolist()) == (1, [[1], [1]])


def test_a_token_may_choose_an_expert_twice() -> None:
    experts = Experts.random(2, same_kind)
    arguments = experts.arguments(2, 2, torch.float32)
    arguments["numbers"] = torch.tensor([[1, 1], [0, 1]])
    arguments["weights"] = torch.tensor([[0.25, 0.5], [1.0, 0.0]])
    once = dict(arguments)
    once["numbers"], once["weights"] = torch.tensor([[1], [0]]), torch.tensor([[0.75], [1.0]])
    torch.testing.assert_close(expert_mlps(**arguments), expert_mlps(**once))


BAD = {
    "x rank": ({"x": torch.randn(72)}, r"x must be of shape \[num_tokens, hidden\]"),
    "x dtype": ({"x": torch.randn(3, HIDDEN).double()}, "x must be .*float16, got float64"),
    "numbers dtype": ({"numbers": torch.zeros(3, 2).int()}, "numbers must be int64, got int32"),
    "numbers shape": ({"numbers": torch.zeros(2, 2).long()}, r"numbers must be .* = \[3, any\]"),
    "weights shape": ({"weights": torch.zeros(3, 1)}, r"weights must be .* = \[3, 2\]"),
    "weights dtype": ({"weights": torch.zeros(3, 2).long()}, "weights must be .*, got int64"),
    "activation": ({"activation": "swish"}, "activation must be .*, got 'swish'"),
    "no experts": (
        {"experts": ExpertLinears()},
        "linears and group_sizes must be 10 and 2 an expert, got 0 and 0",
    ),
    "hidden": (
        {"x": torch.randn(3, 64)},
        r"weight must be of shape \[N, K\] = \[(any|80), 64\], got \[80, 72\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named(case: str) -> None:
    change, message = BAD[case]
    arguments = Experts.random(2, fp8).arguments(3, 2, torch.float32) | change
    with pytest.raises(REJECTED, match=f"expert_mlps: {message}"):
        expert_mlps(**arguments)


def test_experts_of_other_sizes_are_refused() -> None:
    pairs = Experts.random(2, same_kind).pairs
    pairs[1] = (same_kind(2 * INNER + 2, HIDDEN, 0), same_kind(HIDDEN, INNER + 1, 0))
    arguments = Experts(pairs).arguments(3, 2, torch.float32)
    with pytest.raises(REJECTED, match=r"weight must be .* = \[80, 72\], got \[82, 72\]"):
        expert_mlps(**arguments)


def test_the_fake_kernel_agrees_with_the_real_one() -> None:
    arguments = Experts.random(2, same_kind).arguments(3, 2, torch.bfloat16)
    x, numbers, weights, experts, activation = arguments.values()
    torch.library.opcheck(
        torch.ops.quantkit.expert_mlps.default,
        (x, numbers, weights, experts.tensors, experts.group_sizes, activation),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )


def test_which_experts_take_many_rows() -> None:
    experts = Experts.random(2, same_kind)
    linears = ExpertLinears.of(experts.pairs)
    for dtype in (torch.float32, torch.bfloat16):
        every = [
            ops.multiplies_many_rows(torch.empty(0, 1, dtype=dtype), w.weight, w.group_size)
            for pair in experts.pairs
            for w in pair
        ]
        assert linears.multiply_many_rows(dtype) == all(every)
