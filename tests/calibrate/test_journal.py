"""The journal by itself: what it stores, and that it gives back the same bits."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path

import pytest
import torch

from quantkit.calibrate.batches import Batch, Call
from quantkit.calibrate.journal import Interrupted, Journal
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.report import LayerReport
from quantkit.errors import CheckpointError

RUN = {"seed": 0, "recipe": {"name": "r"}}


def batches(fill: float, shared: bool = False) -> Moving:
    """Two batches at the door of layer 0, with a state that layers share if `shared`."""
    made = []
    for size in (2, 1):
        hidden = torch.full((size, 3, 4), fill, dtype=torch.bfloat16)
        state: UserDict[str, tuple[torch.Tensor, ...]] = UserDict()
        calls = [Call((), {"shared": state, "mask": None} if shared else {}) for _ in range(3)]
        made.append(Batch(hidden, None, calls))
    return Moving.of(made)


def block_of(moving: Moving) -> list[Batch]:
    (block,) = moving.rounds()
    return block


def interrupted_after(
    folder: Path, moving: Moving, num_done: int, error: BaseException | None = None
) -> None:
    with Journal(folder / "out", RUN, 3, resume=False) as journal:
        journal.set_prelude({"kept": ["a"]})
        for number in range(num_done):
            journal.add(LayerReport(f"layer{number}", [], 0.1 + number), moving, number + 1)
        raise error or KeyboardInterrupt


def test_everything_comes_back(tmp_path: Path) -> None:
    moving = batches(0.0)
    for batch in block_of(moving):
        batch.hidden = torch.randn(4, 3, batch.hidden.shape[0]).to(torch.bfloat16).transpose(0, 2)
    with pytest.raises(Interrupted, match="after 2 of 3 layers"):
        interrupted_after(tmp_path, moving, 2)
    with Journal(tmp_path / "out", RUN, 3, resume=True) as journal:
        assert journal.prelude == {"kept": ["a"]}
        assert journal.num_pieces == 2
        assert journal.layers == [LayerReport(f"layer{n}", [], 0.1 + n) for n in range(2)]
        fresh = batches(0.0)
        journal.restore(fresh)
        for before, after in zip(block_of(moving), block_of(fresh), strict=True):
            assert torch.equal(before.hidden, after.hidden)
            assert before.hidden.stride() == after.hidden.stride()
    assert list(tmp_path.iterdir()) == []


def test_states_that_layers_share_come_back(tmp_path: Path) -> None:
    moving = batches(1.0, shared=True)
    for batch in block_of(moving):
        batch.calls[0].kwargs["shared"]["full.attention"] = (torch.randn(2, 3), torch.randn(5))
    with pytest.raises(Interrupted):
        interrupted_after(tmp_path, moving, 1)
    fresh = batches(0.0, shared=True)
    with Journal(tmp_path / "out", RUN, 3, resume=True) as journal:
        journal.restore(fresh)
    for before, after in zip(block_of(moving), block_of(fresh), strict=True):
        old, new = (b.calls[2].kwargs["shared"]["full.attention"] for b in (before, after))
        assert all(torch.equal(x, y) for x, y in zip(old, new, strict=True))


@pytest.mark.parametrize("num_done", [0, 1])
def test_a_prelude_alone_outlasts_a_kill_and_nothing_else(tmp_path: Path, num_done: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(tmp_path, batches(0.0), num_done)
    assert bool(list(tmp_path.iterdir())) == bool(num_done)


def test_an_error_of_the_input_removes_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        interrupted_after(tmp_path, Moving.of([]), 2, CheckpointError("no"))
    assert list(tmp_path.iterdir()) == []


def test_its_size_counts_only_where_it_can_be_resumed(tmp_path: Path) -> None:
    assert Journal.size(tmp_path / "out") == 0
    with pytest.raises(Interrupted):
        interrupted_after(tmp_path, batches(0.0), 1)
    assert Journal.size(tmp_path / "out") > 100
    (tmp_path / ".out.journal" / "run.json").unlink()
    assert Journal.size(tmp_path / "out") == 0
