"""Fixtures of the calibration tests. All folders are session-wide: read them only.

`model_of(kind)`       source folder of a tiny random model, see `tests/calibrate/models.py`
`calibrated(recipe)`   checkpoint folder of the tiny Llama after `calibrate` with that recipe
`rounded(recipe)`      the same by plain rounding: without any tier
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from quantkit.calibrate import calibrate
from tests.calibrate import models


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matmuls gain nothing from threads, and wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sources")
    return cache(lambda kind: models.save(folder / kind, models.CONFIGS[kind]()))


@pytest.fixture(scope="session")
def calibrated(
    tiny_llama: Path, calibration_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("calibrated")

    return cache(partial(_calibrate, tiny_llama, calibration_file, folder))


@pytest.fixture(scope="session")
def rounded(
    tiny_llama: Path, calibration_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("rounded")
    return cache(partial(_calibrate, tiny_llama, calibration_file, folder, tiers="none"))


def _calibrate(
    model: Path, data: Path, folder: Path, recipe: str, tiers: str | None = None
) -> Path:
    out = folder / recipe
    options = {"data": [str(data)], "samples": 16, "progress": False}
    calibrate(model, out, recipe=recipe, tiers=tiers, **options)
    return out
