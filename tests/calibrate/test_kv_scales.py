"""KV scales are measured on what an engine will cache, and are where engines look for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from quantkit.calibrate import calibrate
from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CalibrationError
from quantkit.scheme import Granularity, QuantSpec
from tests import reference, tiny
from tests.calibrate import models

ModelOf = Callable[[str], Path]
TENSOR, HEAD = QuantSpec(Granularity.TENSOR), QuantSpec(Granularity.HEAD)

ATTENTION = {
    "llama": "model.layers.0.self_attn",
    "qwen2": "model.layers.0.self_attn",
    "qwen3": "model.layers.0.self_attn",
    "phi3": "model.layers.0.self_attn",
    "gemma2": "model.layers.0.self_attn",
    "gemma3": "model.layers.0.self_attn",
    "gpt-neox": "gpt_neox.layers.0.attention",
    "opt": "model.decoder.layers.0.self_attn",
    "bloom": "transformer.h.0.self_attention",
    "falcon": "transformer.h.0.self_attention",
    "mpt": "transformer.blocks.0.attn",
    "mixtral": "model.layers.0.self_attn",
}
"""Where the scales of layer 0 belong: the module that holds the key projection on disk."""

LEAVES = ("k_scale", "v_scale")
IDS = torch.stack([tiny.random_ids(24, seed) for seed in (1, 2, 3)])


@torch.no_grad()
def cached_by_transformers(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return (keys, values) of every layer after the source model's own forward, in bfloat16.

    A cache without a config keeps all positions of sliding layers too.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    cache = transformers.DynamicCache()
    model(IDS, use_cache=True, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
def observe(folder: Path, spec: QuantSpec) -> list[KvObserver]:
    """Run the layers of the unquantized model one by one, with an observer on each."""
    skeleton = models.open_skeleton(folder)
    model = LayerwiseModel(skeleton)
    batches = model.prepare([IDS[:2], IDS[2:]])
    observers = []
    for number, name in enumerate(skeleton.layer_names):
        skeleton.load(name)
        observer = KvObserver(spec)
        observer.attach(skeleton.layers[number])
        for batch, output in model.run(number, batches, observer):
            batch.hidden = output
        observer.detach()
        observers.append(observer)
    return observers


def oracle(states: Tensor, per_head: bool) -> Tensor:
    """Return the stored scale of keys or values [batch, heads, tokens, head_dim]."""
    amax = states.abs().amax(dim=(0, 2, 3)) if per_head else states.abs().max().reshape(1)
    return torch.from_numpy(reference.stored_scale(amax.double().numpy())).float()


@pytest.mark.filterwarnings("ignore:.*past_key_values")
@pytest.mark.parametrize("spec", [TENSOR, HEAD], ids=["tensor", "head"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_scales_are_amax_over_what_transformers_caches(
    model_of: ModelOf, kind: str, spec: QuantSpec
) -> None:
    per_head = spec is HEAD
    for observer, (keys, values) in zip(
        observe(model_of(kind), spec), cached_by_transformers(model_of(kind)), strict=True
    ):
        scales = observer.scales("layer")
        k_scale, v_scale = (scales[f"layer.{observer.owner}.{leaf}"] for leaf in LEAVES)
        assert torch.equal(k_scale.flatten(), oracle(keys, per_head))
        assert torch.equal(v_scale.flatten(), oracle(values, per_head))
        expected_shape = (keys.shape[1], 1, 1) if per_head else (1,)
        assert k_scale.shape == v_scale.shape == expected_shape


@pytest.mark.parametrize("kind", ATTENTION)
def test_scales_are_stored_beside_the_key_projection(
    model_of: ModelOf, calibration_file: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    calibrate(model_of(kind), out, data=[str(calibration_file)], samples=2, progress=False)
    checkpoint = open_checkpoint(out)
    stored = [name for name in checkpoint.names if name.endswith(("k_scale", "v_scale"))]
    first, second = ATTENTION[kind], ATTENTION[kind].replace(".0.", ".1.")
    assert stored == sorted(f"{base}.{leaf}" for base in (first, second) for leaf in LEAVES)
    assert any(
        name.startswith(f"{first}.") and name.endswith(".weight") for name in checkpoint.names
    )
    for layer in (0, 1):
        assert all(scale.dtype == torch.float32 for scale in checkpoint.kv_scales(layer))


@pytest.mark.filterwarnings("ignore:.*past_key_values")
def test_keys_are_measured_after_rotary_embedding(model_of: ModelOf) -> None:
    """Rotation moves magnitude between two channels, so amax before it is another number."""
    skeleton = models.open_skeleton(model_of("llama"))
    skeleton.load("")
    skeleton.load(skeleton.layer_names[0])
    layer: Any = skeleton.layers[0]
    embedded = skeleton.model.get_input_embeddings()(IDS)
    before = layer.self_attn.k_proj(layer.input_layernorm(embedded)).abs().max()
    (keys, _), *_ = cached_by_transformers(model_of("llama"))
    observer = observe(model_of("llama"), TENSOR)[0]
    assert observer.keys.amax == keys.abs().max()
    assert observer.keys.amax != before


def test_all_hooks_are_removed_by_detach(model_of: ModelOf) -> None:
    layer = models.open_skeleton(model_of("llama")).layers[0]
    observer = KvObserver(TENSOR)
    observer.attach(layer)
    assert any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    observer.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())


def test_b25_a_layer_that_caches_nothing_is_named() -> None:
    with pytest.raises(CalibrationError, match=r"model\.layers\.7 cached no keys or values.*--kv"):
        KvObserver(TENSOR).scales("model.layers.7")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_are_not_finite_are_named(bad: float) -> None:
    observer = KvObserver(TENSOR)
    observer.attach(nn.Identity())
    observer.update(torch.full((1, 1, 1, 2), bad), torch.ones(1, 1, 1, 2))
    observer.owner = ""
    with pytest.raises(CalibrationError, match=r"model.layers.3 .*not finite"):
        observer.scales("model.layers.3")


def test_a_model_without_any_cache_is_refused_with_the_way_out(
    model_of: ModelOf, calibration_file: Path, tmp_path: Path
) -> None:
    source, data = model_of("mamba"), [str(calibration_file)]
    with pytest.raises(CalibrationError, match=r"--kv none"):
        calibrate(source, tmp_path / "out", data=data, samples=2, progress=False)
    calibrate(source, tmp_path / "out", data=data, samples=2, kv="none", progress=False)
    assert open_checkpoint(tmp_path / "out").scheme.kv is None


def test_layers_that_share_an_earlier_cache_need_no_scales(
    model_of: ModelOf, calibration_file: Path, tmp_path: Path
) -> None:
    data = [str(calibration_file)]
    calibrate(model_of("gemma4-shared-kv"), tmp_path / "out", data=data, samples=2, progress=False)
    checkpoint = open_checkpoint(tmp_path / "out")
    owners = {name.split(".")[2] for name in checkpoint.names if name.endswith("k_scale")}
    assert owners == {"0", "1"}


LONG = torch.stack([tiny.random_ids(60, seed) for seed in range(10)])
"""Enough tokens to choose scales by."""


@torch.no_grad()
def observe_long(
    folder: Path, spec: QuantSpec, batch: int = 10
) -> tuple[dict[str, Tensor], KvObserver]:
    """Return the scales of layer 0 on LONG, in batches of some size, and the observer."""
    skeleton = models.open_skeleton(folder)
    model = LayerwiseModel(skeleton)
    batches = model.prepare(LONG.split(batch))
    skeleton.load(skeleton.layer_names[0])
    observer = KvObserver(spec)
    observer.attach(skeleton.layers[0])
    for _ in model.run(0, batches, observer):
        pass
    observer.detach()
    return observer.scales("layer"), observer


@pytest.mark.parametrize("spec", [TENSOR, HEAD], ids=["tensor", "head"])
@pytest.mark.parametrize("kind", ["llama", "llama-odd", "mistral", "gemma2", "gemma3", "bloom"])
def test_chosen_scales_lie_in_the_octave_above_amax(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, kind: str, spec: QuantSpec
) -> None:
    monkeypatch.setattr("quantkit.calibrate.attention_probe.SAMPLE_TOKENS", 480)
    scales, observer = observe_long(model_of(kind), spec)
    report = observer.report
    assert report is not None
    for leaf, amaxes in (("k_scale", observer.keys.amax), ("v_scale", observer.values.amax)):
        (scale,) = (s for name, s in scales.items() if name.endswith(leaf))
        assert amaxes is not None
        plain = torch.from_numpy(reference.stored_scale(amaxes.double().numpy())).float()
        assert torch.equal(scale.bfloat16().float(), scale)
        assert ((scale.flatten() >= plain) & (scale.flatten() < 2 * plain)).all()
    if kind != "bloom":  # which does not show its attention
        assert report.output_error_db is not None
        assert report.plain_output_error_db is not None
        assert report.output_error_db >= report.plain_output_error_db
        assert not report.flagged


@pytest.mark.parametrize("kind", ["llama", "gemma3", "bloom"])
def test_scales_and_report_do_not_depend_on_the_batch_size(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, kind: str
) -> None:
    monkeypatch.setattr("quantkit.calibrate.attention_probe.SAMPLE_TOKENS", 300)
    (scales, observer), *others = (observe_long(model_of(kind), HEAD, size) for size in (1, 4, 10))
    for other_scales, other in others:
        assert other.report == observer.report
        assert scales.keys() == other_scales.keys()
        assert all(torch.equal(scale, other_scales[name]) for name, scale in scales.items())


def test_a_choice_among_scales_is_made_from_512_tokens_on(model_of: ModelOf) -> None:
    """Eight sequences of 60 tokens are fewer, so amax stays; test_b25 relies on it too."""
    _, observer = observe_long(model_of("llama"), TENSOR)
    assert observer.report is not None
    assert observer.report.output_error_db == observer.report.plain_output_error_db
