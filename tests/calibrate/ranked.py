"""Calibrate in every process of a torchrun, one variant after the other.

A program: `torchrun --nproc-per-node N -m tests.calibrate.ranked FOLDER VARIANTS`, where VARIANTS
is {name: options of calibrate} in JSON; results go to FOLDER/NAME.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from quantkit.calibrate import calibrate


def main(folder: str, variants: str) -> None:
    torch.set_num_threads(1)
    for name, options in json.loads(variants).items():
        calibrate(output=Path(folder) / name, progress=False, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
