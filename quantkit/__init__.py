"""quantkit: FP8 quantization of language models, and a runtime for the result.

The names below are loaded on first use, so that `import quantkit` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.checkpoint import read_checkpoint
    from quantkit.errors import QuantKitError
    from quantkit.load import load_fp8
    from quantkit.runtime.model import Fp8Model
    from quantkit.runtime.params import SamplingParams
    from quantkit.runtime.request import Completion

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Fp8Model",
    "QuantKitError",
    "SamplingParams",
    "__version__",
    "load_fp8",
    "read_checkpoint",
]

_MODULES = {
    "Completion": "quantkit.runtime.request",
    "Fp8Model": "quantkit.runtime.model",
    "QuantKitError": "quantkit.errors",
    "SamplingParams": "quantkit.runtime.params",
    "load_fp8": "quantkit.load",
    "read_checkpoint": "quantkit.checkpoint",
}


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value
