"""LongRoPE below, across and beyond the length where it changes, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import load_fp8
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.loading import load_engine
from quantkit.runtime.shapes import model_shape
from tests import checkpoints, tiny

LIMIT = 16
FLOAT32 = 1e-4  # logits are about 10; a few hundred float32 roundings
IDS = tiny.random_ids(40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.build(
        tmp_path_factory.mktemp("phi3-long"), checkpoints.FAMILIES["phi3-long"]()
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> Decoder:
    engine = load_engine(folder)
    assert isinstance(engine, Decoder)
    return engine


@pytest.fixture(scope="module")
def after(folder: Path) -> list[Tensor]:
    """Return transformers' logits after the first n tokens of IDS, n from 1, of a pass each."""
    model = checkpoints.reference_model(folder)
    with torch.inference_mode():
        return [model(IDS[None, :n]).logits[0, -1] for n in range(1, len(IDS) + 1)]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1, 40])
@torch.inference_mode()
def test_a_prompt_equals_transformers_at_every_position(
    folder: Path, engine: Decoder, length: int
) -> None:
    expected = checkpoints.reference_model(folder)(IDS[None, :length]).logits[0]
    close(engine.logits(IDS[None, :length])[0], expected)
    close(engine.forward(IDS[:length], [0], [length], engine.new_cache(1, 8), False), expected)


def test_the_two_sets_of_factors_differ(engine: Decoder) -> None:
    long, short = engine.logits(IDS[None, : LIMIT + 1])[0], engine.logits(IDS[None, :LIMIT])[0]
    assert (long[LIMIT - 1] - short[LIMIT - 1]).abs().max() > 0.1


@pytest.mark.parametrize("prompt", [1, 10, LIMIT, LIMIT + 1])
@pytest.mark.parametrize("chunk", [1, 3, 5, 30])
def test_steps_equal_a_pass_over_all_tokens_so_far(
    engine: Decoder, after: list[Tensor], prompt: int, chunk: int
) -> None:
    cache = engine.new_cache(1, 8)
    rows = [engine.forward(IDS[:prompt], [0], [prompt], cache)]
    for part in IDS[prompt:].split(chunk):
        rows.append(engine.forward(part, [0], [len(part)], cache, last_only=False))
    close(torch.cat(rows), torch.stack(after[prompt - 1 :]))


def test_what_is_rolled_back_across_the_limit_was_never_there(
    engine: Decoder, after: list[Tensor]
) -> None:
    cache, wrong = engine.new_cache(1, 8), tiny.random_ids(9, seed=5)
    engine.forward(IDS[:12], [0], [12], cache)
    for kept in (12, 13, 15, 16, 17, 14):
        engine.forward(wrong, [0], [9], cache)  # beyond the limit
        cache.truncate(0, 12)
        if kept > 12:
            engine.forward(IDS[12:kept], [0], [kept - 12], cache)
        rows = engine.forward(IDS[kept : kept + 3], [0], [3], cache, last_only=False)
        close(rows, torch.stack(after[kept : kept + 3]))
        cache.truncate(0, 12)


def test_sequences_cross_each_at_its_own_time(engine: Decoder, after: list[Tensor]) -> None:
    cache = engine.new_cache(3, 8)
    lengths = {2: 4, 0: 14, 1: 20}
    packed = torch.cat([IDS[:length] for length in lengths.values()])
    engine.forward(packed, list(lengths), list(lengths.values()), cache)
    for _ in range(4):
        counts = [3, 1, 2]
        spans = list(zip(lengths.items(), counts, strict=True))
        packed = torch.cat([IDS[length : length + count] for (_, length), count in spans])
        rows = engine.forward(packed, list(lengths), counts, cache, last_only=False)
        close(rows, torch.stack([after[n + i] for (_, n), count in spans for i in range(count)]))
        for (sequence, length), count in spans:
            lengths[sequence] = length + count
    cache.release(0)
    close(engine.forward(IDS[:5], [0], [5], cache)[0], after[4])


def test_greedy_text_is_that_of_transformers_generate(folder: Path) -> None:
    model, prompt = checkpoints.reference_model(folder), IDS[:9]
    expected = model.generate(prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=None)
    (found,) = load_fp8(folder).generate_ids([prompt.tolist()], max_new_tokens=20, ignore_eos=True)
    assert prompt.tolist() + found.ids == expected[0].tolist()


def test_drafts_do_not_change_the_text_at_the_limit(folder: Path) -> None:
    prompt = [7, 8, 9] * 3
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    (plain,) = load_fp8(folder).generate_ids([prompt], **options)
    (drafted,) = load_fp8(folder, draft="suffix").generate_ids([prompt], **options)
    assert drafted.ids == plain.ids


def test_a_config_without_the_length_is_refused() -> None:
    config = checkpoints.FAMILIES["phi3-long"]()
    config.rope_parameters = {**config.rope_parameters, "original_max_position_embeddings": 0}
    with pytest.raises(CheckpointError, match="original_max_position_embeddings 0"):
        model_shape(config)


def test_long_factors_for_some_layers_only_are_not_known() -> None:
    config = checkpoints.FAMILIES["gemma3"]()
    config.rope_parameters = {**config.rope_parameters, "full_attention": checkpoints.LONG_ROPE}
    with pytest.raises(UnsupportedError, match="'longrope' of some layers only"):
        model_shape(config)
