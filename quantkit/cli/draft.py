"""`quantkit draft`: train a drafter head for a checkpoint, on text that it writes itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.console import note, quiet_transformers, write

if TYPE_CHECKING:
    from quantkit.calibrate.progress import Phase


def draft(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A quantized checkpoint.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="OUT", help="Where to write it. [default: CKPT/draft]"
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="self, builtin, FILE.txt, FILE.jsonl or hf:NAME[:CONFIG][:SPLIT]: what to write "
            "from; may be repeated. [default: self, which is built-in tasks]",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.01, metavar="M", help="Time for all of it.")
    ] = 30.0,
    seed: Annotated[int, typer.Option(help="Of prompts, sampling, weights and batches.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the path.")
    ] = False,
) -> None:
    """Train a drafter head that `--draft auto` uses: one layer that runs ahead of the model."""
    from quantkit.calibrate.progress import Phase
    from quantkit.load import load_fp8
    from quantkit.speculative.head_weights import FOLDER, check_head_destination
    from quantkit.speculative.training import train_drafter

    folder = checkpoint / FOLDER if output is None else output
    check_head_destination(folder)
    texts = [text for source in data or [] for text in _texts(source)]
    model = load_fp8(checkpoint, device=device, threads=threads)
    quiet_transformers()
    with Phase("drafter, % of time", 100) as phase:
        clock = _Clock(phase, 60 * minutes)
        head = train_drafter(model, texts, minutes, seed, report=clock.tell)
    path = head.save(folder)
    if as_json:
        write(json.dumps({"path": str(path), **head.report}) + "\n")
    else:
        note(_summary(head.report["sampled_acceptance"], head.report["greedy_acceptance"]))
        write(f"{path}\n")


class _Clock:
    """Shows what is reported at the share of the time that is over."""

    def __init__(self, phase: Phase, seconds: float) -> None:
        self._phase = phase
        self._seconds = seconds
        self._begin = time.monotonic()
        self._done = 0

    def tell(self, line: str) -> None:
        """Show a line, if a hundredth of the time is over since the last one."""
        done = min(int(100 * (time.monotonic() - self._begin) / self._seconds), 100)
        if done > self._done:
            self._done = done
            self._phase.reach(done, line)


def _texts(source: str) -> list[str]:
    """Return the texts of a data source; `self` has none beside the built-in tasks."""
    from quantkit.calibrate.texts import SELF, RunningText, open_texts

    if source == SELF:
        return []
    opened = open_texts(source)
    if isinstance(opened, RunningText):
        return list(opened.pieces)
    texts = []
    for row in opened.rows:
        if isinstance(row.get("text"), str):
            texts.append(row["text"])
        else:
            texts += [str(message.get("content", "")) for message in row.get("messages") or []]
    return [text for text in texts if text]


def _summary(sampled: list[float], greedy: list[float]) -> str:
    """Return what held-out text says about the drafts, as a line for people."""
    length, survival = 1.0, 1.0
    for rate in greedy:
        survival *= rate
        length += survival
    first = f"first tokens accepted {greedy[0]:.0%} (greedy), {sampled[0]:.0%} (temperature 1)"
    return f"{first}; about {length:.2f} tokens per draft of {len(greedy)}, greedy"
