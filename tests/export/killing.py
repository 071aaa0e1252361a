"""Kill an export at every point where it touches the disk, and look at what is left.

A program, because it forks: `python -m tests.export.killing CHECKPOINT FOLDER`. Exports CHECKPOINT
to modelopt's format over an earlier export in compressed-tensors' format, and prints how many
points there were, and what was in place after each: "old", "new", or a list of files.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from quantkit.export import export
from tests.calibrate.killing import Disk
from tests.forked import in_child

Files = dict[str, bytes]


def files_of(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def killed_at(point: int, checkpoint: Path, output: Path) -> bool:
    """Export in a child that is killed before its `point`-th deed; tell whether it was."""

    def work() -> None:
        Disk(point)
        export(checkpoint, output, format="modelopt", progress=False)

    code = in_child(work)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def main(checkpoint: Path, folder: Path) -> None:
    torch.set_num_threads(1)  # a fork has no threads but its own, and would wait for the others
    old, new, output = folder / "old" / "out", folder / "new" / "out", folder / "run" / "out"
    for path in (old, new, output):
        path.parent.mkdir(parents=True)
    export(checkpoint, old, progress=False)
    export(checkpoint, new, format="modelopt", progress=False)
    known = {"old": files_of(old), "new": files_of(new)}
    seen: list[Any] = []
    point = 0
    while True:
        export(checkpoint, output, progress=False)
        was_killed = killed_at(point, checkpoint, output)
        # Between the two renames of a commit the earlier result has another name; see StagedFolder.
        place = output if output.exists() else output.with_name(".out.previous")
        found = files_of(place)
        seen.append(next((name for name, files in known.items() if files == found), list(found)))
        if not was_killed:
            break
        point += 1
    left = sorted(path.name for path in output.parent.iterdir())
    print(json.dumps({"points": point, "seen": seen, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
