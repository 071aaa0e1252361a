"""Speed of a whole model: prefill, decode, time to the first token, by batch and prompt length.

Anything that runs a Workload can be measured; several are measured in turn, so that what else the
machine does falls on all alike. Medians over the repeats.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from quantkit.runtime.model import Fp8Model


@dataclass(frozen=True, slots=True)
class Workload:
    """Random prompts of one length, decoded greedily without an early end."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return the same prompts every time."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.prompt_tokens)
        prompts: list[list[int]] = torch.randint(vocab_size, shape, generator=generator).tolist()
        return prompts


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one run: until every sequence had its first token, and for all that followed."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians of one runner and workload; None where the workload has no such part."""

    runner: str
    batch: int
    prompt_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None
    time_to_first_token: float  # seconds until every sequence of the batch has one


class Runner(Protocol):
    """A model that can be measured."""

    name: str

    def run(self, workload: Workload) -> Times:
        """Run the workload once."""
        ...


class QuantkitRunner:
    """A checkpoint in quantkit's own runtime."""

    name = "quantkit"

    def __init__(self, model: Fp8Model) -> None:
        self._model = model

    def run(self, workload: Workload) -> Times:
        """Run the workload once."""
        prompts = workload.prompts(self._model.engine.vocab_size)
        self._model.generate_ids(
            prompts, max_new_tokens=workload.new_tokens, temperature=0, ignore_eos=True
        )
        stats = self._model.stats
        return Times(stats.prefill_seconds, stats.decode_seconds)


def measure(runners: Sequence[Runner], workload: Workload, repeats: int) -> list[Speed]:
    """Run the workload on every runner in turn, `repeats` times after a warm-up."""
    warm_up = Workload(workload.batch, workload.prompt_tokens, min(workload.new_tokens, 2))
    for runner in runners:
        runner.run(warm_up)
    runs: Mapping[str, list[Times]] = {runner.name: [] for runner in runners}
    for _ in range(repeats):
        for runner in runners:
            runs[runner.name].append(runner.run(workload))
    return [_speed(name, workload, times) for name, times in runs.items()]


def peak_memory_bytes() -> int:
    """Return the most memory this process has had, mapped files included."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def _speed(name: str, workload: Workload, times: Sequence[Times]) -> Speed:
    prompt, batch = workload.prompt_tokens, workload.batch
    decoded = batch * (workload.new_tokens - 1)
    return Speed(
        runner=name,
        batch=batch,
        prompt_tokens=prompt,
        prefill_tokens_per_second=median(batch * prompt / run.prefill for run in times),
        decode_tokens_per_second=median(decoded / run.decode for run in times) if decoded else None,
        time_to_first_token=median(run.prefill for run in times),
    )
