"""From the native profile to formats of others, with what calibration stored for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.calibrate import calibrate
from quantkit.checkpoint import Checkpoint, open_checkpoint, read_checkpoint
from quantkit.errors import CheckpointError
from quantkit.export import export
from quantkit.inspection import inspect
from quantkit.scheme import fused_siblings
from tests import checkpoints


@pytest.fixture(scope="module")
def native(
    tiny_llama: Path, calibration_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("native") / "out"
    options = {"data": [str(calibration_file)], "samples": 8, "seq_len": 32, "progress": False}
    calibrate(tiny_llama, out, recipe="fp8-accurate", budget=0.0, **options)
    return out


def inside(opened: Checkpoint) -> list[str]:
    """Return the quantized modules of the layers: exports have no quantized head."""
    return [module for module in opened.quantized if module != "lm_head"]


def test_what_inputs_carry_is_stored_once_a_group_and_agrees_with_the_report(native: Path) -> None:
    opened = open_checkpoint(native)
    stored = [name for name in opened.names if name.endswith("input_mean_square")]
    groups = {
        next(name for name in fused_siblings(module) if name in opened.quantized)
        for module in inside(opened)
    }
    assert set(stored) == {f"{group}.input_mean_square" for group in groups}
    for layer in inspect(native).record.layers:
        for module in layer.modules if layer.number is not None else ():
            found = opened.input_mean_square(module.name)
            assert found is not None
            for channel, rms in module.top_input_channels:
                assert float(found[channel].sqrt()) == pytest.approx(rms, rel=1e-5)


def test_an_export_is_portable_and_has_none_of_it(native: Path, tmp_path: Path) -> None:
    result = export(native, tmp_path / "out", progress=False)
    assert result.loss.num_modules == result.num_modules == 14
    assert set(result.engines) == {"vllm", "sglang", "transformers", "tensorrt-llm"}
    names = open_checkpoint(tmp_path / "out").names
    assert not [name for name in names if "mean_square" in name or "outlier" in name]
    assert read_checkpoint(tmp_path / "out").keys() == read_checkpoint(native).keys()


def test_it_lowers_the_error_of_outputs(native: Path, tmp_path: Path) -> None:
    """Scales chosen with the inputs' power are better for outputs of such inputs, in sum."""
    before = read_checkpoint(native)
    export(native, tmp_path / "with", progress=False)
    opened = open_checkpoint(native)
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in native.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    for name in opened.names:
        if name.endswith("input_mean_square"):
            checkpoints.rename(plain, name, None)
    export(plain, tmp_path / "without", progress=False)

    def error(folder: Path) -> float:
        after = read_checkpoint(folder)
        total = 0.0
        for module in inside(opened):
            power = opened.input_mean_square(module)
            assert power is not None
            change = (after[f"{module}.weight"] - before[f"{module}.weight"]).double()
            total += float((change.square() * power.double()).sum())
        return total

    assert error(tmp_path / "with") < error(tmp_path / "without")


@pytest.mark.parametrize("value", [torch.full((64,), -1.0), torch.full((64,), torch.nan)])
def test_numbers_that_cannot_be_are_refused_by_name(
    native: Path, tmp_path: Path, value: torch.Tensor
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in native.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    checkpoints.add(copy, "model.layers.0.self_attn.q_proj.input_mean_square", value)
    with pytest.raises(CheckpointError, match=r"q_proj\.input_mean_square is not \[64\] finite"):
        export(copy, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
