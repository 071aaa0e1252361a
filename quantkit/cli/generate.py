"""`quantkit generate`: continue a prompt, or answer it, on standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli import devices
from quantkit.cli.console import note, quiet_transformers, write
from quantkit.errors import GenerationError

if TYPE_CHECKING:
    from quantkit.runtime.model import Fp8Model
    from quantkit.runtime.params import SamplingParams
    from quantkit.runtime.stats import DraftStats, Stats


def generate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A quantized checkpoint.")],
    prompt: Annotated[
        str | None, typer.Option(help="The prompt; without it, standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt as a chat message.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens to write.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of total mass P.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below P times the likeliest one.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, make tokens seen before less likely.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Make sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before TEXT; may be repeated.")
    ] = None,
    draft: Annotated[
        str, typer.Option(metavar="none|suffix|auto|PATH", help="What drafts tokens ahead.")
    ] = "none",
    verification: Annotated[
        str,
        typer.Option(help="coupled: drafts change nothing; rejection, block: only the odds stay."),
    ] = "coupled",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Keep even roundings independent of drafts.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(metavar="auto|balanced|FILE.json", help=devices.HELP)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Report tokens and speed on standard error.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Continue a prompt, or answer it with --chat.

    What is not given is as the checkpoint's generation_config.json says.
    """
    from quantkit.runtime.params import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    text = _read_stdin() if prompt is None else prompt
    places = devices.read_device_map(device_map)
    # Loading torch takes seconds; what can be refused without it has been.
    from quantkit.load import load_fp8

    model = load_fp8(
        checkpoint,
        device=device,
        device_map=places,
        draft=draft,
        threads=threads,
        verification=verification,
        deterministic=deterministic,
    )
    quiet_transformers()
    ids = model.encode_chat([{"role": "user", "content": text}]) if chat else model.encode(text)
    if as_json:
        _print_json(model, text, ids, params)
    else:
        _print_stream(model, ids, params)
    if stats:
        note(_summary(model.stats))
        if draft == "auto":
            _note_missing_head(checkpoint)


def _note_missing_head(checkpoint: Path) -> None:
    """Say that `auto` had no trained drafter to draft with."""
    from quantkit.speculative.head_weights import FOLDER, is_head

    if not is_head(checkpoint / FOLDER):
        note(
            f"{checkpoint} has no trained drafter, so only what a text repeats is drafted; "
            f"'quantkit draft {checkpoint}' trains one"
        )


def _print_json(model: Fp8Model, prompt: str, ids: list[int], params: SamplingParams) -> None:
    completion = model.generate_ids([ids], params)[0]
    result = {
        "prompt": prompt,
        "text": completion.text,
        "ids": completion.ids,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.to_dict(),
    }
    write(json.dumps(result, ensure_ascii=False) + "\n")


def _print_stream(model: Fp8Model, ids: list[int], params: SamplingParams) -> None:
    for piece in model.stream(ids, params):
        write(piece)
    write("\n")


def _read_stdin() -> str:
    """Return the prompt on standard input, without the line end that echo adds."""
    if sys.stdin is None or sys.stdin.isatty():
        raise GenerationError("no prompt; give --prompt TEXT or pipe it to standard input")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise GenerationError(
            f"standard input is not UTF-8 text (byte {error.object[error.start]:#x} at offset "
            f"{error.start}); convert it, or give --prompt TEXT"
        ) from None
    return text.removesuffix("\n")


def _summary(stats: Stats) -> str:
    """Return the counters as one line for people."""
    parts = [f"prompt {stats.prompt_tokens} tokens"]
    if stats.prefill_tokens_per_second is not None:
        parts[-1] += f" ({stats.prefill_tokens_per_second:.1f} tokens/s)"
    parts.append(f"new {stats.new_tokens} tokens")
    if stats.tokens_per_second is not None:
        parts[-1] += f" ({stats.tokens_per_second:.1f} tokens/s)"
    if stats.time_to_first_token is not None:
        parts.append(f"first token after {stats.time_to_first_token:.3f} s")
    if stats.seed is not None:
        parts.append(f"seed {stats.seed}")
    if stats.drafts is not None:
        parts.append(_draft_summary(stats.drafts))
    return ", ".join(parts)


def _draft_summary(drafts: DraftStats) -> str:
    if drafts.draft_acceptance_rate is None:
        return "nothing drafted"
    return (
        f"drafted {drafts.num_draft_tokens} tokens, accepted {drafts.num_accepted_tokens} "
        f"({drafts.draft_acceptance_rate:.0%}), {drafts.mean_acceptance_length:.2f} tokens per "
        f"draft, about {drafts.speed_up:.2f} times plain decoding"
    )
