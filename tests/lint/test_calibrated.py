"""What `calibrate` writes is clean for the engines that the README names."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from quantkit.calibrate import calibrate
from quantkit.lint import ENGINES, lint
from tests import tiny

ALIGNED = {
    **tiny.LLAMA,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Every side of every matrix is a multiple of 128."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lint") / "aligned"
    return tiny.save_model(folder, LlamaConfig(**ALIGNED))


@pytest.mark.parametrize(
    ("recipe", "engines"),
    [
        ("fp8-dynamic", ENGINES),
        ("fp8-static", ENGINES[:3]),
        ("fp8-block", ENGINES),
        ("fp8-accurate", ()),
    ],
)
def test_a_calibrated_model_is_clean_where_it_is_meant_to_load(
    recipe: str, engines: tuple[str, ...], model: Path, calibration_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    data = [str(calibration_file)]
    calibrate(str(model), out, recipe=recipe, data=data, samples=8, seq_len=32, progress=False)
    if engines:
        assert lint(out, engines).findings == ()
    for engine in set(ENGINES) - set(engines):
        assert not lint(out, [engine]).ok


def test_rows_that_blocks_do_not_divide_are_named(
    tiny_llama: Path, calibration_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    data = [str(calibration_file)]
    calibrate(str(tiny_llama), out, recipe="fp8-block", data=data, samples=8, progress=False)
    rules = {finding.rule for finding in lint(out).errors}
    assert rules == {"block-rows", "block-columns", "partial-blocks"}
