"""Fixtures of the calibration tests. All folders are session-wide: read them only.

`model_of(kind)`       source folder of a tiny random model, see `tests/calibrate/models.py`
`calibrated(recipe)`   checkpoint folder of the tiny Llama after `calibrate` with that recipe
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
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

    @cache
    def run(recipe: str) -> Path:
        calibrate(
            tiny_llama,
            folder / recipe,
            recipe=recipe,
            data=[str(calibration_file)],
            samples=16,
            progress=False,
        )
        return folder / recipe

    return run
