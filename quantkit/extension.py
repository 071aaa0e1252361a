"""Loads the C++ kernels, `quantkit/_cpu*.so`, once per process; every module with ops imports this.

They register themselves onto ops whose schemas are in Python, and win on CPU. Sources: csrc/.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

import torch


def load_extension(folder: Path = Path(__file__).parent) -> bool:
    """Load the C++ kernels built into `folder`; return whether they are in use.

    `QUANTKIT_DISABLE_EXT=1` leaves them out. A library that does not load (built for another
    system, say) is reported, and the reference kernels stay.
    """
    libraries = sorted(folder.glob("_cpu*.so"))
    if os.environ.get("QUANTKIT_DISABLE_EXT") == "1" or not libraries:
        return False
    try:
        torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    except OSError as error:
        logger = logging.getLogger("quantkit")
        logger.warning("cannot load %s, using slow reference kernels: %s", libraries[0], error)
        return False
    return True


EXTENSION_LOADED: Final = load_extension()
"""Whether CPU tensors go to the C++ kernels; if not, the reference kernels serve, slowly."""
