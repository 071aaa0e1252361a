"""Speed of a decoder on a GPU by context and batch, without a checkpoint.

Prefill is run as it is. Decoding is timed around one context length, with a cache of random keys
and values, as whole steps of the runtime: planning, replay, head, greedy choice on the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quantkit.bench.gpu_timing import random_codes
from quantkit.bench.random_weights import RandomWeights, random_decoder
from quantkit.numerics import E4M3
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.kv_cache import PagedCache
from quantkit.runtime.shapes import ModelShape

KINDS: dict[str, tuple[bool, bool]] = {
    "bf16": (False, False),
    "fp8": (True, False),
    "fp8 + kv8": (True, True),
}
"""Name -> (quantized linears, quantized keys and values)."""


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """One kind of model at one size of work; seconds."""

    kind: str
    prompt_tokens: int
    new_tokens: int
    batch: int
    prefill: float  # all prompts
    step: float  # one decode step halfway through the new tokens

    @property
    def total(self) -> float:
        """Prefill and all new tokens, the steps taken to be alike."""
        return self.prefill + self.step * (self.new_tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences by the total time."""
        return self.batch * self.new_tokens / self.total


def measure_kind(
    shape: ModelShape,
    kind: str,
    work: Sequence[tuple[int, int]],
    batches: Sequence[int],
    device: torch.device,
    steps: int = 16,
) -> Iterator[ModelSpeed]:
    """Build a model of random weights and measure every (prompt, new tokens) at every batch.

    The prompts of a batch are prefilled one after another, as generation does; one is measured.
    """
    quantized, quantized_kv = KINDS[kind]
    weights = RandomWeights(device, torch.bfloat16, quantized)
    decoder = random_decoder(shape, weights, quantized_kv)
    for prompt, new in work:
        prefill = prefill_seconds(decoder, prompt)
        for batch in batches:
            step = step_seconds(decoder, batch, prompt + new // 2, steps)
            yield ModelSpeed(kind, prompt, new, batch, batch * prefill, step)


@torch.inference_mode()
def prefill_seconds(decoder: Decoder, prompt: int) -> float:
    """Return the time of one prompt, the second of two runs."""
    ids = torch.randint(decoder.vocab_size, (prompt,), device=decoder.device)
    for _ in range(2):
        cache = decoder.new_cache(1, prompt)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decoder.forward(ids, [0], [prompt], cache).argmax(dim=-1).tolist()
        seconds = time.perf_counter() - begin
    return seconds


@torch.inference_mode()
def step_seconds(decoder: Decoder, batch: int, context: int, steps: int) -> float:
    """Return the mean time of a decode step near `context` tokens."""
    cache = decoder.new_cache(batch, context + steps + 8)
    _fill(cache, batch, context)
    sequences, ones = list(range(batch)), [1] * batch
    ids = [1] * batch
    for number in range(steps + 3):
        if number == 3:  # one step as it is, one recorded, one replayed
            begin = time.perf_counter()
        tokens = torch.tensor(ids)
        ids = decoder.forward(tokens, sequences, ones, cache).argmax(dim=-1).tolist()
    return (time.perf_counter() - begin) / steps


def _fill(cache: PagedCache, batch: int, context: int) -> None:
    """Pretend that `context` random tokens are stored for every sequence."""
    for stored in cache.tensors():
        if stored.dim() == 4:
            whole = stored.view(-1, *stored.shape[2:])
            piece = random_codes((min(4096, len(whole)), *whole.shape[1:]), stored.device)
            values = piece if stored.dtype == E4M3.dtype else piece.to(stored.dtype) / 100
            for at in range(0, len(whole), len(values)):
                part = whole[at : at + len(values)]
                part.view(torch.uint8).copy_(values[: len(part)].view(torch.uint8))
    cache.commit(cache.plan(list(range(batch)), [context] * batch))
