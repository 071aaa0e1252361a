"""Damage checkpoints seed by seed, open each in every way, and say what went wrong.

A program, because it limits its own memory: `python -m tests.robustness.attempts GOOD WORK FIRST
COUNT`, where GOOD has the intact folders. Prints the seed and the damage before each attempt, so
that a crash shows where, and one JSON object at the end.
"""

from __future__ import annotations

import json
import logging
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantkit import load_fp8
from quantkit.calibrate.source import ModelSource, open_source
from quantkit.calibrate.tokenize import encode, render_chat, special_prefix
from quantkit.errors import QuantKitError
from quantkit.inspection.inspection import inspect
from quantkit.lint import lint
from tests import tiny
from tests.robustness.foreign_files import GGUF
from tests.robustness.mutations import damage

CHAT = [{"role": "user", "content": "the cat"}]
MEMORY = 1 << 30
SECONDS = 5
"""Of processor time, which a busy machine does not take."""


class TooSlow(BaseException):
    """No Exception, so that nothing in between takes it for one that it handles."""


def load(folder: Path) -> str:
    """Load a checkpoint; run it if it loads."""
    model = load_fp8(folder, device="cpu")
    logits = model.logits(tiny.random_ids(5).view(1, -1) % 32)
    return "finite" if bool(logits.isfinite().all()) else "not finite"


def check(folder: Path) -> str:
    """Lint a folder."""
    report = lint(folder)
    json.dumps(report.to_json(), allow_nan=False)
    return "good" if report.ok else "findings"


def look(folder: Path) -> str:
    """Inspect a folder, and write the page's numbers."""
    inspect(folder).to_json()
    return "inspected"


def write(folder: Path) -> str:
    """Load a checkpoint with its tokenizer, and let it answer."""
    model = load_fp8(folder, device="cpu")
    ids = model.encode_chat(CHAT) if getattr(model.tokenizer, "chat_template", None) else []
    return type(model.generate("the cat", max_new_tokens=2) + "".join(map(str, ids))).__name__


def open_folder(folder: Path) -> ModelSource:
    """Open a folder, or the GGUF file in it, as the model to calibrate."""
    return open_source(folder / GGUF if (folder / GGUF).exists() else folder)


def source(folder: Path) -> str:
    """Read all of the model to calibrate."""
    opened = open_folder(folder)
    opened.config()
    opened.scan(lambda: None)
    for name in opened.names:
        opened.head(name)
        assert opened.tensor(name).shape == opened.shape(name)
    return "opened"


def tokens(folder: Path) -> str:
    """Turn texts and a conversation into tokens, as calibration does."""
    tokenizer = open_folder(folder).tokenizer()
    special_prefix(tokenizer)
    texts = ["the cat", render_chat(tokenizer, CHAT, None) or "", ""]
    assert all(type(token) is int for ids in encode(tokenizer, texts) for token in ids)
    return "read"


WAYS: dict[str, Callable[[Path], str]] = {
    "load": load,
    "check": check,
    "inspect": look,
    "source": source,
    "write": write,
    "tokens": tokens,
}


def attempt(way: Callable[[Path], str], folder: Path) -> str:
    """Return how opening went; a fault starts with "fault"."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return way(folder)
    except QuantKitError as error:
        message = str(error)
        return "refused" if message and len(message) < 3000 else f"fault: says {message[:80]!r}"
    except (Exception, TooSlow) as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = [f for f in where if "/quantkit/" in f.filename] or list(where)
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}"
        return f"fault: {type(error).__name__} in {place}: {str(error)[:120]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def run(good: Path, work: Path, seeds: range) -> dict[str, Any]:
    """Try all seeds; return counts by way and outcome, and the faults."""
    bases = sorted(path.name for path in good.iterdir())
    counts: Counter[str] = Counter()
    faults = []
    for seed in seeds:
        folder, base = work / "damaged", bases[seed % len(bases)]
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good / base, folder)
        done = damage(folder, seed)
        print(
            f"seed {seed}, {base}: {done.encode('ascii', 'backslashreplace').decode()}", flush=True
        )
        for name, way in WAYS.items():
            began = time.monotonic()
            outcome = attempt(way, folder)
            counts[f"{name}: {outcome.partition(':')[0]}"] += 1
            if outcome.startswith("fault"):
                seconds = round(time.monotonic() - began, 1)
                faults.append([seed, base, name, done, outcome, seconds])
    return {"counts": dict(sorted(counts.items())), "faults": faults}


def limit_memory() -> None:
    """Allow this process `MEMORY` bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _too_slow(*_: Any) -> None:
    raise TooSlow(f"no end after {SECONDS} seconds")


def main() -> None:
    """Run as the module says."""
    good, work, first, count = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _too_slow)
    # All ways once, which also imports what is imported lazily, before the limit.
    intact = {base.name: {n: attempt(w, base) for n, w in WAYS.items()} for base in good.iterdir()}
    limit_memory()
    print(json.dumps({"intact": intact, **run(good, work, range(first, first + count))}))


if __name__ == "__main__":
    main()
