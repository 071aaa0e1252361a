"""Do other engines load our checkpoints, and compute what we compute? Exits 1 if not.

    python -m tests.engines.compare --vllm-python VENV/bin/python FOLDER...

Each FOLDER is a checkpoint that `calibrate` or `export` wrote. vLLM runs in an environment of its
own (README.md beside this file says how to make it), so none of this is part of `make test`. Both
sides round inputs as the checkpoint says, once with a plain KV cache and once with the one that the
checkpoint declares. vLLM computes in bfloat16, ours in float32.

So a value now and then falls on the other side of a rounding to 8 bits, and single predictions
move: by 0.1 to 0.3 nats as a rule, which is what quantization itself does to them. A scale that is
missed or misread moves them by several. So what is judged is the log p of a passage's tokens: its
mean, and the mean difference of single ones. Greedy continuations are shown beside that: how many
of them are the same for all of eight tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from quantkit import SamplingParams, load_fp8
from quantkit.runtime.model import Fp8Model
from tests.engines.vllm_tokens import NEW_TOKENS

PROMPTS = (
    "Monday, Tuesday, Wednesday,",
    "one, two, three, four,",
    "2, 4, 6, 8, 10,",
    "a b c d e f g",
    "The capital of France is",
    "Water boils at a temperature of",
    "def add(a, b):\n    return",
    "Once upon a time, in a small village,",
)
PASSAGE = (
    "The history of Rome spans more than two and a half thousand years. It began, so the legend "
    "says, when twin brothers who had been raised by a wolf founded a city on seven hills beside "
    "the river Tiber, and it went on to rule most of the world that its people knew. Its roads, "
    "laws and language outlived its emperors: the roads are still in use in places, the law is "
    "taught in universities, and the language became Italian, French, Spanish and Romanian. When "
    "the western half of the empire fell, the bishops of the city kept its archives and its "
    "ambition, and for a thousand years pilgrims walked to it from every corner of the continent."
)
MEAN_LIMIT = 0.1
"""Nats: of the mean log p; five times its standard error on this passage."""
SINGLE_LIMIT = 0.3
"""Nats: of the mean difference of single tokens' log p."""
KV_CACHES = {"plain": ("bfloat16", "none"), "FP8": ("auto", "fp8")}
"""What vLLM and we call kinds of KV cache."""


def ask_vllm(python: str, question: dict[str, Any]) -> dict[str, Any]:
    """Run vLLM in its own environment; raises RuntimeError with the end of what it printed."""
    script = Path(__file__).with_name("vllm_tokens.py")
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("question.json", "answer.json")]
        files[0].write_text(json.dumps(question))
        done = subprocess.run(
            [python, script, *files],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        answer: dict[str, Any] = json.loads(files[1].read_text())
    return answer


def log_p(model: Fp8Model, passage: list[int]) -> torch.Tensor:
    """Return the log p of each token but the first, through the KV cache."""
    engine = model.engine
    cache = engine.new_cache(1, len(passage))
    ids = torch.tensor(passage)
    logits = engine.forward(ids, [0], [len(passage)], cache, last_only=False)
    return logits[:-1].log_softmax(dim=-1).gather(1, ids[1:, None]).squeeze(1)


def compare(folder: Path, kind: str, python: str, table: Table) -> bool:
    """Add a row for one checkpoint and kind of cache; tell whether the engines agree."""
    theirs_kv, ours_kv = KV_CACHES[kind]
    model = load_fp8(folder, dtype="float32", kv=ours_kv, activations="quantized")
    encode = model.tokenizer
    prompts = [encode(prompt)["input_ids"] for prompt in PROMPTS]
    passage = encode(PASSAGE)["input_ids"]
    question = {
        "folder": str(folder.resolve()),
        "kv": theirs_kv,
        "prompts": prompts,
        "passage": passage,
    }
    answer = ask_vllm(python, question)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    ours = [done.ids for done in model.generate_ids(prompts, greedy)]
    same = sum(one == other for one, other in zip(ours, answer["tokens"], strict=True))
    mine, other = log_p(model, passage), torch.tensor(answer["log_p"])
    mean = float((other - mine).mean())
    single = float((other - mine).abs().mean())
    table.add_row(
        folder.name,
        f"vLLM {answer['version']}",
        kind,
        f"{float(mine.mean()):.4f}",
        f"{mean:+.4f}",
        f"{single:.4f}",
        f"{same} of {len(PROMPTS)}",
    )
    return abs(mean) <= MEAN_LIMIT and single <= SINGLE_LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    columns = ("checkpoint", "engine", "KV cache", "our mean log p", "theirs", "single", "greedy")
    table, agree = Table(*columns), True
    for folder in options.folders:
        for kind in KV_CACHES:
            try:
                agree &= compare(folder, kind, options.vllm_python, table)
            except RuntimeError as error:
                print(f"vLLM failed on {folder}, {kind} cache:\n{error}", file=sys.stderr)
                agree = False
    Console(width=120).print(table)
    sys.exit(int(not agree))


if __name__ == "__main__":
    main()
