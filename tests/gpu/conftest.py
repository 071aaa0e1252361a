"""Skips the whole folder where there is no GPU or no compiled kernel."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu" in str(item.path)]
    if not here:
        return
    reason = "needs a CUDA GPU"
    if torch.cuda.is_available():
        from quantkit.extension import load_cuda_kernels

        if load_cuda_kernels():
            return
        reason = "needs quantkit/_cuda*.so: run make cuda"
    for item in here:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
