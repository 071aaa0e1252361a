"""Kill a calibration run at every point where it touches the disk, and resume it.

A program, because it forks: `python -m tests.calibrate.killing DATA FOLDER VARIANTS`, where
VARIANTS is {name: [model, points, options]} in JSON. Points are a step, to try every so many-th,
or a list of trials, each a list of points: the first kill, the one during the resumed run, and so
on; below 0 counts from the end. Prints one JSON object, with a result for each name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from quantkit import tensor_file
from quantkit.calibrate import calibrate, joint_run, journal, setup
from quantkit.calibrate.setup import HIDDEN_SHARE
from tests.forked import in_child

WATCHED = ("fsync", "rename", "replace", "unlink", "mkdir", "link")


class Disk:
    """Counts what a process does to the disk, and kills it before its `kill_at`-th deed."""

    def __init__(self, kill_at: int | None) -> None:
        self.count = 0
        self.kill_at = kill_at
        for name in WATCHED:
            setattr(os, name, self._counting(getattr(os, name)))
        chunks = tensor_file.TensorEntry.chunks

        def counted(entry: tensor_file.TensorEntry) -> Iterator[Any]:
            for chunk in chunks(entry):
                yield chunk[: len(chunk) // 2]
                if entry.name.endswith(("down_proj.weight", "0.hidden")):
                    self.touch()  # in the middle of a write
                yield chunk[len(chunk) // 2 :]

        tensor_file.TensorEntry.chunks = counted  # type: ignore[method-assign]

    def touch(self) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.touch()
            return function(*args, **kwargs)

        return call


def watch_layers(log: Path) -> None:
    """Note in a file which layers run, and which are finished for good."""
    run, add = joint_run.calibrate_layer, journal.Journal.add

    def note(word: str, number: int) -> None:
        with log.open("a") as file:
            file.write(f"{word} {number}\n")

    def running(model: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        note("run", number)
        return run(model, number, *args, **kwargs)

    def adding(self: Any, *args: Any) -> None:
        number = len(self.layers)
        add(self, *args)
        note("done", number)

    joint_run.calibrate_layer = running
    journal.Journal.add = adding  # type: ignore[method-assign]


class Trial:
    """One destination: killed, resumed, compared."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.out, self.log = folder / "out", folder.with_suffix(".log")
        self.log.touch()

    def run(self, kill_at: int | None, resume: bool) -> tuple[int, int]:
        """Return (exit code, number of deeds)."""
        counter = self.folder.with_suffix(".count")

        def work() -> None:
            watch_layers(self.log)
            disk = Disk(kill_at)
            calibrate(output=self.out, resume=resume, progress=False, **self.options)
            counter.write_text(str(disk.count))

        code = in_child(work)
        return code, int(counter.read_text()) if code == 0 else 0

    def layers(self, word: str) -> list[int]:
        words = [line.split() for line in self.log.read_text().splitlines()]
        return [int(number) for found, number in words if found == word]

    def contents(self, folder: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir()} if folder.exists() else {}


def check(trial: Trial, kills: list[int], old: dict[str, bytes], new: dict[str, bytes]) -> str:
    """Kill, resume and so on; return what is wrong, or nothing."""
    for turn, kill_at in enumerate(kills):
        before = trial.layers("done")
        code, _ = trial.run(kill_at, resume=turn > 0)
        if code == 0:  # a resumed run that ended before the point
            break
        if code != -signal.SIGKILL:
            return f"ended with {code}"
        found = trial.contents(trial.out)
        aside = trial.contents(trial.folder / ".out.previous")
        if found not in (old, new) and not (not found and aside == old):
            return f"the destination holds {sorted(found)}"
        if set(before) & set(trial.layers("run")[len(before) :]):
            return "ran a finished layer"
    done, ran = trial.layers("done"), len(trial.layers("run"))
    code, _ = trial.run(None, resume=True)
    if code != 0:
        return f"resuming ended with {code}"
    if set(done) & set(trial.layers("run")[ran:]):
        return f"{done} were finished, and {trial.layers('run')[ran:]} ran"
    if trial.contents(trial.out) != new:
        return "other bytes"
    left = sorted(path.name for path in trial.folder.iterdir())
    return "" if left == ["out"] else f"left {left}"


def kill_all(given: dict[str, Any], root: Path, points: Any) -> dict[str, Any]:
    """Try the points of one variant; return the counts and what is wrong."""
    # Once here, so that no child has to import and compile what it takes.
    calibrate(output=root / "warm", progress=False, **given)
    old, new = Trial(root / "old", {**given, "samples": 2}), Trial(root / "new", given)
    for trial in (old, new):
        assert trial.run(None, resume=False)[0] == 0
    shutil.copytree(old.folder, root / "again")
    code, count = Trial(root / "again", given).run(None, resume=False)
    assert code == 0
    kills = points if isinstance(points, list) else [[k] for k in range(0, count, points)]
    kills = [[count + k if k < 0 else k for k in turns] for turns in kills]
    wrong: dict[str, str] = {}
    for number, turns in enumerate(kills):
        shutil.copytree(old.folder, root / f"t{number}")
        trial = Trial(root / f"t{number}", given)
        message = check(trial, turns, old.contents(old.out), new.contents(new.out))
        if message:
            wrong[str(turns)] = message
        else:
            shutil.rmtree(trial.folder)
    layers = len(new.layers("run"))
    return {"points": count, "tried": len(kills), "layers": layers, "wrong": wrong}


def main(data: str, folder: str, variants: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, (model, points, options) in json.loads(variants).items():
        root = Path(folder) / name
        root.mkdir(parents=True)
        setup.HIDDEN_SHARE = options.pop("hidden_share", HIDDEN_SHARE)
        results[name] = kill_all({"model": model, "data": [data], **options}, root, points)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
