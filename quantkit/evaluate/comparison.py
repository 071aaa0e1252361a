"""All models over the same windows, in step, so that only a chunk of their logits ever exists.

Shows progress; takes no averages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.calibrate.progress import Phase
from quantkit.evaluate.models import LogitSource, OriginalModel, QuantizedModel, chunk_rows
from quantkit.evaluate.scores import TokenScores, compare
from quantkit.evaluate.texts import Texts
from quantkit.evaluate.windows import Cutting, Window

MAX_STEPS = 40
"""Progress reports of a run, at most."""


def score_texts(
    original: OriginalModel | None,
    quantized: Sequence[QuantizedModel],
    texts: Texts,
    cutting: Cutting,
    progress: bool,
) -> list[TokenScores]:
    """Run all models over all windows, in step; returns each one's scores, the original first."""
    models: list[LogitSource] = [*quantized] if original is None else [original, *quantized]
    parts: list[list[TokenScores]] = [[] for _ in models]
    windows = sum(cutting.num_windows(len(ids)) for ids in texts.ids)
    per_step = -(-windows // MAX_STEPS)
    done = 0
    with Phase("evaluate", -(-windows // per_step), quiet=not progress) as phase:
        for number, ids in enumerate(texts.ids):
            for window in cutting.windows(ids, number):
                for part, found in zip(parts, _score_window(models, window), strict=True):
                    part.append(found)
                done += 1
                if done % per_step == 0 or done == windows:
                    phase.advance(_so_far(parts[min(1, len(parts) - 1)]))
    return [TokenScores.join(part) for part in parts]


def _score_window(models: Sequence[LogitSource], window: Window) -> list[TokenScores]:
    rows = chunk_rows(models[0].vocab_size)
    streams = [model.logits(window, rows) for model in models]
    targets = torch.split(window.targets, rows)
    chunks: list[list[TokenScores]] = []
    for target, (first, *others) in zip(targets, zip(*streams, strict=True), strict=True):
        chunks.append(compare(first, others, target.to(first.device)))
    return [TokenScores.join(part) for part in zip(*chunks, strict=True)]


def _so_far(parts: Sequence[TokenScores]) -> str:
    """Return a running number for the progress line."""
    scores = TokenScores.join(parts)
    if scores.kl is not None:
        return f"mean KL {float(scores.kl.mean()):.4g}"
    return f"perplexity {float(scores.nll.mean().exp()):.3f}"
