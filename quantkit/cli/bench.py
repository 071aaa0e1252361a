"""`quantkit bench`: measure prefill and decode speed of a checkpoint through the public runtime."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.console import note, quiet_transformers, write
from quantkit.errors import GenerationError

if TYPE_CHECKING:
    from quantkit.runtime.model import Fp8Model
    from quantkit.runtime.stats import Stats


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the repeats for one batch size; None where the workload has no such part."""

    batch: int
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    time_to_first_token: float | None  # seconds until every sequence of the batch has one


def bench(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A quantized checkpoint.")],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode for each.")] = 128,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Batch sizes.")] = "1,8",
    repeats: Annotated[int, typer.Option(min=1, help="Runs to take the median of.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure prefill and decode speed: random prompts, greedy, no early end."""
    batches = _parse_batches(batch)
    import torch

    from quantkit.runtime.model import load_fp8

    model = load_fp8(checkpoint, device=device, threads=threads)
    quiet_transformers()
    _require_room(model, prompt_tokens + new_tokens)
    speeds = []
    for size in batches:
        note(f"batch {size}: {repeats} runs of {prompt_tokens} + {new_tokens} tokens")
        speeds.append(measure(model, size, prompt_tokens, new_tokens, repeats))
    setting = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repeats": repeats}
    if as_json:
        head = {"checkpoint": str(checkpoint), **setting, "threads": torch.get_num_threads()}
        write(json.dumps({**head, "results": [asdict(speed) for speed in speeds]}) + "\n")
    else:
        _print_table(speeds, f"{prompt_tokens} prompt tokens, {new_tokens} new tokens")


def measure(
    model: Fp8Model, batch: int, prompt_tokens: int, new_tokens: int, repeats: int
) -> Speed:
    """Run the workload `repeats` times after a warm-up and return the median speeds."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (batch, prompt_tokens)
    prompts = torch.randint(model.engine.vocab_size, shape, generator=generator).tolist()

    def run(limit: int) -> Stats:
        model.generate_ids(prompts, max_new_tokens=limit, temperature=0, ignore_eos=True)
        return model.stats

    run(min(new_tokens, 2))
    runs = [run(new_tokens) for _ in range(repeats)]
    return Speed(
        batch,
        _median([stats.prefill_tokens_per_second for stats in runs]),
        _median([stats.tokens_per_second for stats in runs]),
        _median([stats.time_to_first_token for stats in runs]),
    )


def _median(values: list[float | None]) -> float | None:
    """Return the median, or None as soon as one run measured nothing."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _parse_batches(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise typer.BadParameter(
            f"expected positive integers separated by commas, got {text!r}", param_hint="--batch"
        )
    return [int(word) for word in words]


def _require_room(model: Fp8Model, tokens: int) -> None:
    if tokens > model.engine.max_context:
        raise GenerationError(
            f"--prompt-tokens and --new-tokens add up to {tokens}, the model's context is "
            f"{model.engine.max_context}; lower one of them"
        )


def _print_table(speeds: list[Speed], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("batch", "prefill tokens/s", "decode tokens/s", "first token (s)"):
        table.add_column(heading, justify="right")
    for speed in speeds:
        table.add_row(
            str(speed.batch),
            _cell(speed.prefill_tokens_per_second, 1),
            _cell(speed.decode_tokens_per_second, 1),
            _cell(speed.time_to_first_token, 3),
        )
    Console().print(table)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
