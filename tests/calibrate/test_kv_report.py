"""What an FP8 cache costs a layer is reported, and layers that it breaks are flagged (B26)."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from quantkit.calibrate.attention_probe import AttentionSample
from quantkit.calibrate.kv_report import (
    POOR_OUTPUT_DB,
    SUSPECT_CHANNEL_RATIO,
    SUSPECT_OUTPUT_DB,
    UNMEASURED_CHANNEL_RATIO,
    KvReport,
    kv_warnings,
    measure_kv,
)
from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.kv_search import KvError, ScaleChoice, choose_scales, plain_scales
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.scheme import Granularity, QuantSpec
from tests import tiny
from tests.calibrate import models

IDS = torch.stack([tiny.random_ids(64, seed) for seed in range(8)])
HEALTHY = KvReport(31.0, 32.0, 26.0, 25.0, 4.0, 0, 0)


@torch.no_grad()
def save_qwen2(folder: Path, key_bias: float, query_factor: float = 1.0) -> Path:
    """Save a tiny Qwen2 with biases of +-key_bias on two key channels of layer 0 (B26)."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**tiny.LLAMA))
    attention = model.model.layers[0].self_attn
    if key_bias:
        attention.k_proj.bias[3], attention.k_proj.bias[9] = key_bias, -key_bias
        for head in (0, 1):  # both read KV head 0
            for channel in (3, 9):
                attention.q_proj.weight[16 * head + channel] *= query_factor
    model.config.dtype = torch.bfloat16
    model.bfloat16().save_pretrained(folder)
    return tiny.save_tokenizer(folder)


@torch.no_grad()
def reports_of(
    folder: Path, granularity: Granularity = Granularity.TENSOR, ids: Tensor = IDS
) -> list[KvReport]:
    skeleton = models.open_skeleton(folder)
    model = LayerwiseModel(skeleton)
    batches, reports = model.prepare([ids]), []
    for number, name in enumerate(skeleton.layer_names):
        skeleton.load(name)
        observer = KvObserver(QuantSpec(granularity))
        observer.attach(skeleton.layers[number])
        for batch, output in model.run(number, batches, observer):
            batch.hidden = output
        observer.detach()
        observer.scales(name)
        assert observer.report is not None
        reports.append(observer.report)
    return reports


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.HEAD])
@pytest.mark.parametrize("query_factor", [0.1, 1.0, 10.0])
def test_b26_key_biases_of_200_are_flagged(
    tmp_path: Path, query_factor: float, granularity: Granularity
) -> None:
    first, second = reports_of(save_qwen2(tmp_path, 200, query_factor), granularity)
    assert first.flagged
    assert first.key_channel_ratio > 100
    assert not second.flagged
    warning = first.warning("model.layers.0")
    assert warning is not None
    assert "\n" not in warning
    assert warning.startswith("model.layers.0: ")
    assert f"{first.key_channel_ratio:.0f} times" in warning
    assert f"{first.output_error_db:.1f} dB" in warning
    assert warning.endswith("use --kv none")
    assert second.warning("model.layers.1") is None


def test_b26_few_short_samples_suffice_to_flag(tmp_path: Path) -> None:
    first, second = reports_of(save_qwen2(tmp_path, 200), ids=IDS[:1, :16])
    assert first.flagged
    assert not second.flagged


def test_b26_the_control_is_not_flagged(tmp_path: Path) -> None:
    for report in reports_of(save_qwen2(tmp_path, 0)):
        assert not report.flagged
        assert report.key_channel_ratio < 5
        assert report.output_error_db is not None
        assert report.output_error_db > 28


@pytest.mark.parametrize(
    ("output_db", "ratio", "flagged"),
    [
        (SUSPECT_OUTPUT_DB - 1, SUSPECT_CHANNEL_RATIO, True),
        (SUSPECT_OUTPUT_DB - 1, SUSPECT_CHANNEL_RATIO - 1, False),
        (SUSPECT_OUTPUT_DB, 1e6, False),
        (POOR_OUTPUT_DB - 1, 1.0, True),
        (POOR_OUTPUT_DB, 1.0, False),
        (None, UNMEASURED_CHANNEL_RATIO, True),
        (None, UNMEASURED_CHANNEL_RATIO - 1, False),
    ],
)
def test_thresholds(output_db: float | None, ratio: float, flagged: bool) -> None:
    report = replace(HEALTHY, output_error_db=output_db, key_channel_ratio=ratio)
    assert report.flagged == flagged
    assert report.to_json()["flagged"] == flagged
    assert (report.warning("layer") is not None) == flagged


def test_warnings_name_flagged_layers_and_count_unseen_ones() -> None:
    flagged, unseen = (replace(HEALTHY, output_error_db=db) for db in (3.0, None))
    assert kv_warnings({"a": HEALTHY}) == []
    lines = kv_warnings({"a": HEALTHY, "b": flagged, "c": unseen, "d": unseen})
    assert lines[0] == flagged.warning("b")
    assert lines[1].startswith("2 layers (c, ...) compute attention outside")
    assert len(lines) == 2


def test_json_holds_numbers_or_null() -> None:
    report = replace(HEALTHY, key_error_db=inf, output_error_db=None, keys_saturated=2)
    assert report.to_json() == {
        "key_error_db": None,
        "value_error_db": 32.0,
        "output_error_db": None,
        "plain_output_error_db": 25.0,
        "key_channel_ratio": 4.0,
        "keys_saturated": 2,
        "values_saturated": 0,
        "flagged": False,
    }


def heads_apart() -> AttentionSample:
    """Return a sample with a head whose keys a scale for all would round to zero.

    What attention gives is the keys themselves: no softmax hides how small they are.
    """
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 30, 8, generator=generator).unbind()
    keys[1] *= 1e7
    keys[:, :, 0] *= 40

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return keys * torch.tensor([1.0, 1e-7]).view(-1, 1, 1)

    return AttentionSample(keys, values, attend)


def test_scales_by_head_are_recommended_where_they_help() -> None:
    measure = KvError([heads_apart()], per_head=False)
    amaxes = measure.amaxes()
    report = measure_kv(measure, plain_scales(measure, *amaxes))
    assert report.flagged
    assert report.head_output_error_db is not None
    assert report.head_output_error_db > 25
    text = f"use --kv fp8-head ({report.head_output_error_db:.1f} dB) or --kv none"
    assert text in (report.warning("layer") or "")
    by_head = KvError([heads_apart()], per_head=True)
    assert not measure_kv(by_head, choose_scales(by_head, *by_head.amaxes())).flagged


def test_errors_and_saturated_values_are_those_of_the_choice() -> None:
    keys = torch.tensor([[[448.0, 17.0], [-900.0, 3.0]]])
    values = torch.tensor([[[4.0, 2.0], [1.0, 0.5]]])
    sample = AttentionSample(keys, values, lambda keys, values: keys + values)
    measure = KvError([sample], per_head=False)
    error, amax = torch.zeros(1, dtype=torch.float64), torch.tensor([448.0])
    choice = ScaleChoice(amax, torch.tensor([7.0]), error + 10, error + 100)
    report = measure_kv(measure, choice)
    # Scale 1: 17 is a tie that becomes 16, and 900 becomes 448.
    noise = 1.0**2 + 452.0**2
    power = float(keys.square().sum())
    assert 10 ** (report.key_error_db / 10) == pytest.approx(power / noise)
    assert report.value_error_db == inf
    assert (report.keys_saturated, report.values_saturated) == (1, 0)
    assert report.key_channel_ratio == pytest.approx(900 / 17)
    signal = float((keys + values).square().sum())
    assert 10 ** ((report.output_error_db or 0) / 10) == pytest.approx(signal / 10)
    assert 10 ** ((report.plain_output_error_db or 0) / 10) == pytest.approx(signal / 100)


@pytest.mark.parametrize(("channel", "ratio"), [(0.0, inf), (None, 1.0)])
def test_the_ratio_of_keys_that_are_mostly_zero(channel: float | None, ratio: float) -> None:
    keys = torch.zeros(1, 4, 3)
    if channel is not None:
        keys[:, :, 0] = 5.0
    sample = AttentionSample(keys, keys, None)
    measure = KvError([sample], per_head=False)
    report = measure_kv(measure, plain_scales(measure, *measure.amaxes()))
    assert report.key_channel_ratio == ratio
