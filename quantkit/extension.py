"""Loads the C++ kernels: `quantkit/_cpu*.so` on import, `_cuda*.so` when a GPU is to be used.

They register themselves onto ops whose schemas are in Python, and win on their device. Every module
with ops imports this. Sources: csrc/.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import Final

import torch

_PACKAGE: Final = Path(__file__).parent


def load_extension(folder: Path = _PACKAGE, name: str = "_cpu") -> bool:
    """Load the kernels `name` built into `folder`; return whether they are in use.

    `QUANTKIT_DISABLE_EXT=1` leaves them out. A library that does not load (built for another
    system, say) is reported, and the reference kernels stay.
    """
    libraries = sorted(folder.glob(f"{name}*.so"))
    if os.environ.get("QUANTKIT_DISABLE_EXT") == "1" or not libraries:
        return False
    try:
        torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    except OSError as error:
        logging.getLogger("quantkit").warning(
            "cannot load %s, using slow reference kernels: %s",
            libraries[0],
            error.__cause__ or error,  # torch hides the linker's reason behind its own message
        )
        return False
    return True


@cache
def load_cuda_kernels(folder: Path = _PACKAGE) -> bool:
    """Load the CUDA kernels, once however often it is called; return whether they are in use.

    Call it before the first tensor goes to a GPU. It makes no CUDA call itself, and neither does
    importing quantkit: a process may still fork, or choose its devices.
    """
    return load_extension(folder, "_cuda")


EXTENSION_LOADED: Final = load_extension()
"""Whether CPU tensors go to the C++ kernels; if not, the reference kernels serve, slowly."""
