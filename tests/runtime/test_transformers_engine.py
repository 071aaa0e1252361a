"""Architectures outside the decoder's table, run through transformers with swapped linears."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.runtime.loading import load_engine
from quantkit.runtime.transformers_engine import TransformersEngine
from quantkit.runtime.transformers_model import SwappedLinear
from tests import checkpoints, tiny

EVERY_OTHER = pytest.mark.parametrize("family", checkpoints.OTHERS)


def build(folder: Path, family: str, kv: str = "none") -> Path:
    return checkpoints.build(folder, checkpoints.OTHERS[family](), kv=kv)


@EVERY_OTHER
@torch.inference_mode()
def test_logits_equal_transformers_with_and_without_cache(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build(tmp_path, family)
    engine, model = load_engine(folder), checkpoints.reference_model(folder)
    assert isinstance(engine, TransformersEngine)
    assert caplog.text.count("through transformers") == 1
    ids = tiny.random_ids(2 * 20).view(2, 20)
    expected = model(ids).logits
    torch.testing.assert_close(engine.logits(ids), expected, rtol=0, atol=1e-4)
    cache = engine.new_cache(2, 20)
    out = engine.forward(ids.flatten(), [0, 1], [20, 20], cache, last_only=False)
    torch.testing.assert_close(out.view_as(expected), expected, rtol=0, atol=1e-4)
    assert cache.lengths == [20, 20]


@EVERY_OTHER
def test_steps_after_a_rollback_equal_one_pass(tmp_path: Path, family: str) -> None:
    engine = load_engine(build(tmp_path, family, kv="fp8"))
    ids, wrong = tiny.random_ids(20), tiny.random_ids(9, seed=5)
    expected = engine.forward(ids, [0], [20], engine.new_cache(1, 20), last_only=False)
    cache = engine.new_cache(2, 20)
    engine.forward(torch.cat([wrong, ids[:10]]), [0, 1], [9, 10], cache)
    cache.release(0)
    engine.forward(torch.cat([wrong, wrong]), [1, 0], [9, 9], cache)
    cache.truncate(1, 10)
    assert cache.lengths == [9, 10]
    for position in range(10, 20):
        out = engine.forward(ids[position : position + 1], [1], [1], cache)
        # As for the decoder: a key between two codes may round the other way.
        torch.testing.assert_close(out[0], expected[position], rtol=0, atol=2e-2)


def test_linears_are_swapped_and_nothing_is_held_twice(tmp_path: Path) -> None:
    engine = load_engine(build(tmp_path, "phi"))
    assert isinstance(engine, TransformersEngine)
    swapped = [m for m in engine._model.modules() if isinstance(m, SwappedLinear)]
    left = [name for name, m in engine._model.named_modules() if type(m) is nn.Linear]
    assert len(swapped) == 2 * 6
    assert left == ["lm_head"]


def test_conv1d_stays_unquantized_and_works(tmp_path: Path) -> None:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    folder = checkpoints.build(tmp_path, config, ignore=())
    engine = load_engine(folder)
    ids = tiny.random_ids(12).view(1, 12)
    with torch.inference_mode():
        expected = checkpoints.reference_model(folder)(ids).logits
    torch.testing.assert_close(engine.logits(ids), expected, rtol=0, atol=1e-4)


def test_a_quantized_module_that_is_no_linear_is_named(tmp_path: Path) -> None:
    folder = build(tmp_path, "gpt-neox")
    checkpoints.rename(folder, "gpt_neox.layers.1.mlp.dense_h_to_4h", "gpt_neox.layers.1.mlp.other")
    with pytest.raises(
        UnsupportedError, match=r"layers\.1\.mlp\.other is quantized and is missing"
    ):
        load_engine(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = build(tmp_path, "gpt-neox")
    checkpoints.rename(folder, "gpt_neox.final_layer_norm.weight", None)
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensors .* gpt_neox\.final_layer_norm\.weight"
    ):
        load_engine(folder)


def test_unused_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build(tmp_path, "gpt-neox")
    checkpoints.rename(folder, "gpt_neox.layers.0.attention.dense.bias", "gpt_neox.extra.bias")
    with pytest.raises(CheckpointError, match=r"attention\.dense\.bias"):
        load_engine(folder)
    checkpoints.rename(folder, "gpt_neox.extra.bias", "gpt_neox.layers.0.attention.dense.bias")
    checkpoints.add(folder, "gpt_neox.extra.bias", torch.zeros(3))
    with caplog.at_level(logging.WARNING):
        load_engine(folder)
    assert "does not use 1 tensors" in caplog.text
    assert "gpt_neox.extra.bias" in caplog.text
