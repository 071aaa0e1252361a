"""What the tests of CUDA kernels share. None of them needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cuda.emulator import LAUNCHED, Order


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that has the last word, where there are several, what ran here."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launched"] = LAUNCHED


@pytest.fixture(params=list(Order), ids=lambda order: order.name.lower())
def order(request: pytest.FixtureRequest) -> Order:
    """Return the order in which threads run, one after the other; a missing barrier shows."""
    chosen: Order = request.param
    return chosen


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Small tensors, and the emulator next to it: a second thread of torch only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
