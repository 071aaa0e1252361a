"""Kill -9 a run at random moments, look at what it leaves, and run it again.

A program, because it forks: `python -m tests.random_kills calibrate|export MODEL FOLDER SEEDS
OPTIONS`, where SEEDS is a list in JSON; a seed says when, and whether an earlier result is in
place. Prints one JSON object: what was found how often, and what was wrong, by seed.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate import calibrate
from quantkit.export import export
from tests.forked import in_child

Files = dict[str, bytes]
HIDDEN = {".out.incomplete", ".out.previous", ".out.journal", ".out.lock"}
"""What a killed run may leave beside its destination."""


def files_of(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


class Runs:
    """One command, run to `FOLDER/out`: fresh, over an earlier result, killed, and again."""

    def __init__(self, command: str, model: str, options: dict[str, Any]) -> None:
        self.command, self.model, self.options = command, model, options

    def new(self, out: Path) -> None:
        self._run(out, resume=False)

    def again(self, out: Path) -> None:
        self._run(out, resume=True)

    def earlier(self, out: Path) -> None:
        """Write what an earlier run left: the same model with other options."""
        other = {"samples": 2} if self.command == "calibrate" else {"format": "compressed-tensors"}
        self._run(out, resume=False, **other)

    def _run(self, out: Path, resume: bool, **changes: Any) -> None:
        options = {**self.options, **changes, "progress": False}
        if self.command == "calibrate":
            calibrate(self.model, out, resume=resume, **options)
        else:
            export(self.model, out, **options)


def finished_layers(folder: Path) -> int:
    return len(list((folder / ".out.journal").glob("layer-*.json")))


def state(folder: Path, old: Files, new: Files) -> str:
    """Say what a killed run left: nothing, resumable, finished; or what no run may leave."""
    strange = {path.name for path in folder.iterdir()} - HIDDEN - {"out"}
    if strange:
        return f"strange files: {sorted(strange)}"
    found = files_of(folder / "out")
    if found == new:
        return "finished"
    # Between the two renames of a commit the earlier result has another name; see StagedFolder.
    if (found or files_of(folder / ".out.previous")) != old:
        return f"neither the earlier result nor the new one: {sorted(found)}"
    return "resumable" if finished_layers(folder) else "nothing"


def trial(runs: Runs, folder: Path, moment: float, old: Files, new: Files) -> tuple[str, str]:
    """Kill a run and run it again; return what was left, and what is wrong, if anything."""
    code = in_child(lambda: runs.new(folder / "out"), kill_after=moment)
    if code not in (0, -signal.SIGKILL):
        return "failed", f"ended with {code}"
    left = state(folder, old, new)
    if left not in ("nothing", "resumable", "finished"):
        return "wrong", left
    if code == 0 and left != "finished":
        return left, "ended well without a result"
    if in_child(lambda: runs.again(folder / "out")) != 0:
        return left, "did not run again"
    if files_of(folder / "out") != new:
        return left, "other bytes"
    rest = sorted(path.name for path in folder.iterdir())
    return left, "" if rest == ["out"] else f"left {rest}"


def main(command: str, model: str, folder: str, seeds: str, options: str) -> None:
    torch.set_num_threads(1)  # a fork has no threads but its own, and would wait for the others
    runs, root = Runs(command, model, json.loads(options)), Path(folder)
    runs.new(root / "new" / "out")  # also imports what the children take
    runs.earlier(root / "old" / "out")
    began = time.monotonic()
    assert in_child(lambda: runs.new(root / "timed" / "out")) == 0
    seconds = time.monotonic() - began
    new, old = files_of(root / "new" / "out"), files_of(root / "old" / "out")
    counts: Counter[str] = Counter()
    wrong = {}
    for seed in json.loads(seeds):
        chance = random.Random(seed)
        place = root / str(seed)
        has_old = chance.random() < 0.5
        shutil.copytree(root / "old", place) if has_old else place.mkdir()
        moment = chance.random() * seconds
        left, message = trial(runs, place, moment, old if has_old else {}, new)
        counts[left] += 1
        if message:
            wrong[seed] = f"after {moment:.3f} of {seconds:.3f} s, {left}: {message}"
        shutil.rmtree(place)
    print(json.dumps({"counts": counts, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
