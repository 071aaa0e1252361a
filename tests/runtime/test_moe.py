"""Mixture-of-experts models in the decoder and through transformers, against transformers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit import load_fp8
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError
from quantkit.experts import route
from quantkit.ops import FEW_ROWS
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.layers import DenseLinear
from quantkit.runtime.loading import load_engine
from quantkit.runtime.moe import RoutedMlp, Router
from quantkit.runtime.shapes import model_shape, parse_config
from quantkit.runtime.transformers_engine import TransformersEngine
from quantkit.runtime.weights import WeightReader
from quantkit.shards import ShardReader
from tests import checkpoints, tiny
from tests.calibrate import models

FLOAT32 = 1e-4  # logits are about 10; a few hundred float32 roundings
QWEN = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _config(kind: str, **changes: Any) -> Any:
    return getattr(transformers, kind)(**{**tiny.LLAMA, **changes})


CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": partial(_config, "MixtralConfig", num_local_experts=4, head_dim=24),
    "mixtral-windows": partial(
        _config, "MixtralConfig", num_local_experts=4, num_experts_per_tok=3, sliding_window=5
    ),
    "qwen2-moe": partial(
        _config, "Qwen2MoeConfig", **QWEN, shared_expert_intermediate_size=80, qkv_bias=False
    ),
    # The first layer has a plain MLP, and chosen probabilities are normalized.
    "qwen2-moe-mixed": partial(
        _config,
        "Qwen2MoeConfig",
        **QWEN,
        shared_expert_intermediate_size=80,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "qwen3-moe": partial(_config, "Qwen3MoeConfig", **QWEN, head_dim=24, norm_topk_prob=True),
    "qwen3-moe-mixed": partial(
        _config, "Qwen3MoeConfig", **QWEN, head_dim=16, mlp_only_layers=[1], attention_bias=True
    ),
}
EVERY_KIND = pytest.mark.parametrize("kind", CONFIGS)
IDS = tiny.random_ids(3 * 20).view(3, 20)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Return a checkpoint's folder, and transformers' model of its dequantized weights."""

    @cache
    def build(
        kind: str, scheme: str = "dynamic", kv: str = "none", plain: str = "no such part"
    ) -> tuple[Path, Any]:
        """Quantize all matrices of the layers but those whose names hold `plain`, and gates."""
        folder = tmp_path_factory.mktemp(kind)
        source = models.save(folder / "source", CONFIGS[kind](), torch.float32)
        reader = ShardReader(source)
        matrices = [n for n in reader.names if n.endswith("weight") and len(reader.shape(n)) == 2]
        linears = [n.removesuffix(".weight") for n in matrices if ".layers." in n or "head" in n]
        ignored = tuple(n for n in linears if n.endswith(("gate", "lm_head")) or plain in n)
        target = folder / "fp8"
        checkpoints.quantize_folder(
            source, target, checkpoints.SCHEMES[scheme], kv, linears, ignored
        )
        return target, models.dequantized(target, folder / "plain")

    return build


Made = Callable[..., tuple[Path, Any]]


@torch.inference_mode()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model(ids).logits
    return result


def in_chunks(engine: Engine, chunk: int) -> Tensor:
    """Feed the sequences of IDS together, `chunk` tokens each at a time; return all logits."""
    store = engine.new_cache(len(IDS), 8)
    parts = []
    for piece in IDS.split(chunk, dim=1):
        count = piece.shape[1]
        rows = engine.forward(piece.reshape(-1), [0, 1, 2], [count] * 3, store, last_only=False)
        parts.append(rows.view(3, count, -1))
    return torch.cat(parts, dim=1)


@EVERY_KIND
def test_the_decoder_runs_it_and_equals_transformers(made: Made, kind: str) -> None:
    folder, model = made(kind)
    engine, expected = load_engine(folder), logits(model)
    assert isinstance(engine, Decoder)
    torch.testing.assert_close(engine.logits(IDS), expected, rtol=0, atol=FLOAT32)
    for chunk in (20, 7, 1):
        found = in_chunks(engine, chunk)
        torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("scheme", ["static", "block", "native"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe"])
def test_every_granularity_does(made: Made, kind: str, scheme: str) -> None:
    folder, model = made(kind, scheme)
    found = load_engine(folder).logits(IDS)
    torch.testing.assert_close(found, logits(model), rtol=0, atol=FLOAT32)


@EVERY_KIND
def test_transformers_with_our_linears_equals_it(made: Made, kind: str) -> None:
    folder, model = made(kind)
    reader = WeightReader(open_checkpoint(folder), torch.device("cpu"), torch.float32)
    engine = TransformersEngine(reader, parse_config(reader.checkpoint.config), False)
    expected = logits(model)
    torch.testing.assert_close(engine.logits(IDS), expected, rtol=0, atol=FLOAT32)
    torch.testing.assert_close(in_chunks(engine, 7), expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("plain", ["experts.", "self_attn", "shared_expert"])
def test_parts_may_stay_unquantized(made: Made, plain: str) -> None:
    folder, model = made("qwen2-moe", plain=plain)
    engine = load_engine(folder)
    assert isinstance(engine, Decoder)
    torch.testing.assert_close(engine.logits(IDS), logits(model), rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_an_8_bit_cache_is_the_same_as_that_of_transformers_with_our_linears(
    made: Made, kind: str
) -> None:
    folder, _ = made(kind, kv="fp8")
    reader = WeightReader(open_checkpoint(folder), torch.device("cpu"), torch.float32)
    other = TransformersEngine(reader, parse_config(reader.checkpoint.config), True)
    ours, plain = load_engine(folder), load_engine(folder, kv="none")
    found, expected = in_chunks(ours, 5), in_chunks(other, 5)
    difference = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # A key at the edge between two codes may take another one, and a token another expert.
    assert difference.quantile(0.9) < 1e-3
    assert (in_chunks(plain, 5) - found).abs().max() > 0.1


def test_inputs_are_rounded_on_request(made: Made) -> None:
    folder, model = made("mixtral", "static")
    expected = logits(model)
    rounded = load_engine(folder, activations="quantized").logits(IDS)
    difference = (rounded - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert difference.median() > 0.01


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe-mixed"])
def test_a_sequence_does_not_depend_on_its_neighbours(made: Made, kind: str) -> None:
    folder, _ = made(kind)
    engine = load_engine(folder)
    alone = torch.cat([engine.logits(row) for row in IDS.split(1)])
    torch.testing.assert_close(alone, engine.logits(IDS), rtol=0, atol=FLOAT32)


def test_bfloat16_is_as_close_as_transformers_is(made: Made) -> None:
    folder, model = made("qwen3-moe")
    expected = logits(model)
    theirs = logits(transformers.AutoModelForCausalLM.from_pretrained(
        folder.parent / "plain", dtype=torch.bfloat16
    )).float()  # fmt: skip
    ours = load_engine(folder, dtype="bfloat16").logits(IDS)

    def error(found: Tensor) -> float:
        return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())

    assert error(ours) < 1.5 * error(theirs)


def test_load_fp8_generates(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = made("qwen3-moe", kv="fp8")
    with caplog.at_level(logging.WARNING):
        model = load_fp8(folder)
    assert "through transformers" not in caplog.text
    (one,) = model.generate_ids([[1, 5, 6]])
    many = model.generate_ids([[1, 7], [1, 5, 6]])
    assert one.ids
    assert many[1].ids == one.ids


class TestRouter:
    def test_chooses_the_likeliest_and_weighs_them_by_probability(self) -> None:
        x, weight = torch.randn(6, 8), torch.randn(5, 8)
        probabilities = (x.double() @ weight.double().T).softmax(-1)
        numbers, weights = Router(DenseLinear(weight), 2, False, True)(x)
        order = probabilities.argsort(-1, descending=True)[:, :2]
        assert torch.equal(numbers, order)
        torch.testing.assert_close(
            weights.double(), probabilities.gather(1, order), rtol=1e-4, atol=0
        )

    def test_normalized_weights_sum_to_one(self) -> None:
        _, weights = Router(DenseLinear(torch.randn(5, 8)), 3, True, False)(torch.randn(6, 8))
        torch.testing.assert_close(weights.sum(-1), torch.ones(6))

    @pytest.mark.parametrize("rounds", [True, False])
    def test_weights_are_rounded_where_the_family_does(self, rounds: bool) -> None:
        weight = torch.randn(5, 8, dtype=torch.bfloat16)
        _, weights = Router(DenseLinear(weight), 2, False, rounds)(weight)
        assert weights.dtype == (torch.bfloat16 if rounds else torch.float32)


@pytest.mark.parametrize("tokens", [1, 20, 60])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_in_one_op_are_what_they_are_one_by_one(made: Made, kind: str, tokens: int) -> None:
    engine = load_engine(made(kind)[0], dtype="float32")
    assert isinstance(engine, Decoder)
    mlp = engine._layers[1].mlp
    assert isinstance(mlp, RoutedMlp)
    assert mlp.grouped is not None
    x = torch.randn(tokens, engine.hidden_size)
    numbers, weights = mlp.router(x)
    many = int(numbers.flatten().bincount().max()) > FEW_ROWS
    assert mlp.grouped.take(numbers) is not many  # no matrix unit takes float32
    one_by_one = route(x, numbers, weights, mlp.experts)
    torch.testing.assert_close(mlp.grouped(x, numbers, weights), one_by_one)


def test_experts_whose_inputs_are_rounded_run_one_by_one(made: Made) -> None:
    engine = load_engine(made("mixtral")[0], activations="quantized")
    assert isinstance(engine, Decoder)
    mlp = engine._layers[0].mlp
    assert isinstance(mlp, RoutedMlp)
    assert mlp.grouped is None


def test_layers_without_experts_are_plain(made: Made) -> None:
    shape = model_shape(CONFIGS["qwen2-moe-mixed"]())
    assert shape.experts is not None
    assert shape.experts.layers == (False, True)
    folder, _ = made("qwen2-moe-mixed")
    engine = load_engine(folder)
    assert isinstance(engine, Decoder)
    kinds = [type(layer.mlp) is RoutedMlp for layer in engine._layers]
    assert kinds == [False, True]


def test_a_missing_expert_is_named(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("mixtral")[0], tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3"
    del tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_engine(folder)
