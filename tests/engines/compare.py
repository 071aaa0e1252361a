"""Do other engines load our checkpoints, and compute what we compute? Exits 1 if not.

    python -m tests.engines.compare [--vllm-python VENV/bin/python] FOLDER...

Each FOLDER is a checkpoint that `calibrate` or `export` wrote. transformers runs in this process;
vLLM in an environment of its own (README.md beside this file says how to make it), so none of this
is part of `make test`. Both sides round inputs as the checkpoint says; vLLM runs once with a plain
KV cache and once with the one that the checkpoint declares. It computes in bfloat16, transformers
and ours in float32.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from quantkit import SamplingParams, load_fp8
from quantkit.runtime.model import Fp8Model
from quantkit.shards import read_json
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
KV_CACHES = {"bfloat16": "none", "auto": "fp8"}
"""What vLLM and we call kinds of KV cache."""


@dataclass(frozen=True, slots=True)
class Question:
    """A checkpoint, prompts to continue greedily, and a passage to score, as token ids."""

    folder: Path
    prompts: list[list[int]]
    passage: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of it: tokens, and the log p of the passage's tokens but the first."""

    engine: str
    tokens: list[list[int]]
    log_p: Tensor


def ask_vllm(python: str, question: Question, kv: str) -> Answer:
    """Run vLLM in its own environment; raises RuntimeError with the end of what it printed."""
    script = Path(__file__).with_name("vllm_tokens.py")
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("question.json", "answer.json")]
        fields = {**asdict(question), "folder": str(question.folder.resolve()), "kv": kv}
        files[0].write_text(json.dumps(fields))
        done = subprocess.run(
            [python, script, *files],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        found = json.loads(files[1].read_text())
    return Answer(f"vLLM {found['version']}", found["tokens"], torch.tensor(found["log_p"]))


@torch.no_grad()
def ask_transformers(question: Question) -> Answer:
    """Load the folder as users of transformers do; raises RuntimeError if that fails."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            question.folder, dtype=torch.float32
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise RuntimeError(str(error)) from error
    tokens = []
    for prompt in question.prompts:
        ids = torch.tensor([prompt])
        new = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        tokens.append(model.generate(ids, **new)[0, len(prompt) :].tolist())
    logits = model(torch.tensor([question.passage])).logits[0]
    return Answer(
        f"transformers {transformers.__version__}",
        tokens,
        log_p_of(logits, torch.tensor(question.passage)),
    )


def log_p_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log p of each token but the first. Shapes: [n, vocab], [n] -> [n - 1]."""
    return logits[:-1].log_softmax(dim=-1).gather(1, ids[1:, None]).squeeze(1)


def log_p(model: Fp8Model, passage: list[int]) -> Tensor:
    """Return the log p of each token but the first, through the KV cache."""
    engine = model.engine
    cache = engine.new_cache(1, len(passage))
    ids = torch.tensor(passage)
    return log_p_of(engine.forward(ids, [0], [len(passage)], cache, last_only=False), ids)


def compare(folder: Path, kind: str, ask: Callable[[Question], Answer], table: Table) -> bool:
    """Add a row for one checkpoint and kind of our cache; tell whether the engines agree."""
    model = load_fp8(folder, dtype="float32", kv=kind, activations="quantized")
    prompts = [model.tokenizer(text)["input_ids"] for text in PROMPTS]
    question = Question(folder, prompts, model.tokenizer(PASSAGE)["input_ids"])
    try:
        answer = ask(question)
    except RuntimeError as error:
        print(f"{folder} is not loaded, cache {kind}:\n{error}", file=sys.stderr)
        return False
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    ours = [done.ids for done in model.generate_ids(prompts, greedy)]
    same = sum(one == other for one, other in zip(ours, answer.tokens, strict=True))
    mine = log_p(model, question.passage)
    mean = float((answer.log_p - mine).mean())
    single = float((answer.log_p - mine).abs().mean())
    numbers = (f"{float(mine.mean()):.4f}", f"{mean:+.4f}", f"{single:.4f}")
    table.add_row(folder.name, answer.engine, kind, *numbers, f"{same} of {len(PROMPTS)}")
    return abs(mean) <= MEAN_LIMIT and single <= SINGLE_LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", help="the Python that has vLLM, if it is to run")
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    columns = ("checkpoint", "engine", "KV cache", "our mean log p", "theirs", "single", "greedy")
    table, agree = Table(*columns), True
    for folder in options.folders:
        method = read_json(folder / "config.json")["quantization_config"]["quant_method"]
        if method != "modelopt":  # which transformers does not know
            agree &= compare(folder, "none", ask_transformers, table)
        if options.vllm_python:
            for theirs, ours in KV_CACHES.items():
                ask = partial(ask_vllm, options.vllm_python, kv=theirs)
                agree &= compare(folder, ours, ask, table)
    Console(width=120).print(table)
    sys.exit(int(not agree))


if __name__ == "__main__":
    main()
