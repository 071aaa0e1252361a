"""Which steps are recorded, and that a recorded step is the step: with a recorder of Python calls.

What a CUDA graph itself does is for tests/gpu; here replaying is calling again, into the tensors of
the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.bench.random_weights import LLAMA_3_8B, RandomWeights, random_decoder
from quantkit.runtime import cuda_graphs
from quantkit.runtime.cuda_graphs import MAX_GRAPHS, StepGraphs
from quantkit.runtime.decoder import Decoder
from quantkit.speculative.speculation import MOST_DRAFTED

CPU = torch.device("cpu")
SMALL = replace(
    LLAMA_3_8B, vocab_size=64, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1,
    head_dim=16, windows=(None, 8), rotary=(0, None),
)  # fmt: skip


class Recorder:
    """Stands in for a CUDA graph: keeps the calls of a step made while it records."""

    current: Recorder | None = None
    made = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Tensor], tuple[Any, ...], Tensor]] = []
        Recorder.made += 1

    def replay(self) -> None:
        for run, arguments, out in self.calls:
            out.copy_(run(*arguments))


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    Recorder.current = recorder
    yield
    Recorder.current = None


class NoEvent:
    def synchronize(self) -> None:
        """Nothing runs elsewhere."""

    record = synchronize


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Return a decoder that records its steps as one on a GPU does."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    zeros: Any = torch.zeros
    unpinned = lambda *size, pin_memory=False, **options: zeros(*size, **options)  # noqa: E731
    monkeypatch.setattr(torch, "zeros", unpinned)
    Recorder.made = 0
    decoder = new_decoder()

    def run(*arguments: Any) -> Tensor:
        hidden = decoder.run_step(*arguments)
        if Recorder.current is not None:
            # Recording does not do it, on a GPU: what it leaves is not the result yet.
            out = torch.full_like(hidden, torch.nan)
            Recorder.current.calls.append((decoder.run_step, arguments, out))
            return out
        return hidden

    decoder._graphs = StepGraphs(run, CPU)
    return decoder


def new_decoder() -> Decoder:
    decoder = random_decoder(SMALL, RandomWeights(CPU, torch.bfloat16, True), quantized_kv=True)
    decoder._fused = None
    return decoder


def test_every_width_of_a_verification_is_recorded_once(recorded: Decoder) -> None:
    """One sequence, as many rows as a draft may have and one: all recorded, none twice."""
    plain = new_decoder()
    cache, other = (decoder.new_cache(1, 400) for decoder in (recorded, plain))  # never grows
    made = torch.Generator().manual_seed(0)
    widths = list(range(1, MOST_DRAFTED + 2))
    assert len(widths) <= MAX_GRAPHS
    for _ in range(4):
        for width in widths:
            ids = torch.randint(64, (width,), generator=made)
            got, expected = (
                decoder.forward(ids, [0], [width], used, last_only=False)
                for decoder, used in ((recorded, cache), (plain, other))
            )
            assert torch.equal(got, expected), width
            for used in (cache, other):  # a part of the draft is refused
                used.truncate(0, max(1, used.lengths[0] - width // 2 - 1))
    assert Recorder.made == len(widths)


def test_where_the_rows_begin_needs_no_graph_of_its_own(recorded: Decoder) -> None:
    """Drafts of other lengths that add up to as many rows: the same graph."""
    plain = new_decoder()
    cache, other = (decoder.new_cache(3, 64) for decoder in (recorded, plain))
    for widths in ([3, 1, 2], [1, 1, 4], [2, 2, 2], [4, 1, 1]):
        ids = torch.arange(6)
        got, expected = (
            decoder.forward(ids, [0, 1, 2], widths, used, last_only=False)
            for decoder, used in ((recorded, cache), (plain, other))
        )
        assert torch.equal(got, expected), widths
    assert Recorder.made == 1


def test_the_graph_not_used_for_longest_goes(
    recorded: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    cache = recorded.new_cache(1, 64)
    for width in (1, 1, 2, 2, 1, 3, 3, 1, 2, 2):
        recorded.forward(torch.arange(width), [0], [width], cache)
        cache.truncate(0, 1)
    # 1 stays, as it is used again and again; 2 went for 3, and came back.
    assert Recorder.made == 4
