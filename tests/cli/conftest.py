"""Fixtures of the command line tests.

`tiny_checkpoint`  folder: the tiny Llama, calibrated to FP8 with an FP8 KV cache; read only
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """Undo what a command that runs in this process does to our logger."""
    logger = logging.getLogger("quantkit")
    handlers, level = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = handlers, level


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tiny_llama: Path, calibration_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    from quantkit.calibrate import calibrate

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-fp8"
    calibrate(str(tiny_llama), folder, data=[str(calibration_file)], samples=8, seq_len=32)
    return folder
