"""Experts taken apart compute what transformers computes with them in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quantkit.experts import SplitExperts, find_fused, split_experts
from tests import checkpoints, tiny
from tests.calibrate import models

KINDS = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3"]
IDS = torch.stack([tiny.random_ids(20, seed) for seed in (1, 2)])


def model_of(kind: str, dtype: torch.dtype, experts: str = "eager") -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(models.CONFIGS[kind]())
        checkpoints.randomize(model)
    model.set_experts_implementation(experts)
    return model.to(dtype).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model(IDS).logits
    return result


def one_list() -> tuple[SplitExperts, Any]:
    """Return the experts of a layer, split, and the block they are in."""
    model = model_of("mixtral", torch.float32)
    split = split_experts(model, find_fused(model))
    return split["model.layers.0.mlp.experts"], model.model.layers[0].mlp


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_split_experts_compute_the_same_in_float32(kind: str, experts: str) -> None:
    model = model_of(kind, torch.float32, experts)
    before = logits(model)
    assert split_experts(model, find_fused(model))
    # Sums over experts and channels may be in another order: a few units in the last place.
    assert (logits(model) - before).abs().max() <= 4e-6 * before.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_split_experts_compute_the_same_bits_as_grouped_ones_in_bfloat16(kind: str) -> None:
    model = model_of(kind, torch.bfloat16, "grouped_mm")
    before = logits(model)
    split_experts(model, find_fused(model))
    assert torch.equal(logits(model), before)


def test_gradients_are_the_same_too() -> None:
    model = model_of("mixtral", torch.float64)
    hidden = torch.randn(7, 64, dtype=torch.float64, requires_grad=True)
    block = model.model.layers[0].mlp

    def gradient() -> Tensor:
        return torch.autograd.grad(block(hidden.unsqueeze(0)).square().sum(), hidden)[0]

    before = gradient()
    split_experts(model, find_fused(model))
    assert torch.allclose(gradient(), before, rtol=1e-10)


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        ("mixtral", ("w1", "w3", "w2")),
        ("qwen2-moe", ("gate_proj", "up_proj", "down_proj")),
        ("deepseek-v3", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_linears_have_the_names_that_checkpoints_of_the_family_have(
    kind: str, leaves: tuple[str, ...]
) -> None:
    found = find_fused(model_of(kind, torch.float32))
    assert {experts.leaves for experts in found} == {leaves}


@pytest.mark.parametrize("kind", ["gpt-oss", "llama"])
def test_experts_of_another_form_are_left_alone(kind: str) -> None:
    config = models.CONFIGS[kind]()
    assert find_fused(transformers.AutoModelForCausalLM.from_config(config)) == []


def test_experts_that_no_checkpoint_has_one_by_one_are_left_alone() -> None:
    config = transformers.GraniteMoeConfig(**tiny.LLAMA, num_local_experts=4)
    assert find_fused(transformers.AutoModelForCausalLM.from_config(config)) == []


def test_weights_are_not_copied() -> None:
    model = model_of("qwen3-moe", torch.float32)
    fused = model.model.layers[0].mlp.experts.gate_up_proj.data
    split_experts(model, find_fused(model))
    up = model.get_parameter("model.layers.0.mlp.experts.2.up_proj.weight")
    assert up.data_ptr() == fused[2, 48:].data_ptr()
    assert not any("gate_up_proj" in name for name, _ in model.named_parameters())


def test_no_tokens_give_no_rows() -> None:
    experts, _ = one_list()
    nothing = torch.zeros(0, 2)
    assert experts(torch.zeros(0, 64), nothing.long(), nothing).shape == (0, 64)
    assert experts.get_submodule("0")(torch.zeros(0, 64)).shape == (0, 64)


def test_an_index_beyond_the_experts_adds_nothing() -> None:
    experts, _ = one_list()
    x, weights = torch.randn(3, 64), torch.tensor([[0.5, 0.5]] * 3)
    alone = experts(x, torch.tensor([[1], [0], [3]]), weights[:, :1])
    beside = experts(x, torch.tensor([[1, 4], [4, 0], [3, 4]]), weights)
    assert torch.allclose(beside, alone, atol=1e-6)


def test_on_every_token_experts_see_all_and_the_output_stays() -> None:
    experts, block = one_list()
    x = torch.randn(1, 9, 64)
    before, rows = block(x), dict[int, int]()
    for number, expert in enumerate(experts.children()):

        def count(_: Any, args: tuple[Tensor], number: int = number) -> None:
            rows[number] = rows.get(number, 0) + len(args[0])

        expert.register_forward_pre_hook(count)
    block(x)
    routed = dict(rows)
    assert sum(routed.values()) == 2 * 9
    rows.clear()
    experts.on_every_token = frozenset({0, 2})
    after = block(x)
    assert rows == {**routed, 0: 9, 2: 9}
    assert torch.allclose(after, before, atol=1e-6)
