"""The predicted divergence is the measured one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.calibrate import sensitivity
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.quantized_layer import InputQuantizers, quantize_weights
from quantkit.calibrate.sensitivity import MIN_TOKENS, Sensitivity, SensitivityProbe
from quantkit.calibrate.skeleton import Skeleton
from quantkit.scheme import Granularity, QuantSpec
from tests import tiny
from tests.calibrate import models

ModelOf = Callable[[str], Path]
WEIGHTS = QuantSpec(Granularity.CHANNEL)
INPUTS = QuantSpec(Granularity.TOKEN, dynamic=True)


def ids(count: int = 16, tokens: int = 64) -> Tensor:
    return torch.stack([tiny.random_ids(tokens, seed) for seed in range(count)])


def linears(skeleton: Skeleton) -> dict[str, torch.nn.Linear]:
    prefixes = tuple(f"{name}." for name in skeleton.layer_names)
    return {n: m for n, m in skeleton.linear_modules().items() if n.startswith(prefixes)}


def measure(
    folder: Path, inputs: QuantSpec | None = INPUTS, batches: list[Tensor] | None = None
) -> Sensitivity:
    skeleton = models.open_skeleton(folder, torch.float32)
    model = LayerwiseModel(skeleton)
    probe = SensitivityProbe(model, linears(skeleton), WEIGHTS, inputs, quiet=True)
    return probe.measure([ids()] if batches is None else batches)


@torch.no_grad()
def divergence(folder: Path, inputs: QuantSpec | None) -> float:
    """Return the mean KL of the whole model with every module of its layers rounded plainly."""
    skeleton = models.open_skeleton(folder, torch.float32)
    for name in ("", *skeleton.layer_names):
        skeleton.load(name)
    exact = skeleton.model(ids()).logits.log_softmax(-1)
    modules = linears(skeleton)
    found = quantize_weights(skeleton, modules, WEIGHTS)
    if inputs is not None:
        InputQuantizers(modules, inputs).start(found, skeleton.device)
    rounded = skeleton.model(ids()).logits.log_softmax(-1)
    return (exact.exp() * (exact - rounded)).sum(-1).mean().item()


@pytest.mark.parametrize("inputs", [INPUTS, None], ids=["W8A8", "W8"])
def test_the_sum_over_modules_predicts_the_divergence_of_the_model(
    model_of: ModelOf, inputs: QuantSpec | None
) -> None:
    predicted = sum(measure(model_of("llama"), inputs).predicted_kl.values())
    measured = divergence(model_of("llama"), inputs)
    # One drawn token a position, and errors of modules that are taken to be independent.
    assert 0.6 < predicted / measured < 1.6


def test_groups_are_measured_together_and_the_same_every_time(model_of: ModelOf) -> None:
    first, second = (measure(model_of("llama")) for _ in range(2))
    assert first == second
    assert {name.split(".", 3)[3] for name in first.predicted_kl} == {
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
    }
    assert all(kl > 0 for kl in first.predicted_kl.values())


def test_what_batches_the_sequences_come_in_changes_nothing(model_of: ModelOf) -> None:
    rows = ids(count=48)  # more than are needed
    found = [measure(model_of("llama"), INPUTS, list(rows.split(size))) for size in (1, 7, 48)]
    assert found[0] == found[1] == found[2]
    assert found[0].num_tokens == MIN_TOKENS


def test_one_long_sequence_is_not_enough(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "MIN_TOKENS", 64)
    assert measure(model_of("llama"), INPUTS, [ids(count=3)]).num_tokens == 2 * 64


@pytest.mark.parametrize("kind", ["gemma3", "gpt-neox", "mixtral", "mamba"])
def test_other_families_are_measured_too(model_of: ModelOf, kind: str) -> None:
    found = measure(model_of(kind))
    assert found.predicted_kl
    assert all(kl >= 0 for kl in found.predicted_kl.values())
