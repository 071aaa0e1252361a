"""Drafts on real tiny models: equal tokens, and a cache that only knows committed ones.

Passes with drafts have at most `FEW_ROWS` rows of float32 here, so that with the compiled kernels a
row is the same bits in each of them, and equality is exact. Without these, sums may come in another
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.extension import EXTENSION_LOADED
from quantkit.ops import FEW_ROWS
from quantkit.runtime.engine import Engine
from quantkit.runtime.kv_cache import BLOCK_SIZE, PagedCache
from quantkit.runtime.loading import load_engine
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from tests import checkpoints, tiny
from tests.speculative.scripted import (
    Script,
    Scripted,
    beyond_the_end,
    result,
    right,
    right_then_wrong,
    run,
    wrong,
)

Load = Callable[..., Engine]
SHORT_DRAFTS = pytest.mark.parametrize("script", [right, wrong, right_then_wrong])
MODELS = [
    ("llama", "none"),
    ("llama", "fp8"),
    ("llama", "fp8-head"),
    ("mistral", "fp8"),  # sliding windows of 5 tokens in every layer
    ("qwen2-windows", "none"),  # and in the second of two
]
PROMPTS = [tiny.random_ids(count, seed=count).tolist() for count in (9, 2, 5)]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Load a tiny model, built once per module."""
    engines: dict[tuple[str, str], Engine] = {}

    def get(family: str, kv: str = "none") -> Engine:
        if (family, kv) not in engines:
            configs = checkpoints.FAMILIES | checkpoints.OTHERS
            folder = tmp_path_factory.mktemp(family)
            path: Path = checkpoints.build(folder, configs[family](), kv=kv)
            engines[family, kv] = load_engine(path, dtype="float32")
        return engines[family, kv]

    return get


class CacheTap:
    """An Engine whose newest cache can be looked at."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.cache: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def new_cache(self, num_sequences: int, max_tokens: int) -> Any:
        self.cache = self._engine.new_cache(num_sequences, max_tokens)
        return self.cache


def params(**values: Any) -> ResolvedParams:
    return ResolvedParams(**{"seed": 1, "max_new_tokens": 24, "logprobs": 0, **values})


def stored(cache: PagedCache, sequence: int) -> list[Tensor]:
    """Keys and values of every layer, [length, heads, head_dim], as stored."""
    length = cache.lengths[sequence]
    blocks = cache.plan([sequence], [1]).block_tables[0].long()
    layers = []
    for tensor in cache.tensors():
        if tensor.dim() == 4:
            raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            layers.append(raw[blocks].flatten(0, 1)[:length])
    return layers


def fresh(engine: Engine, tokens: Sequence[int]) -> list[Tensor]:
    """The same of a new cache that has only ever seen `tokens`."""
    cache: Any = engine.new_cache(1, len(tokens))
    for at in range(0, len(tokens), FEW_ROWS):
        chunk = torch.tensor(tokens[at : at + FEW_ROWS])
        engine.forward(chunk, [0], [len(chunk)], cache)
    return stored(cache, 0)


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        if EXTENSION_LOADED:
            assert torch.equal(one, other)
        elif one.dtype == torch.uint8:  # a code may move by one where sums differ in the last bit
            assert int((one.int() - other.int()).abs().max()) <= 1
        else:
            assert torch.allclose(one, other, atol=1e-4)


@SHORT_DRAFTS
@pytest.mark.parametrize(("family", "kv"), MODELS)
def test_the_cache_holds_what_a_fresh_prefill_of_the_committed_tokens_gives(
    family: str, kv: str, script: Script, load: Load
) -> None:
    engine = load(family, kv)
    resolved = params(temperature=0.8, max_new_tokens=2 * BLOCK_SIZE)
    prompts = PROMPTS[:2]
    plain = run(engine, prompts, resolved)
    tap = CacheTap(engine)
    drafted = Scripted(script, [c.ids for c in plain], engine.vocab_size, [7, 2, 6])

    def compare(running: Sequence[Request]) -> None:
        for request in running:
            if request.finish_reason is None:
                committed = [*request.prompt, *request.ids]
                assert tap.cache.lengths[request.sequence] == len(committed) - 1
                assert_same(stored(tap.cache, request.sequence), fresh(engine, committed[:-1]))

    drafted.watch = compare
    assert result(run(tap, prompts, resolved, drafted)) == result(plain)
    assert len(drafted.steps) >= 3


@SHORT_DRAFTS
@pytest.mark.parametrize(("family", "kv"), [*MODELS, ("gpt-neox", "none"), ("gemma2", "fp8")])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b42_tokens_are_those_of_plain_decoding_at_every_length(
    family: str, kv: str, temperature: float, script: Script, load: Load
) -> None:
    engine = load(family, kv)
    slow = family in checkpoints.OTHERS  # through transformers
    resolved = params(temperature=temperature, repetition_penalty=1.2)
    for prompts in ([PROMPTS[0]], PROMPTS):
        plain = run(engine, prompts, resolved)
        future = [completion.ids for completion in plain]
        for length in range(1, 9 if len(prompts) == 1 else 5, 3 if slow else 1):
            drafted = Scripted(script, future, engine.vocab_size, [length])
            ours = run(engine, prompts, resolved, drafted)
            assert [c.ids for c in ours] == future
            if EXTENSION_LOADED and not slow:
                assert result(ours) == result(plain)


@pytest.mark.parametrize("script", [right, wrong, beyond_the_end])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_drafts_at_the_end_of_the_context(family: str, script: Script, load: Load) -> None:
    engine = load(family)
    prompt = tiny.random_ids(engine.max_context - 9).tolist()
    resolved = params(max_new_tokens=100)
    plain = run(engine, [prompt], resolved)
    assert (len(plain[0].ids), plain[0].finish_reason) == (9, "length")
    for length in (2, 8, 30):
        drafted = Scripted(script, [plain[0].ids], engine.vocab_size, [length])
        assert [c.ids for c in run(engine, [prompt], resolved, drafted)] == [plain[0].ids]


@pytest.mark.parametrize("script", [right, wrong, right_then_wrong])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b42_a_fixed_width_gives_the_same_bits_in_every_dtype(
    dtype: str, script: Script, tmp_path: Path
) -> None:
    # A width beyond FEW_ROWS: other kernels than those that are equal row by row.
    path = checkpoints.build(tmp_path, checkpoints.FAMILIES["llama"]())
    engine = load_engine(path, dtype=dtype)
    resolved = params(temperature=0.5)
    plain = run(engine, PROMPTS, resolved, width=FEW_ROWS + 4)
    future = [completion.ids for completion in plain]
    for lengths in ([3], [0, 19, 7]):
        drafted = Scripted(script, future, engine.vocab_size, lengths)
        ours = run(engine, PROMPTS, resolved, drafted, width=FEW_ROWS + 4)
        assert result(ours) == result(plain)


@pytest.mark.parametrize("kv", ["none", "fp8"])
def test_b42_where_other_kernels_lead_elsewhere_it_was_a_near_tie(kv: str, tmp_path: Path) -> None:
    # More rows take other kernels, which sum in another order. Two tokens change places only if
    # their logits are closer than the errors of both kernels, each of which is about what bfloat16
    # costs against float32 (which is much in a model of random weights).
    path = checkpoints.build(tmp_path, checkpoints.FAMILIES["llama"](), kv=kv)
    engine, exact = load_engine(path, dtype="bfloat16"), load_engine(path, dtype="float32")
    resolved = params(logprobs=None, max_new_tokens=40)
    forks = 0
    for seed in range(20):
        prompt = tiny.random_ids(8, seed=seed).tolist()
        (plain,) = run(engine, [prompt], resolved)
        drafted = Scripted(right, [plain.ids], engine.vocab_size, [20])
        (ours,) = run(engine, [prompt], resolved, drafted)
        pairs = zip(plain.ids, ours.ids, strict=True)
        fork = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if fork is not None:
            forks += 1
            logits, true = (as_decoded(e, prompt, plain.ids[:fork]) for e in (engine, exact))
            margin = float(logits[-1, plain.ids[fork]] - logits[-1, ours.ids[fork]])
            assert 0 <= margin <= 2 * float((logits - true).abs().max())
    assert forks < 20


def as_decoded(engine: Engine, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
    """The logits after the prompt and after each of `ids`, in the passes of plain decoding."""
    cache = engine.new_cache(1, len(prompt) + len(ids))
    passes = [list(prompt), *([token] for token in ids)]
    return torch.cat([engine.forward(torch.tensor(p), [0], [len(p)], cache) for p in passes])
