"""Questions that a chat model asks itself.

A model that was trained on conversations goes on from where a user's words would begin with such
words (Xu et al., "Magpie", 2024). So what a drafter head learns from is as varied as what its
target was made for, and no file of questions is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from quantkit.runtime.generation import Generation
from quantkit.runtime.model import Fp8Model
from quantkit.runtime.params import ResolvedParams
from quantkit.speculative.head_data import ending_ids

PROBES = ("What is it?", "Zebras run", "12 of them", "(see below)")
"""Messages whose beginnings have no token in common."""
TOGETHER = 64
"""Questions that are written in one batch."""
MOST_TOKENS = 64
"""A question is cut to so many."""


def own_questions(model: Fp8Model, seed: int) -> Iterator[list[int]]:
    """Yield conversations without end, each with one question of the model's own, as token ids.

    The tokenizer has a chat template.
    """
    start = question_start(model)
    while True:
        for question in _write(model, start, seed):
            yield model.encode_chat([{"role": "user", "content": question}])
        seed += 1


def question_start(model: Fp8Model) -> list[int]:
    """Return what the chat template puts in front of a user's first words, as token ids."""
    chats = [model.encode_chat([{"role": "user", "content": probe}]) for probe in PROBES]
    same = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*chats, strict=False))
    return [ids[0] for ids in same]


@torch.inference_mode()
def _write(model: Fp8Model, start: list[int], seed: int) -> list[str]:
    """Return a batch of questions; an empty one if nothing else came."""
    params = ResolvedParams(
        seed=seed,
        temperature=1.0,
        max_new_tokens=min(MOST_TOKENS, model.engine.max_context - len(start)),
        eos_token_ids=ending_ids(model),
    )
    completions = Generation(model.engine, [start] * TOGETHER, params).completions()
    texts = (model.tokenizer.decode(each.ids, skip_special_tokens=True) for each in completions)
    return [text.strip() for text in texts]
