from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quantkit.calibrate.source import open_source
from quantkit.errors import CheckpointError, SourceError
from quantkit.evaluate.models import OriginalModel, QuantizedModel, chunk_rows, load_original
from quantkit.evaluate.windows import Cutting, Window
from quantkit.runtime.loading import load_engine
from tests import checkpoints, tiny
from tests.runtime.fake_engine import FakeEngine

CPU = torch.device("cpu")
WINDOWS = list(Cutting(40, 24, (tiny.BOS_ID,)).windows(tiny.random_ids(60).tolist()))
SLIDING = {
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 5}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 5}),
    "gpt-neox": ("GPTNeoXConfig", {}),
}


def rows_of(model: OriginalModel | QuantizedModel, window: Window, rows: int) -> Tensor:
    parts = list(model.logits(window, rows))
    assert all(len(part) <= rows for part in parts)
    assert all(part.dtype == torch.float32 for part in parts)
    return torch.cat(parts)


def test_a_chunk_holds_what_fits() -> None:
    assert chunk_rows(262_144) == 64
    assert chunk_rows(1 << 40) == 1


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_the_quantized_model_gives_the_logits_of_its_engine(quantized: Path, rows: int) -> None:
    engine = load_engine(quantized / "fp8", dtype="float32", kv="none", activations="quantized")
    model = QuantizedModel(engine, "x")
    for window in WINDOWS:
        whole = engine.logits(window.inputs.unsqueeze(0))[0, window.start :]
        torch.testing.assert_close(rows_of(model, window, rows), whole, rtol=1e-4, atol=1e-4)


def test_a_window_that_was_left_early_does_not_leak_into_the_next(quantized: Path) -> None:
    model = QuantizedModel(load_engine(quantized / "fp8", dtype="float32"), "x")
    expected = rows_of(model, WINDOWS[0], 4)
    stream = model.logits(WINDOWS[1], 4)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert torch.equal(rows_of(model, WINDOWS[0], 4), expected)


@pytest.mark.parametrize("family", SLIDING)
def test_the_original_gives_the_same_logits_in_chunks(family: str, tmp_path: Path) -> None:
    kind, changes = SLIDING[family]
    config = getattr(transformers, kind)(**{**tiny.LLAMA, **changes})
    folder = tiny.save_model(tmp_path, config, torch.float32)
    model = load_original(open_source(folder), torch.float32, CPU)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.vocab_size == tiny.VOCAB_SIZE
    for window in WINDOWS:
        with torch.no_grad():
            expected = whole(window.inputs.unsqueeze(0)).logits[0, window.start :]
        for rows in (3, 1000):
            torch.testing.assert_close(rows_of(model, window, rows), expected, rtol=1e-4, atol=1e-5)


def test_the_original_has_the_weights_that_calibration_reads(tiny_llama_tied: Path) -> None:
    source = open_source(tiny_llama_tied)
    model = load_original(source, torch.float32, CPU)._model
    parameters = dict(model.named_parameters())
    assert sorted(parameters) == source.names  # tied: one matrix
    for name, value in parameters.items():
        assert torch.equal(value, source.tensor(name).float())


def test_an_original_without_a_tensor_is_an_error(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    checkpoints.rename(folder, "model.layers.1.mlp.up_proj.weight", None)
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_original(open_source(folder), torch.float32, CPU)


class Damaged(FakeEngine):
    """Gives NaN from some position of a sequence on."""

    def __init__(self, position: int) -> None:
        super().__init__(tiny.VOCAB_SIZE)
        self.position = position

    def forward(
        self, ids: Tensor, sequences: Sequence[int], counts: Sequence[int], cache: Any,
        last_only: bool = True,
    ) -> Tensor:  # fmt: skip
        start = cache.lengths[0]
        logits = super().forward(ids, sequences, counts, cache, last_only)
        if not last_only:
            logits[max(self.position - start, 0) :, 5] = torch.nan
        return logits


@pytest.mark.parametrize("rows", [4, 1000])
def test_logits_that_are_not_finite_name_the_first_position(rows: int) -> None:
    # Row r of the second window, after BOS, predicts token 24 + r.
    window = Window(WINDOWS[1].inputs, WINDOWS[1].targets, WINDOWS[1].start, 40, text=3)
    model = QuantizedModel(Damaged(position=WINDOWS[1].start + 6), "the quantized model")
    with pytest.raises(CheckpointError, match=r"the quantized model .* token 46 of text 3 "):
        rows_of(model, window, rows)


def test_an_original_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = load_original(open_source(tiny.save_model(tmp_path)), torch.float32, CPU)
    model._model.lm_head.weight.data[9] = torch.inf
    with pytest.raises(SourceError, match=r"the original .* token 0 of text 0 "):
        rows_of(model, WINDOWS[0], 8)
