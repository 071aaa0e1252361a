"""A checkpoint for servers: exported, checked, and loaded by transformers.

vLLM and SGLang take the same folder: `vllm serve demo-out/hub`. transformers needs
`pip install compressed-tensors`.
"""

from __future__ import annotations

import torch
from smollm2 import model_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit import load_fp8
from quantkit.calibrate import calibrate
from quantkit.export import export
from quantkit.lint import lint


def main() -> None:
    calibrate(model_path(), "demo-out/for-servers", samples=16, seq_len=256)
    result = export("demo-out/for-servers", "demo-out/hub")
    print(f"{result.path}: {result.bytes / 1e6:.1f} MB for {', '.join(result.engines)}")
    print(lint(result.path).summary)

    tokenizer = AutoTokenizer.from_pretrained(result.path)
    theirs = AutoModelForCausalLM.from_pretrained(result.path, dtype=torch.float32)
    ours = load_fp8(result.path, dtype="float32", kv="none", activations="quantized")
    ids = tokenizer("The history of Rome", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = theirs(ids).logits[0, -1]
    found = ours.logits(ids)[0, -1]
    print("transformers continues with", repr(tokenizer.decode(int(expected.argmax()))))
    print("quantkit continues with    ", repr(tokenizer.decode(int(found.argmax()))))


if __name__ == "__main__":
    main()
