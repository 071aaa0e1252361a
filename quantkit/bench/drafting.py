"""What drafting brings: the same prompts with and without it, in turn, on one loaded model.

Real prompts, because random ones say nothing about drafts. Only decoding is timed. Whatever the
drafter remembers of earlier outputs is forgotten before each run; what it has learned about costs
and acceptance is kept, as in a process that has been serving for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from quantkit.bench.prompts import Kind, Prompt
from quantkit.runtime.drafting import Speculator
from quantkit.runtime.model import Fp8Model
from quantkit.runtime.request import Completion

SEED = 1


@dataclass(frozen=True, slots=True)
class DraftSpeed:
    """One prompt, or a batch of one kind; speeds are medians, the speed-up one of paired runs."""

    prompt: str
    kind: Kind
    batch: int
    temperature: float
    new_tokens: int  # of all sequences
    plain_tokens_per_second: float
    draft_tokens_per_second: float
    speed_up: float
    identical: int  # sequences that are the same, token for token, as without drafts
    drafts: dict[str, Any]  # DraftStats of the last run


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that run as one batch."""

    name: str
    kind: Kind
    prompts: tuple[Prompt, ...]


def groups(batch: int, prompts: Sequence[Prompt]) -> list[Group]:
    """Return each prompt by itself, or for each kind a batch that takes its prompts in turn."""
    if batch == 1:
        return [Group(prompt.name, prompt.kind, (prompt,)) for prompt in prompts]
    made = []
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        some = [prompt for prompt in prompts if prompt.kind == kind]
        made.append(Group(kind, kind, tuple(some[n % len(some)] for n in range(batch))))
    return made


def measure_drafting(
    model: Fp8Model, group: Group, temperature: float, new_tokens: int, repeats: int
) -> DraftSpeed | None:
    """Run a batch with and without drafts in turn; None if there was nothing to decode.

    The model has a speculator. Raises CheckpointError if it has no tokenizer.
    """
    assert model.speculator is not None
    ids = [_encode(model, prompt) for prompt in group.prompts]
    options = {"max_new_tokens": new_tokens, "temperature": temperature, "seed": SEED}
    speculator = model.speculator
    plain_speeds, draft_speeds = [], []
    for number in range(repeats + 1):
        plain, plain_speed = _run(model, None, ids, options)
        drafted, draft_speed = _run(model, speculator, ids, options)
        if plain_speed is None or draft_speed is None:
            return None
        if number:  # the first round warms up
            plain_speeds.append(plain_speed)
            draft_speeds.append(draft_speed)
    same = [a.ids == b.ids for a, b in zip(plain, drafted, strict=True)]
    stats = model.stats
    return DraftSpeed(
        prompt=group.name,
        kind=group.kind,
        batch=len(ids),
        temperature=temperature,
        new_tokens=stats.new_tokens,
        plain_tokens_per_second=median(plain_speeds),
        draft_tokens_per_second=median(draft_speeds),
        speed_up=median(b / a for a, b in zip(plain_speeds, draft_speeds, strict=True)),
        identical=sum(same),
        drafts=stats.drafts.to_dict() if stats.drafts else {},
    )


def summarize(speeds: Sequence[DraftSpeed]) -> Iterator[dict[str, Any]]:
    """Yield the median and the worst speed-up of each kind, batch size and temperature."""
    keys = dict.fromkeys((speed.kind, speed.batch, speed.temperature) for speed in speeds)
    for kind, batch, temperature in keys:
        ratios = [
            speed.speed_up
            for speed in speeds
            if (speed.kind, speed.batch, speed.temperature) == (kind, batch, temperature)
        ]
        yield {
            "kind": kind,
            "batch": batch,
            "temperature": temperature,
            "speed_up": median(ratios),
            "worst_speed_up": min(ratios),
        }


def _run(
    model: Fp8Model,
    speculator: Speculator | None,
    prompts: Sequence[Sequence[int]],
    options: dict[str, Any],
) -> tuple[list[Completion], float | None]:
    """Return the completions and the decoded tokens per second."""
    kept, model.speculator = model.speculator, speculator
    if speculator is not None:
        speculator.forget()
    try:
        completions = model.generate_ids(prompts, **options)
    finally:
        model.speculator = kept
    return completions, model.stats.tokens_per_second


def _encode(model: Fp8Model, prompt: Prompt) -> list[int]:
    if model.tokenizer.chat_template:
        return model.encode_chat([{"role": "user", "content": prompt.text}])
    return model.encode(prompt.text)
