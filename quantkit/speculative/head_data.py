"""What a drafter head learns from: texts that the target wrote, and what it knew at each token."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation
from quantkit.runtime.model import Fp8Model
from quantkit.runtime.params import ResolvedParams
from quantkit.speculative.hidden_tap import HiddenTap

TEMPERATURES = (0.0, 0.7, 1.0)
"""Texts are written at each in turn: a head has to serve them all."""
LOGIT_ROWS = 256
"""Rows of logits in memory at a time."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text, and what the target knew after each of its tokens but the last.

    The first `prompt` tokens are not the target's own.

    Shapes: tokens int64 [n + 1]; states [n, hidden_size]; log_sums float32 [n], the logarithm of
    the sum of the exponentials of the logits.
    """

    tokens: Tensor
    states: Tensor
    log_sums: Tensor
    prompt: int = 0

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True, slots=True)
class Writing:
    """How much to let the target write."""

    new_tokens: int = 192  # of a text, at most
    most_tokens: int = 400_000  # of all texts; each keeps about 2 bytes for every hidden unit
    batch: int = 64  # texts at a time
    seed: int = 0


def ending_ids(model: Fp8Model) -> frozenset[int]:
    """Return the tokens that end a text of the model."""
    ids = model.generation_config.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(token_id for token_id in listed if token_id is not None)


def write_texts(
    target: Engine,
    prompts: Iterator[list[int]],
    ending_ids: frozenset[int],
    writing: Writing,
    seconds: float,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Text]:
    """Let the target continue prompts until there is enough text or the time is over.

    `progress` is told the number of tokens so far. At least one batch is written.
    """
    texts: list[Text] = []
    begin, total = time.perf_counter(), 0
    for number in itertools.count():
        batch = list(itertools.islice(prompts, writing.batch))
        if not batch:
            break
        params = ResolvedParams(
            seed=writing.seed + number,
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            max_new_tokens=writing.new_tokens,
            eos_token_ids=ending_ids,
        )
        texts += _write(target, batch, params)
        total = sum(map(len, texts))
        progress(total)
        if total >= writing.most_tokens or time.perf_counter() - begin > seconds:
            break
    return texts


@torch.inference_mode()
def _write(target: Engine, prompts: Sequence[list[int]], params: ResolvedParams) -> list[Text]:
    """Write one batch, and keep what the target knew on the way."""
    tap = HiddenTap(target, len(prompts))
    completions = Generation(tap, prompts, params).completions()
    texts = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = [*prompt, *completion.ids]
        if len(tokens) < 2:
            continue
        states = tap.take(number, len(tokens) - 1)
        sums = [tap.head(part).logsumexp(-1) for part in torch.split(states, LOGIT_ROWS)]
        texts.append(Text(torch.tensor(tokens), states.cpu(), torch.cat(sums).cpu(), len(prompt)))
    return texts


def frequent_tokens(texts: Sequence[Text], vocab_size: int, count: int) -> Tensor:
    """Return the `count` most frequent token ids, ascending, filled up with the lowest ones.

    Low ids are the bytes and early merges of a tokenizer. Shapes: int64 [min(count, vocab_size)].
    """
    counts = Counter(itertools.chain.from_iterable(text.tokens.tolist() for text in texts))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    others = (token for token in range(vocab_size) if token not in counts)
    return torch.tensor(sorted(itertools.islice(itertools.chain(ranked, others), count)))
