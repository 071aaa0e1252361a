"""A KV cache of E3M4 codes, from the recipe to the runtime and to exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.calibrate import calibrate
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import RecipeError
from quantkit.export import export
from quantkit.numerics import E3M4, E4M3, amax_to_scale
from quantkit.runtime.engine import Engine
from quantkit.runtime.kv_cache import PagedCache
from quantkit.runtime.loading import load_engine
from quantkit.runtime.shapes import parse_config
from quantkit.runtime.transformers_engine import TransformersEngine
from quantkit.runtime.weights import WeightReader
from quantkit.scheme import Granularity, QuantSpec, Scheme
from quantkit.shards import read_json
from tests import tiny


def run(source: Path, out: Path, data: Path, **options: str) -> Path:
    calibrate(source, out, data=[str(data)], samples=16, progress=False, **options)
    return out


@pytest.fixture(scope="module")
def made(
    tiny_llama: Path, calibration_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("e3m4") / "made"
    return run(tiny_llama, out, calibration_file, recipe="fp8-accurate")


def logits(engine: Engine) -> Tensor:
    ids = tiny.random_ids(40)
    cache = engine.new_cache(1, 40)
    prefill = engine.forward(ids[:30], [0], [30], cache, last_only=False)
    steps = [engine.forward(ids[n : n + 1], [0], [1], cache) for n in range(30, 40)]
    return torch.cat([prefill, *steps])


def test_the_checkpoint_says_so_and_scales_reach_what_was_seen(made: Path) -> None:
    scheme = open_checkpoint(made).scheme
    assert scheme.kv == QuantSpec(Granularity.TENSOR, format="e3m4")
    for layer in read_json(made / "quantkit.json")["layers"]:
        assert layer["kv"]["keys_saturated"] == layer["kv"]["values_saturated"] == 0
        # Four bits of mantissa: at least 30 dB where three leave about 26.
        assert min(layer["kv"]["key_error_db"], layer["kv"]["value_error_db"]) > 30


def test_the_cache_holds_e3m4(made: Path) -> None:
    cache = load_engine(made).new_cache(1, 8)
    assert isinstance(cache, PagedCache)
    assert cache.tensors()[0].dtype == E3M4.dtype


def test_both_engines_round_alike(made: Path) -> None:
    reader = WeightReader(open_checkpoint(made), torch.device("cpu"), torch.float32)
    plain = TransformersEngine(reader, parse_config(reader.checkpoint.config), quantize_kv=True)
    found, expected = logits(load_engine(made, dtype="float32")), logits(plain)
    exact = logits(load_engine(made, dtype="float32", kv="none"))
    # A key that lies between two codes may fall to either side; the rounding itself is far larger.
    assert (found - expected).abs().mean() < 0.05 * (found - exact).abs().mean()


def test_rounding_is_finer_than_with_e4m3(
    made: Path, tiny_llama: Path, calibration_file: Path, tmp_path: Path
) -> None:
    other = run(tiny_llama, tmp_path / "e4m3", calibration_file, recipe="fp8-accurate", kv="fp8")
    errors = []
    for path in (made, other):
        exact = logits(load_engine(path, dtype="float32", kv="none"))
        errors.append(float((logits(load_engine(path, dtype="float32")) - exact).norm()))
    assert errors[0] < 0.7 * errors[1]


def test_portable_exports_have_e4m3_scales_of_the_same_range(made: Path, tmp_path: Path) -> None:
    export(made, tmp_path / "out", progress=False)
    before, after = open_checkpoint(made), open_checkpoint(tmp_path / "out")
    assert after.scheme.kv == QuantSpec(Granularity.TENSOR)
    for layer in range(2):
        for old, new in zip(before.kv_scales(layer), after.kv_scales(layer), strict=True):
            assert torch.equal(new, amax_to_scale(old * E3M4.max, E4M3))


def test_with_quantized_inputs_too(
    tiny_llama: Path, calibration_file: Path, tmp_path: Path
) -> None:
    out = run(tiny_llama, tmp_path / "out", calibration_file, recipe="fp8-dynamic", kv="fp8-e3m4")
    scheme = open_checkpoint(out).scheme
    assert scheme.native
    assert scheme.inputs == QuantSpec(Granularity.TOKEN, dynamic=True)
    assert logits(load_engine(out)).isfinite().all()


def test_a_portable_scheme_has_no_such_cache() -> None:
    with pytest.raises(RecipeError, match="KV cache"):
        Scheme(QuantSpec(Granularity.CHANNEL), kv=QuantSpec(Granularity.TENSOR, format="e3m4"))
