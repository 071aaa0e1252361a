"""The decoder against transformers on the same dequantized weights, and against itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.checkpoint import open_checkpoint
from quantkit.decoder_ops import MANY_ROWS
from quantkit.errors import GenerationError
from quantkit.extension import EXTENSION_LOADED
from quantkit.ops import FEW_ROWS, multiplies_many_rows
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.engine import Engine, SequenceCache
from quantkit.runtime.loading import load_engine
from quantkit.runtime.shapes import parse_config
from quantkit.runtime.transformers_engine import TransformersEngine
from quantkit.runtime.weights import WeightReader
from tests import checkpoints, tiny

Make = Callable[..., Path]
EVERY_FAMILY = pytest.mark.parametrize("family", checkpoints.FAMILIES)
SOME = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "starcoder2", "gemma2", "gemma3", "olmo3"]
SOME_FAMILIES = pytest.mark.parametrize("family", SOME)
EVERY_KV = pytest.mark.parametrize("kv", ["none", "fp8", "fp8-head"])
FLOAT32 = 1e-4  # logits are about 10; a few hundred float32 roundings
# Sums in another order may take a key across the edge between two codes, one in some thousand.
TOLERANCE = {"none": FLOAT32, "fp8": 2e-2, "fp8-head": 2e-2}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Build a checkpoint of a family once per module and set of options."""
    made: dict[tuple[Any, ...], Path] = {}

    def build(family: str, scheme: str = "dynamic", kv: str = "none") -> Path:
        key = (family, scheme, kv)
        if key not in made:
            configs = checkpoints.FAMILIES | checkpoints.OTHERS
            folder = tmp_path_factory.mktemp("-".join(key))
            made[key] = checkpoints.build(
                folder, configs[family](), checkpoints.SCHEMES[scheme], kv
            )
        return made[key]

    return build


def run(engine: Engine, ids: Tensor, cache: SequenceCache, chunk: int, sequence: int = 0) -> Tensor:
    """Feed ids in chunks; return the logits after every token."""
    parts = [
        engine.forward(part, [sequence], [len(part)], cache, last_only=False)
        for part in ids.split(chunk)
    ]
    return torch.cat(parts)


@EVERY_FAMILY
@torch.inference_mode()
def test_logits_equal_transformers(make: Make, family: str) -> None:
    folder = make(family)
    engine, model = load_engine(folder), checkpoints.reference_model(folder)
    assert isinstance(engine, Decoder)
    ids = tiny.random_ids(3 * 20).view(3, 20)
    expected = model(ids).logits
    torch.testing.assert_close(engine.logits(ids), expected, rtol=0, atol=FLOAT32)
    cached = engine.forward(ids.flatten(), [0, 1, 2], [20] * 3, engine.new_cache(3, 8), False)
    torch.testing.assert_close(cached.view_as(expected), expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("scheme", ["static", "block", "native"])
@pytest.mark.parametrize("family", ["llama", "llama-odd", "llama-wide-block", "qwen2"])
@torch.inference_mode()
def test_logits_equal_transformers_for_every_weight_granularity(
    make: Make, family: str, scheme: str
) -> None:
    folder = make(family, scheme)
    ids = tiny.random_ids(20).view(1, 20)
    expected = checkpoints.reference_model(folder)(ids).logits
    torch.testing.assert_close(load_engine(folder).logits(ids), expected, rtol=0, atol=FLOAT32)


@EVERY_FAMILY
def test_greedy_tokens_equal_transformers(make: Make, family: str) -> None:
    folder = make(family)
    engine, model = load_engine(folder), checkpoints.reference_model(folder)
    prompt = tiny.random_ids(7, seed=1)
    expected = model.generate(prompt[None], max_new_tokens=24, do_sample=False, eos_token_id=None)
    cache, tokens = engine.new_cache(1, 31), prompt.tolist()
    new = prompt
    for _ in range(24):
        new = engine.forward(new, [0], [len(new)], cache).argmax(dim=1)
        tokens.append(int(new))
    assert tokens == expected[0].tolist()


@pytest.mark.skipif(not EXTENSION_LOADED, reason="only the compiled op is faster")
@EVERY_FAMILY
def test_which_families_decode_in_one_op(make: Make, family: str) -> None:
    """Layer norms and MLPs without a gate are not in it, nor is a factor on what layers add."""
    engine = load_engine(make(family))
    assert isinstance(engine, Decoder)
    assert (engine._fused is None) == family.startswith(("starcoder2", "granite"))


@pytest.mark.skipif(not EXTENSION_LOADED, reason="only the compiled op is faster")
@pytest.mark.parametrize("kind", ["native", None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_op_gives_the_bits_of_many_for_as_many_tokens_as_it_is_used(
    make: Make, dtype: str, kind: str | None
) -> None:
    folder = make("llama", kind) if kind else make("llama")
    engine = load_engine(folder, dtype=dtype)
    assert isinstance(engine, Decoder)
    fused = engine._fused
    assert fused is not None
    weight, x = fused.layers.linears[0].weight, torch.empty(1, 64, dtype=engine.dtype)
    matrix_unit = multiplies_many_rows(x, weight, 64)
    assert fused.most_rows == (MANY_ROWS if matrix_unit else FEW_ROWS)
    counts = [1, 40, 2, 31, 54] if matrix_unit else [1, 5, 2, 8]
    ids, sequences = tiny.random_ids(sum(counts)), range(len(counts))
    assert len(ids) == fused.most_rows
    results = []
    for engine._fused in (fused, None):
        cache = engine.new_cache(len(counts), 64)
        for sequence in sequences:  # something to attend to
            engine.hidden(tiny.random_ids(3 + sequence), [sequence], [3 + sequence], cache)
        results.append(engine.hidden(ids, list(sequences), counts, cache).clone())
    assert torch.equal(*results)


def test_native_checkpoints_decode_like_they_prefill(make: Make) -> None:
    engine = load_engine(make("llama", "native"))
    ids = tiny.random_ids(30)
    stepwise = run(engine, ids, engine.new_cache(1, 30), 1)
    torch.testing.assert_close(stepwise, engine.logits(ids[None])[0], rtol=0, atol=FLOAT32)


@SOME_FAMILIES
@EVERY_KV
def test_chunked_prefill_and_single_steps_equal_one_pass(make: Make, family: str, kv: str) -> None:
    engine = load_engine(make(family, kv=kv))
    ids = tiny.random_ids(40)
    once = run(engine, ids, engine.new_cache(1, 40), 40)
    for chunk in (1, 17):
        chunked = run(engine, ids, engine.new_cache(1, 1), chunk)
        torch.testing.assert_close(chunked, once, rtol=0, atol=TOLERANCE[kv])


@SOME_FAMILIES
@EVERY_KV
def test_packed_sequences_equal_each_alone(make: Make, family: str, kv: str) -> None:
    engine = load_engine(make(family, kv=kv))
    prompts = [tiny.random_ids(n, seed=n) for n in (2, 5, 9)]
    together = engine.new_cache(3, 9)
    order = [2, 0, 1]
    packed = torch.cat([prompts[n] for n in order])
    first = engine.forward(packed, order, [len(prompts[n]) for n in order], together)
    second = engine.forward(first.argmax(dim=1), order, [1, 1, 1], together)
    for row, sequence in enumerate(order):
        alone = engine.new_cache(1, 9)
        after_prompt = engine.forward(prompts[sequence], [0], [len(prompts[sequence])], alone)
        after_token = engine.forward(after_prompt.argmax(dim=1), [0], [1], alone)
        torch.testing.assert_close(first[row], after_prompt[0], rtol=0, atol=TOLERANCE[kv])
        torch.testing.assert_close(second[row], after_token[0], rtol=0, atol=TOLERANCE[kv])
    assert together.lengths == [3, 6, 10]


@pytest.mark.parametrize("kv", ["none", "fp8"])
def test_truncating_and_continuing_equals_a_fresh_cache(make: Make, kv: str) -> None:
    engine = load_engine(make("llama", kv=kv))
    ids, wrong = tiny.random_ids(20), tiny.random_ids(9, seed=5)
    expected = run(engine, ids, engine.new_cache(1, 20), 10)
    cache = engine.new_cache(1, 20)
    run(engine, ids[:10], cache, 10)
    run(engine, wrong, cache, 9)
    cache.truncate(0, 10)
    assert torch.equal(run(engine, ids[10:], cache, 10), expected[10:])


@SOME_FAMILIES
@pytest.mark.parametrize("kv", ["fp8", "fp8-head"])
def test_the_fp8_cache_equals_rounding_keys_and_values_in_transformers(
    make: Make, family: str, kv: str
) -> None:
    folder = make(family, kv=kv)
    engine = load_engine(folder)
    checkpoint = open_checkpoint(folder)
    reader = WeightReader(checkpoint, torch.device("cpu"), torch.float32)
    other = TransformersEngine(reader, parse_config(checkpoint.config), quantize_kv=True)
    ids = tiny.random_ids(30)
    expected = run(other, ids, other.new_cache(1, 30), 30)
    out = run(engine, ids, engine.new_cache(1, 30), 30)
    rounding = (expected - engine.logits(ids[None])[0]).norm()
    assert rounding > 0.1  # it matters
    # Sums in another order take a key in some thousand to the next code, never further.
    assert (out - expected).norm() < 0.2 * rounding


def test_last_only_picks_the_last_token_of_each_sequence(make: Make) -> None:
    engine = load_engine(make("llama"))
    ids = tiny.random_ids(9)
    every = engine.forward(ids, [1, 0], [4, 5], engine.new_cache(2, 9), last_only=False)
    last = engine.forward(ids, [1, 0], [4, 5], engine.new_cache(2, 9))
    assert every.shape == (9, tiny.VOCAB_SIZE)
    torch.testing.assert_close(last, every[[3, 8]], rtol=0, atol=1e-5)


def test_bfloat16_follows_transformers_closely(make: Make) -> None:
    folder = make("llama")
    engine = load_engine(folder, dtype="bfloat16")
    ids = tiny.random_ids(30).view(1, 30)
    exact = checkpoints.reference_model(folder)(ids).logits
    theirs = checkpoints.reference_model(folder).bfloat16()(ids).logits.float()
    ours = engine.logits(ids)
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() < 1.1 * (theirs - exact).norm()


def test_a_failed_step_leaves_the_lengths(make: Make) -> None:
    engine = load_engine(make("llama"))
    cache = engine.new_cache(1, 8)
    run(engine, tiny.random_ids(60), cache, 60)
    with pytest.raises(GenerationError, match="would have 65 tokens, the model's limit is 64"):
        engine.forward(tiny.random_ids(5), [0], [5], cache)
    with pytest.raises(GenerationError, match="sequence 0 has no new tokens"):
        engine.forward(tiny.random_ids(0), [0], [0], cache)
    with pytest.raises(GenerationError, match="would have 65 tokens"):
        engine.logits(tiny.random_ids(65)[None])
    assert cache.lengths == [60]


def test_a_cache_of_another_model_is_refused(make: Make) -> None:
    one, other = load_engine(make("llama")), load_engine(make("qwen3"))
    with pytest.raises(GenerationError, match="belongs to another model"):
        one.forward(tiny.random_ids(3), [0], [3], other.new_cache(1, 3))
