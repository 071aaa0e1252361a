"""The harness's tasks, found by name and set up alike for every model that they are put to.

A folder of task files of one's own comes first, and alone if it has all that is asked for: the
harness's own list takes many seconds to read. Needs `lm_eval`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import DataError, QuantKitError, UnsupportedError, nearest

HARNESS_SEED = 1234
"""The harness's own default for drawing few-shot examples."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """What was asked for. `members` maps each name to the tasks behind it, itself if it is one."""

    members: Mapping[str, tuple[str, ...]]
    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """The names asked for."""
        return list(self.members)


def check_harness() -> None:
    """Raise UnsupportedError where the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UnsupportedError('--tasks needs lm_eval; pip install "quantkit[eval]"')


def load_tasks(
    names: Sequence[str],
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    seed: int | None = None,
) -> Tasks:
    """Load tasks with their data; raises DataError, naming the task, if one cannot be had.

    Data files named in a task file are looked up in `include_path`; what is no local file is read
    from the Hub.
    """
    if include_path is not None:
        if not include_path.is_dir():
            raise DataError(f"--include-path {include_path} is not a folder")
        include_path = include_path.resolve()
    manager = _manager(names, include_path)
    # Task files name their data relative to where the harness runs.
    place = nullcontext() if include_path is None else chdir(include_path)
    members: dict[str, tuple[str, ...]] = {}
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    with place:
        for name in names:
            found = _load(manager, name)
            members[name] = tuple(found["tasks"])
            tasks |= found["tasks"]
            groups |= found.get("groups", {})
    for task in tasks.values():
        _set_up(task, num_fewshot, seed)
    return Tasks(members, tasks, groups)


def _manager(names: Sequence[str], include_path: Path | None) -> Any:
    from lm_eval.tasks import TaskManager

    local: list[str] = []
    if include_path is not None:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        local = manager.all_tasks
        if all(name in local and _is_complete(manager, name) for name in names):
            return manager
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for name in names:
        if name not in manager.task_index:
            known = f"; {include_path} has {', '.join(local) or 'no tasks'}" if include_path else ""
            raise DataError(
                f"--tasks: no task is called {name!r}{nearest(name, manager.all_tasks)}{known}; "
                "'lm-eval ls tasks' lists the harness's, --include-path adds your own"
            )
    return manager


def _is_complete(manager: Any, name: str) -> bool:
    """Return whether all that a group of a folder lists is in that folder."""
    members = (manager.task_index[name].cfg or {}).get("task")
    if not isinstance(members, list):
        return True
    return all(isinstance(each, str) and each in manager.task_index for each in members)


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = manager.load([name])
    except QuantKitError:
        raise
    except Exception as error:  # whatever a task file, its code or its data may raise
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"task {name!r} cannot be loaded: {type(error).__name__}: {reason}") from (
            error
        )
    return found


def _set_up(task: Any, num_fewshot: int | None, seed: int | None) -> None:
    """Do what the harness does before a run: a task that fixes zero examples keeps that."""
    fixed = task.get_config("num_fewshot")
    if num_fewshot is not None and fixed != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif fixed is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=HARNESS_SEED if seed is None else seed)
