"""What static scales cannot hold is counted as it happens, and named where it is much."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from quantkit.evaluate import evaluate
from quantkit.evaluate.report import text_rows
from quantkit.evaluate.saturation import SaturationSummary
from quantkit.runtime.loading import load_engine
from quantkit.runtime.saturation import Saturation, SaturationCount
from quantkit.scheme import Granularity, QuantSpec, Scheme
from tests import checkpoints, tiny
from tests.evaluate.conftest import CONFIG

STATIC = Scheme(QuantSpec(Granularity.CHANNEL), QuantSpec(Granularity.TENSOR))
LAYER = "model.layers.0"
TOKENS = 40


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static")
    config = LlamaConfig(**CONFIG)
    built = checkpoints.build(folder, config, STATIC, kv="fp8")
    tiny.save_tokenizer(built)
    return built


def narrowed(folder: Path, target: Path, **scales: float) -> Path:
    """Return a copy of a checkpoint with other static scales, by the ends of their names."""
    shutil.copytree(folder, target)
    for leaf, scale in scales.items():
        owner = "self_attn" if leaf in ("k_scale", "v_scale") else "self_attn.q_proj"
        checkpoints.add(target, f"{LAYER}.{owner}.{leaf}", torch.tensor([scale]))
    return target


def counted(folder: Path, ids: Tensor, **options: Any) -> dict[str, SaturationCount]:
    saturation = Saturation()
    engine = load_engine(folder, dtype="float32", saturation=saturation, **options)
    cache = engine.new_cache(1, len(ids))
    # In two steps, one of them of a single token: that path counts too.
    engine.forward(ids[:-1], [0], [len(ids) - 1], cache)
    engine.forward(ids[-1:], [0], [1], cache)
    return saturation.counts()


def test_inputs_beyond_the_scale_are_counted(static: Path, tmp_path: Path) -> None:
    limit = 1.0
    folder = narrowed(static, tmp_path / "narrow", input_scale=limit / 448)
    for sibling in ("k_proj", "v_proj"):
        checkpoints.add(
            folder, f"{LAYER}.self_attn.{sibling}.input_scale", torch.tensor([limit / 448])
        )
    model = checkpoints.reference_model(folder)
    seen: list[Tensor] = []
    reader = model.get_submodule(f"{LAYER}.self_attn.q_proj")
    reader.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = tiny.random_ids(TOKENS)
    with torch.no_grad():
        model(ids.unsqueeze(0))
    expected = int((seen[0].abs() > limit).sum())
    found = counted(folder, ids, activations="quantized", kv="none")
    assert 0 < expected < seen[0].numel()
    assert found[f"{LAYER}.self_attn.q_proj"] == SaturationCount(seen[0].numel(), expected)
    assert len(found) == 4 * CONFIG["num_hidden_layers"]


@pytest.mark.parametrize(("family", "limits"), [("llama", (1.0, 0.5)), ("phi", (50.0, 30.0))])
def test_keys_and_values_beyond_the_scales_are_counted(
    static: Path, tmp_path: Path, family: str, limits: tuple[float, float]
) -> None:
    scales = {"k_scale": limits[0] / 448, "v_scale": limits[1] / 448}
    if family == "llama":  # our decoder; the other one runs through transformers
        folder = narrowed(static, tmp_path / "narrow", **scales)
    else:
        folder = checkpoints.build(tmp_path, checkpoints.OTHERS[family](), kv="fp8")
        for leaf, scale in scales.items():
            checkpoints.add(folder, f"{LAYER}.self_attn.{leaf}", torch.tensor([scale]))
    model = checkpoints.reference_model(folder)
    ids, cache = tiny.random_ids(TOKENS), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids.unsqueeze(0), past_key_values=cache, use_cache=True)
    found = counted(folder, ids, activations="full", kv="fp8")
    stored = cache.layers[0]
    every = zip(("keys", "values"), (stored.keys, stored.values), limits, strict=True)
    for name, states, limit in every:
        expected = int((states.abs() > limit).sum())
        assert 0 < expected < states.numel()
        count = found[f"{name} of layer 0"]
        assert count.values == states.numel()
        # A key of another library's sums may fall on the other side of the limit.
        assert abs(count.saturated - expected) <= 1


def test_counting_changes_no_logit(static: Path) -> None:
    ids = tiny.random_ids(TOKENS)
    plain, counting = (
        load_engine(static, dtype="float32", activations="quantized", saturation=saturation)
        for saturation in (None, Saturation())
    )
    first, second = (
        engine.forward(ids, [0], [TOKENS], engine.new_cache(1, TOKENS), last_only=False)
        for engine in (plain, counting)
    )
    assert torch.equal(first, second)


def test_dynamic_inputs_and_plain_caches_count_nothing(quantized: Path) -> None:
    found = counted(quantized / "fp8", tiny.random_ids(9), activations="quantized", kv="none")
    assert found == {}


def test_an_evaluation_shows_it_and_names_the_worst(
    static: Path, tmp_path: Path, text_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = narrowed(static, tmp_path / "narrow", k_scale=0.1 / 448)
    with caplog.at_level(logging.WARNING, logger="quantkit"):
        result = evaluate(folder, data=[str(text_file)], progress=False)
    found = result.to_json()["saturation"]
    assert set(found) == {"none", "fp8"}
    keys = found["fp8"]["by_name"]["keys of layer 0"]
    assert 0.5 < keys["saturated"] / keys["values"] < 1
    assert not any(name.startswith("keys") for name in found["none"]["by_name"])
    label, *cells = text_rows(result)[-1]
    assert label == "values saturated"
    assert cells == [f"{f['saturated']:,} of {f['values']:,}" for f in found.values()]
    (line,) = [record.getMessage() for record in caplog.records if "kv fp8" in record.getMessage()]
    assert "keys of layer 0 (" in line
    assert "beyond their static scales" in line


def test_an_evaluation_without_static_scales_says_nothing(quantized: Path, text_file: Path) -> None:
    result = evaluate(quantized / "fp8", data=[str(text_file)], kv="none", progress=False)
    assert result.measurements[0].saturation is None
    assert [label for label, _ in text_rows(result)] == ["perplexity"]


def test_a_small_share_is_no_reason_to_warn() -> None:
    few = {"a": SaturationCount(1_000_000, 100), "b": SaturationCount(10, 0)}
    assert SaturationSummary(few).warning() is None
    many = {f"m{n}": SaturationCount(1000, n) for n in range(1, 8)}
    line = SaturationSummary(many).warning()
    assert line is not None
    assert line.index("m7 (0.70%)") < line.index("m3 (0.30%)") < line.index("and 2 more")
