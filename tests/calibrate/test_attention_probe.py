"""Attention is sampled as the layer computes it, whatever the architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from quantkit.calibrate import attention_probe
from quantkit.calibrate.attention_probe import AttentionProbe
from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.scheme import Granularity, QuantSpec
from tests import tiny
from tests.calibrate import models

ModelOf = Callable[[str], Path]
TENSOR = QuantSpec(Granularity.TENSOR)
IDS = torch.stack([tiny.random_ids(40, seed) for seed in range(3)])

OUTPUTS = {
    "llama": "self_attn.o_proj",  # grouped queries
    "llama-odd": "self_attn.o_proj",  # one KV head, odd sizes
    "mistral": "self_attn.o_proj",  # sliding window
    "qwen2": "self_attn.o_proj",
    "qwen2-windows": "self_attn.o_proj",
    "gemma2": "self_attn.o_proj",  # eager, with soft capping and a window
    "gemma3": "self_attn.o_proj",  # window and full by turns
    "gpt-neox": "attention.dense",
    "opt": "self_attn.out_proj",
}
"""The module whose input is the attention's output."""
WINDOWS = {"mistral": 5, "gemma2": 5, "gemma3": 5}
"""Of layer 0."""
NO_INTERFACE = ("bloom", "falcon", "mpt")


@torch.no_grad()
def run_layer(folder: Path, batches: list[Tensor], output_of: str = "") -> tuple[Any, Tensor]:
    """Run layer 0 with an observer; return it and the input of `output_of` for all sequences."""
    skeleton = models.open_skeleton(folder)
    model = LayerwiseModel(skeleton)
    prepared = model.prepare(batches)
    skeleton.load(skeleton.layer_names[0])
    layer, seen = skeleton.layers[0], list[Tensor]()

    def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].float())

    if output_of:
        layer.get_submodule(output_of).register_forward_pre_hook(see)
    observer = KvObserver(TENSOR)
    observer.attach(layer)
    for _ in model.run(0, prepared, observer):
        pass
    observer.detach()
    return observer, torch.cat(seen) if seen else torch.empty(0)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sequence be cut: 64 tokens in all, at most 28 of each."""
    monkeypatch.setattr(attention_probe, "SAMPLE_TOKENS", 64)
    monkeypatch.setattr(attention_probe, "SEQUENCE_TOKENS", 28)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_sample_computes_what_the_layer_does(model_of: ModelOf, kind: str, batch: int) -> None:
    observer, outputs = run_layer(model_of(kind), list(IDS.split(batch)), OUTPUTS[kind])
    samples = observer._probe.samples
    assert [sample.keys.shape[1] for sample in samples] == [28, 28, 8]
    for sample, output in zip(samples, outputs, strict=True):
        tokens = sample.keys.shape[1]
        assert sample.attend is not None
        with torch.no_grad():
            found = sample.attend(sample.keys, sample.values)
        expected = output[:tokens].reshape(tokens, found.shape[0], -1).transpose(0, 1)
        error = (found - expected).norm() / expected.norm()
        assert found.dtype == torch.float32
        assert error < 0.02  # the layer's own is in bfloat16


@pytest.mark.parametrize("kind", [kind for kind in OUTPUTS if kind != "opt"])
def test_each_token_sees_what_the_mask_lets_it(model_of: ModelOf, kind: str) -> None:
    """A changed value reaches its own token and later ones, within the window.

    (The tiny OPT looks at one token only, and not at this one.)
    """
    observer, _ = run_layer(model_of(kind), [IDS[:1]])
    sample = observer._probe.samples[0]
    assert sample.attend is not None
    values = sample.values.clone()
    values[:, 10] += 1e3
    with torch.no_grad():
        change = sample.attend(sample.keys, values) - sample.attend(sample.keys, sample.values)
    reached = change.abs().amax(dim=(0, 2)) > 0
    window = 5 if kind in WINDOWS else 30
    assert not reached[:10].any()
    assert reached[10 : 10 + window].any()
    assert not reached[10 + window :].any()


@pytest.mark.parametrize("kind", NO_INTERFACE)
def test_without_the_interface_keys_and_values_are_sampled_alone(
    model_of: ModelOf, kind: str
) -> None:
    observer, _ = run_layer(model_of(kind), [IDS[:2], IDS[2:]])
    assert [sample.attend for sample in observer._probe.samples] == [None] * 3
    assert sum(sample.keys.shape[1] for sample in observer._probe.samples) == IDS.numel()
    observer.scales("layer")
    assert observer.report.output_error_db is None
    assert observer.report.key_error_db > 25


class FailingLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


@pytest.fixture
def lookup() -> Iterator[Any]:
    """The function of transformers that is replaced while a layer runs; the same afterwards."""
    before = AttentionInterface.get_interface
    yield before
    assert AttentionInterface.get_interface is before


def test_transformers_is_left_as_it_was(model_of: ModelOf, lookup: Any) -> None:
    run_layer(model_of("llama"), [IDS])
    assert AttentionInterface.get_interface is lookup


def test_transformers_is_left_as_it_was_when_a_layer_fails(lookup: Any) -> None:
    layer, observer = FailingLayer(), KvObserver(TENSOR)
    observer.attach(layer)
    with pytest.raises(ValueError, match="no"):
        layer(torch.ones(1))
    observer.detach()
    assert AttentionInterface.get_interface is lookup


@pytest.mark.usefixtures("lookup")
def test_attention_on_other_keys_than_the_cached_is_not_sampled() -> None:
    """Some models repeat KV heads, or compress what they cache."""
    probe, states = AttentionProbe(), torch.randn(1, 2, 6, 4)
    probe.install()

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        return query.transpose(1, 2), None

    watched = AttentionInterface()
    watched["test"] = attention
    probe.offer(states, states)
    watched.get_interface("test", attention)(None, states, states * 2, states)
    probe.remove()
    assert [sample.attend for sample in probe.samples] == [None]


@pytest.mark.usefixtures("lookup")
def test_attention_that_cannot_be_cut_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every token sees all others, so the first ones depend on those that are cut off."""
    monkeypatch.setattr(attention_probe, "SEQUENCE_TOKENS", 4)
    probe, states = AttentionProbe(), torch.randn(1, 2, 6, 4)
    interface = AttentionInterface()
    interface["test"] = lambda module, query, key, value: (
        (query.softmax(-1) @ key.mT @ value).transpose(1, 2),
        None,
    )
    probe.install()
    probe.offer(states, states)
    interface.get_interface("test", None)(None, states, states, states)
    probe.remove()
    assert [sample.attend for sample in probe.samples] == [None]
    assert torch.equal(probe.samples[0].keys, states[0, :, :4])


@pytest.mark.usefixtures("lookup")
def test_a_sample_is_bounded() -> None:
    """By tokens in all and of a sequence, by sequences, and by heads times tokens squared."""
    shapes = {(3, 1, 300): [256, 256], (20, 1, 10): [10] * 8, (2, 1024, 100): [64, 64]}
    for (batch, heads, tokens), expected in shapes.items():
        probe, states = AttentionProbe(), torch.ones(batch, heads, tokens, 1)
        probe.offer(states, states)
        probe.remove()
        assert [sample.keys.shape[1] for sample in probe.samples] == expected
        assert probe.full == (sum(expected) == 512)
