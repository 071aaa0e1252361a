"""Do other engines load our checkpoints and choose our tokens? Prints a table; exits 1 if not.

    python -m tests.engines.compare --vllm-python VENV/bin/python FOLDER...

Each FOLDER is a checkpoint that `calibrate` or `export` wrote. vLLM runs in an environment of its
own (README.md beside this file says how to make it), so none of this is part of `make test`. Both
sides continue the same prompts greedily, in bfloat16, with inputs rounded as the checkpoint says,
once with the KV cache in bfloat16 and once in FP8 (`auto`, for a checkpoint that has KV scales).

Tokens may differ where two are nearly equal: kernels sum in different orders, and vLLM's logits are
in bfloat16. The log p by which our choice leads vLLM's is printed. More than MARGIN is a failure
with a bfloat16 cache; with an FP8 cache it is not, since vLLM's CPU attention rounds more than keys
and values there (its own log p move by up to 0.6).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quantkit import SamplingParams, load_fp8
from quantkit.runtime.model import Fp8Model
from tests.engines.vllm_tokens import NEW_TOKENS

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def add(a, b):\n    return",
    "Once upon a time, in a small village,",
)
MARGIN = 0.25
"""In log p, as logits differ: two steps of bfloat16 at the size of SmolLM2's largest logits."""
KV_CACHES = {"bfloat16": "none", "auto": "auto"}
"""What vLLM calls kinds of KV cache, and we."""
CANDIDATES = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt: how many tokens agree, and the log p by which our next one leads vLLM's."""

    agreeing: int
    margin: float | None

    @property
    def ok(self) -> bool:
        return self.margin is None or self.margin <= MARGIN

    def __str__(self) -> str:
        if self.margin is None:
            return f"{self.agreeing} of {NEW_TOKENS}"
        return f"{self.agreeing} of {NEW_TOKENS}, then a lead of {self.margin:.3f}"


def vllm_tokens(
    python: str, folder: Path, prompts: list[list[int]], kv: str
) -> tuple[str, list[list[int]]]:
    """Run vLLM in its own environment; return its version and its tokens."""
    script = Path(__file__).with_name("vllm_tokens.py")
    with tempfile.TemporaryDirectory() as place:
        question, answer = Path(place) / "prompts.json", Path(place) / "tokens.json"
        question.write_text(json.dumps(prompts))
        done = subprocess.run(
            [python, script, folder.resolve(), question, answer, kv],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        found = json.loads(answer.read_text())
    return found["version"], found["tokens"]


def compare(model: Fp8Model, prompt: list[int], theirs: list[int]) -> Outcome:
    """Compare greedy tokens; where they part, measure how close the two choices are to us."""
    greedy = SamplingParams(
        temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=CANDIDATES
    )
    [ours] = model.generate_ids([prompt], greedy)
    assert ours.logprobs is not None
    for place, (token, other) in enumerate(zip(ours.ids, theirs, strict=True)):
        if token != other:
            found = ours.logprobs[place]
            return Outcome(place, found[token] - found.get(other, -inf))
    return Outcome(len(theirs), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    table = Table("checkpoint", "engine", "KV cache", *(f"{text[:12]}..." for text in PROMPTS))
    failed = False
    for folder in options.folders:
        for theirs, ours in KV_CACHES.items():
            model = load_fp8(folder, dtype="bfloat16", kv=ours, activations="quantized")
            prompts = [model.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
            try:
                version, tokens = vllm_tokens(options.vllm_python, folder, prompts, theirs)
            except RuntimeError as error:
                print(f"vLLM failed on {folder}:\n{error}", file=sys.stderr)
                failed = True
                continue
            outcomes = [compare(model, *pair) for pair in zip(prompts, tokens, strict=True)]
            table.add_row(folder.name, f"vLLM {version}", theirs, *map(str, outcomes))
            failed |= ours == "none" and not all(outcome.ok for outcome in outcomes)
    Console(width=160).print(table)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
