"""Cases from the field that show once a checkpoint is loaded: biases, sizes, batches, drafts."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit import load_fp8
from quantkit.calibrate import calibrate
from quantkit.errors import CheckpointError
from quantkit.numerics import amax_to_scale, decode, quantize, tile_amax
from quantkit.quantized_weight import QuantizedWeight
from quantkit.runtime.layers import Fp8Linear
from quantkit.scheme import Granularity, QuantSpec
from tests import checkpoints, tiny

CHANNEL, TENSOR = QuantSpec(Granularity.CHANNEL), QuantSpec(Granularity.TENSOR)
BLOCK = QuantSpec(Granularity.BLOCK, block_shape=(128, 128))
TOKEN = QuantSpec(Granularity.TOKEN, dynamic=True)


def linear(rows: int, columns: int, spec: QuantSpec, inputs: QuantSpec | None) -> Fp8Linear:
    """Return a random layer with biases of a deviation of 50."""
    weight, tile = torch.randn(rows, columns), spec.tile(rows, columns)
    scale = amax_to_scale(tile_amax(weight, tile), spec.fmt)
    codes = quantize(weight, scale, spec.fmt, tile)
    shape, bias = spec.scale_shape(rows, columns), 50 * torch.randn(rows)
    stored = QuantizedWeight(codes, scale.reshape(shape), spec, bias)
    return Fp8Linear.stack([stored], inputs)


@pytest.mark.parametrize("inputs", [None, TOKEN], ids=["weights only", "inputs by token"])
@pytest.mark.parametrize("spec", [CHANNEL, TENSOR, BLOCK], ids=lambda spec: spec.granularity)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_b03_an_input_of_zeros_gives_the_bias(
    rows: int, spec: QuantSpec, inputs: QuantSpec | None
) -> None:
    layer = linear(48, 64, spec, inputs)
    assert layer.bias is not None
    assert torch.equal(layer(torch.zeros(rows, 64)), layer.bias.expand(rows, -1))


@pytest.mark.parametrize("inputs", [None, TOKEN], ids=["weights only", "inputs by token"])
@pytest.mark.parametrize("spec", [CHANNEL, TENSOR, BLOCK], ids=lambda spec: spec.granularity)
def test_b04_a_layer_of_15_outputs_with_bias(spec: QuantSpec, inputs: QuantSpec | None) -> None:
    """Against the definition in float64; float32 sums of 32 terms are within 1e-5 of it."""
    layer = linear(15, 32, spec, inputs)
    assert layer.bias is not None
    x = torch.randn(7, 32)
    seen = x if layer.inputs is None else layer.inputs(x)
    scale = layer.scale.double().repeat_interleave(layer.group_size, dim=1)[:, :32]
    weight = decode(layer.codes, spec.fmt).double() * scale
    expected = seen.double() @ weight.T + layer.bias.double()
    assert (layer(x).double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_b23_codes_of_the_other_float8_are_refused_by_name(tmp_path: Path) -> None:
    """Its largest value is 240: the same bits mean other numbers."""
    folder = checkpoints.build(tmp_path, checkpoints.FAMILIES["llama"]())
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].view(torch.float8_e4m3fnuz)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is F8_E4M3FNUZ, expected F8_E4M3"):
        load_fp8(folder)


def test_b26_without_outliers_a_cache_in_8_bits_predicts_the_same(
    calibration_file: Path, tmp_path: Path
) -> None:
    """98 % of the next tokens; what weights cost is left out by comparing the same weights."""
    source, out = tmp_path / "source", tmp_path / "out"
    tiny.save_model(source, checkpoints.FAMILIES["qwen2"]())
    calibrate(source, out, data=[str(calibration_file)], samples=16, progress=False)
    prompts = [tiny.random_ids(30, seed).tolist() for seed in range(100)]
    options = {"max_new_tokens": 1, "temperature": 0}
    plain, cached = (
        load_fp8(out, dtype="float32", kv=kv).generate_ids(prompts, **options)
        for kv in ("none", "fp8")
    )
    same = [one.ids == two.ids for one, two in zip(plain, cached, strict=True)]
    assert sum(same) >= 98


EOS_INSIDE = [17, tiny.EOS_ID, 40, 23, 9]
PROMPTS = [[5, 90], EOS_INSIDE, tiny.random_ids(9).tolist()]


@pytest.mark.parametrize("activations", ["full", "quantized"])
@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_b35_rows_of_a_batch_are_those_of_single_prompts(
    family: str, activations: str, tmp_path: Path
) -> None:
    """In every order; there is no padding, and nothing else that rows of a batch could share."""
    config = (checkpoints.FAMILIES | checkpoints.OTHERS)[family]()
    folder = checkpoints.build(tmp_path, config, checkpoints.DYNAMIC)
    model = load_fp8(folder, dtype="float32", activations=activations)
    options = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    alone = [model.generate_ids([prompt], **options)[0].ids for prompt in PROMPTS]
    assert len(set(map(tuple, alone))) == 3
    for order in permutations(range(3)):
        together = model.generate_ids([PROMPTS[place] for place in order], **options)
        assert [found.ids for found in together] == [alone[place] for place in order]


def test_b35_an_outlier_in_one_row_leaves_the_others_alone() -> None:
    layer, x = linear(48, 64, CHANNEL, TOKEN), torch.randn(3, 64)
    before = layer(x)
    x[1, 5] = 1e4
    after = layer(x)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["same", "other"])
def test_b42_two_hundred_prompts_have_no_difference(draft: str, tmp_path: Path) -> None:
    paths = {}
    for name, seed in (("same", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = checkpoints.FAMILIES["llama"]()
            paths[name] = tiny.save_tokenizer(checkpoints.build(tmp_path / name, config))
    plain = load_fp8(paths["same"], dtype="float32")
    drafted = load_fp8(paths["same"], dtype="float32", draft=str(paths[draft]))
    for seed in range(200):
        prompt = tiny.random_ids(3 + seed % 9, seed).tolist()
        options = {"max_new_tokens": 32, "temperature": 0}
        one, two = (model.generate_ids([prompt], **options)[0] for model in (plain, drafted))
        assert one.ids == two.ids, seed
    assert drafted.stats.drafts is not None
