"""A pytest plugin that keeps one in three of each function's cases: `-p tests.one_in_three`.

`ONE_IN_THREE` in the environment says which third, so that three runs have them all.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out two in three, but never a function as a whole."""
    first, seen, kept = int(os.environ["ONE_IN_THREE"]), Counter[str](), []
    cases = Counter(_function(item) for item in items)
    for item in items:
        function = _function(item)
        if cases[function] < 3 or seen[function] % 3 == first % 3:
            kept.append(item)
        seen[function] += 1
    chosen = set(kept)
    left_out = [item for item in items if item not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
