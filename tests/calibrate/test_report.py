"""What a run reports: the numbers, in JSON that repeats and in a table that fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from quantkit.calibrate import Report, calibrate
from quantkit.calibrate.report import RENDER_WIDTH, LayerReport, ModuleReport
from quantkit.checkpoint import open_checkpoint
from quantkit.shards import ShardReader


@pytest.fixture(scope="module")
def report(
    tiny_llama: Path, calibration_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Report:
    out = tmp_path_factory.mktemp("report") / "out"
    data = [str(calibration_file)]
    return calibrate(tiny_llama, out, recipe="fp8-static", data=data, samples=16, progress=False)


def test_quantkit_json_is_the_report(report: Report) -> None:
    expected = json.loads(json.dumps(report.to_json()))
    assert json.loads((report.path / "quantkit.json").read_text()) == expected


def test_every_layer_and_module_is_there_once(report: Report) -> None:
    layers = report.to_json()["layers"]
    assert [layer["name"] for layer in layers] == ["model.layers.0", "model.layers.1"]
    names = [module["name"] for layer in layers for module in layer["modules"]]
    assert sorted(names) == open_checkpoint(report.path).quantized


def test_kv_scales_and_input_ranges_are_those_on_disk(report: Report) -> None:
    reader = ShardReader(report.path)
    for layer in report.to_json()["layers"]:
        assert len(layer["scales"]) == 2
        for name, values in layer["scales"].items():
            assert values == reader.tensor(name).flatten().tolist()
        for module in layer["modules"]:
            scale = reader.tensor(f"{module['name']}.input_scale").item()
            # A scale is rounded up to bfloat16, by less than one step of 2**-7.
            assert scale / (1 + 2**-7) <= module["input_range"] / 448 <= scale


def test_weight_errors_are_those_of_the_stored_weights(tiny_llama: Path, report: Report) -> None:
    source, checkpoint = ShardReader(tiny_llama), open_checkpoint(report.path)
    for layer in report.to_json()["layers"]:
        for module in layer["modules"]:
            weight = source.tensor(f"{module['name']}.weight").double()
            error = checkpoint.weight(module["name"]).dequantize().double() - weight
            expected = 10 * (weight.square().sum() / error.square().sum()).log10().item()
            assert module["weight_sqnr_db"] == pytest.approx(expected, abs=2e-3)  # 3 decimals


def test_layer_errors_are_finite_and_plausible(report: Report) -> None:
    # One E4M3 rounding leaves about 31 dB of Gaussian weights; inputs and attention cost a little.
    for layer in report.to_json()["layers"]:
        assert 15 < layer["output_sqnr_db"] < 40


def test_provenance_names_what_decided_the_result(report: Report) -> None:
    found = report.to_json()
    assert found["recipe"]["name"] == "fp8-static"
    assert found["profile"] == "portable"
    assert found["seed"] == 0
    assert found["source"]["name"] == "tiny-llama"
    assert len(found["source"]["fingerprint"]) == 64
    assert len(found["data"]["sha256"]) == 64
    assert set(found["versions"]) == {"torch", "transformers"}


def test_a_native_checkpoint_says_so(
    tiny_llama: Path, calibration_file: Path, tmp_path: Path
) -> None:
    data = [str(calibration_file)]
    calibrate(tiny_llama, tmp_path / "o", kv="fp8-head", data=data, samples=2, progress=False)
    assert json.loads((tmp_path / "o" / "quantkit.json").read_text())["profile"] == "native"


def test_an_exact_module_has_no_decibels_in_json(report: Report) -> None:
    exact = LayerReport("layer", [ModuleReport("layer.q", (2, 2), inf, None)], inf)
    again = Report(report.plan, layers=[exact]).to_json()["layers"][0]
    assert again["output_sqnr_db"] is None
    assert again["modules"][0]["weight_sqnr_db"] is None
    json.dumps(again, allow_nan=False)


class TestTable:
    def test_sums_modules_by_kind(self, report: Report) -> None:
        lines = str(report).splitlines()
        assert lines[0].startswith("tiny-llama with recipe fp8-static")
        row = next(line for line in lines if "q_proj" in line)
        assert row.split()[row.split().index("q_proj") + 2] == "2"
        assert any("lm_head" in line and "unchanged" in line for line in lines)

    def test_fits_its_width_without_colours(self, report: Report) -> None:
        assert max(len(line) for line in str(report).splitlines()) <= RENDER_WIDTH
        assert "\x1b" not in str(report)

    def test_shows_the_worst_module_and_its_layer(self, report: Report) -> None:
        modules = [m for layer in report.layers for m in layer.modules if "down_proj" in m.name]
        worst = min(modules, key=lambda module: module.output_sqnr_db)
        row = next(line for line in str(report).splitlines() if "down_proj" in line)
        assert f"{worst.output_sqnr_db:.1f}" in row
        assert f"layer {worst.name.split('.')[2]}" in row

    def test_of_a_plan_lists_every_module_with_its_shape(
        self, model_of: Callable[[str], Path]
    ) -> None:
        report = calibrate(model_of("mixtral"), dry_run=True)
        cells = [[c.strip() for c in line.split("│")] for line in str(report).splitlines()]
        row_of = {row[1]: row[2:] for row in cells if len(row) > 2}
        for module in report.plan.modules:
            # All experts of a layer make one row: there may be hundreds, and they are alike.
            name = re.sub(r"\bexperts\.\d+", "experts.0-3", module.name)
            assert row_of[name][0] == f"{module.shape[0]} x {module.shape[1]}"
        experts = [m for m in report.plan.modules if m.name.endswith(".w1") and m.layer == 0]
        before = sum(module.source_bytes for module in experts)
        after = sum(module.target_bytes for module in experts)
        row = row_of["model.layers.0.block_sparse_moe.experts.0-3.w1"]
        assert row[2:4] == [f"{before:,}", f"{after:,}"]
