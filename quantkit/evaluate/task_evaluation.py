"""Tasks put to a checkpoint and its original, one after the other: options in, a TaskResult out.

Owns the options and their checks; whatever can be refused is refused before a model is loaded.
The checkpoint runs in quantkit's runtime, the original in transformers through the harness's own
adapter, and either may be a served model instead.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from quantkit.errors import DataError, UnsupportedError
from quantkit.evaluate.evaluation import DTYPES, check_choices
from quantkit.evaluate.sides import CHAT, Options, Side, in_runtime, in_transformers, served
from quantkit.evaluate.task_result import TaskResult, TaskSetting, task_scores
from quantkit.evaluate.task_run import Run, quiet_harness, run_tasks
from quantkit.evaluate.tasks import Tasks, check_harness, load_tasks

logger = logging.getLogger("quantkit")

BATCH_SIZE = 8


def evaluate_tasks(
    checkpoint: str | Path,
    reference: str | Path | None = None,
    *,
    tasks: Sequence[str],
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    apply_chat_template: bool = False,
    batch_size: int = BATCH_SIZE,
    seed: int | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    reference_endpoint: str | None = None,
    reference_model: str | None = None,
    max_drop: float | None = None,
    activations: str = "emulate",
    kv: str | None = None,
    dtype: str = DTYPES[0],
    device: str = "auto",
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> TaskResult:
    """Run tasks of EleutherAI's lm-evaluation-harness on a checkpoint, and on the original.

    Args:
        checkpoint: folder that `calibrate` or `export` wrote; its tokenizer serves both models.
            With `endpoint` only its tokenizer and config are used; a Hub id will do, too.
        reference: the original: Hugging Face folder, Hub id or .gguf file.
        tasks: names of tasks, groups or tags of the harness, or of `include_path`.
        num_fewshot: examples before each question; default what the task says.
        limit: questions of each task, from the first on; default all.
        include_path: folder of task files (.yaml) of one's own, and of the data files they name. A
            task file may name Python code of that folder, which then runs.
        apply_chat_template: ask in the format of the tokenizer's chat template.
        batch_size: sequences that run together; for an endpoint, requests at a time.
        seed: of few-shot examples and sampling; default the harness's own.
        endpoint: address of an OpenAI-compatible server (http://host:8000/v1) that serves the
            checkpoint; one that ends in /chat/completions is asked in messages.
        model: the checkpoint's name there; default the only one served.
        reference_endpoint: likewise, for the original.
        reference_model: its name there.
        max_drop: most that a score may be worse than the original's, in the metric's own units.
        activations: "emulate" or "skip", see `evaluate`.
        kv: "none" or "fp8"; default what the checkpoint declares.
        dtype: what both models compute in besides.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads of torch, for the whole process.
        trust_remote_code: run Python code that the reference's folder carries.
        progress: show progress on stderr.

    Raises QuantKitError if anything that was asked for cannot be measured.
    """
    _check_counts(tasks, num_fewshot, limit, batch_size)
    _check_sides(reference, endpoint, model, reference_endpoint, reference_model, max_drop)
    check_choices(activations, kv, dtype)
    check_harness()
    addresses = [address.rstrip("/") for address in (endpoint, reference_endpoint) if address]
    chat = apply_chat_template or any(address.endswith(CHAT) for address in addresses)
    options = Options(
        checkpoint=Path(checkpoint),
        chat=chat,
        batch_size=batch_size,
        seed=seed,
        activations=activations,
        kv=kv,
        dtype=dtype,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    sides = [
        in_runtime(options)
        if endpoint is None
        else served("the quantized model", endpoint, model, options)
    ]
    if reference_endpoint is not None:
        sides.append(served("the original", reference_endpoint, reference_model, options))
    elif reference is not None:
        sides.append(in_transformers(reference, options))
    with quiet_harness():
        found = load_tasks(
            tasks, None if include_path is None else Path(include_path), num_fewshot, seed
        )
    _warn_of_fixed_examples(found, num_fewshot)
    runs, truncated = _run(sides, found, limit, chat, seed, progress)
    return TaskResult(
        TaskSetting(
            checkpoint=str(checkpoint),
            reference=None if reference is None else str(reference),
            tasks=list(tasks),
            limit=limit,
            chat_template=chat,
            quantized_by=sides[0].description,
            original_by=sides[1].description if len(sides) > 1 else None,
            truncated=truncated,
        ),
        task_scores(runs[0], runs[1] if len(runs) > 1 else None),
        _gated(found, runs[0]),
        max_drop,
    )


def _run(
    sides: Sequence[Side],
    tasks: Tasks,
    limit: int | None,
    chat: bool,
    seed: int | None,
    progress: bool,
) -> tuple[list[Run], int | None]:
    """Run one side after the other, each alone in memory; also returns how many were cut."""
    runs: list[Run] = []
    longest: int | None = None
    truncated: int | None = None
    for side in sides:
        started = time.monotonic()
        if progress:
            logger.info("%s: %s", side.label, side.description)
        with quiet_harness():
            lm = side.open(longest)
        runs.append(run_tasks(lm, side.label, tasks, limit, chat, seed))
        if progress:
            logger.info("%s: done in %.1f s", side.label, time.monotonic() - started)
        _warn_of_answers(lm, side)
        longest = getattr(lm, "longest", longest)
        truncated = getattr(lm, "truncated", truncated)
        del lm
        gc.collect()
    return runs, truncated


def _warn_of_answers(lm: object, side: Side) -> None:
    if truncated := getattr(lm, "truncated", 0):
        logger.warning(
            "%d prompts are longer than the model's context and were cut from the left", truncated
        )
    if empty := getattr(lm, "empty", 0):
        logger.warning("%s gave %d answers without text; they count as wrong", side.label, empty)


def _warn_of_fixed_examples(tasks: Tasks, num_fewshot: int | None) -> None:
    for name, task in tasks.tasks.items():
        if num_fewshot is not None and task.get_config("num_fewshot") != num_fewshot:
            logger.warning(
                "task %s fixes %s examples; --num-fewshot %d does not apply to it",
                name,
                task.get_config("num_fewshot"),
                num_fewshot,
            )


def _gated(tasks: Tasks, run: Run) -> frozenset[str]:
    """Return what a threshold looks at: the names asked for, or what stands behind them."""
    scored = {name for name, _, _ in run.outcomes}
    return frozenset(
        each
        for name, members in tasks.members.items()
        for each in ((name,) if name in scored else members)
    )


def _check_counts(
    tasks: Sequence[str], num_fewshot: int | None, limit: int | None, batch_size: int
) -> None:
    if not tasks or not all(tasks):
        raise DataError("--tasks names no task; give NAME or NAME,NAME")
    for option, value, least in (
        ("--num-fewshot", num_fewshot, 0),
        ("--limit", limit, 1),
        ("--batch-size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise DataError(f"{option} must be at least {least}, got {value}")


def _check_sides(
    reference: str | Path | None,
    endpoint: str | None,
    model: str | None,
    reference_endpoint: str | None,
    reference_model: str | None,
    max_drop: float | None,
) -> None:
    if model is not None and endpoint is None:
        raise UnsupportedError("--model names a served model; give --endpoint URL")
    if reference_model is not None and reference_endpoint is None:
        raise UnsupportedError("--reference-model names a served model; give --reference-endpoint")
    if reference is not None and reference_endpoint is not None:
        raise UnsupportedError("give --reference or --reference-endpoint, not both")
    if max_drop is not None and reference is None and reference_endpoint is None:
        raise UnsupportedError("--max-drop compares with the original; give --reference MODEL")
