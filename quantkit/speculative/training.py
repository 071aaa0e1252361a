"""`train_drafter`: from a loaded model to a drafter head for it. What `quantkit draft` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from quantkit.checkpoint import open_checkpoint
from quantkit.runtime.model import Fp8Model
from quantkit.runtime.shapes import model_shape, parse_config
from quantkit.speculative.head_data import Text, Writing, ending_ids, write_texts
from quantkit.speculative.head_prompts import head_prompts
from quantkit.speculative.head_training import Trainer, Training
from quantkit.speculative.head_weights import DraftHead, HeadShape, TargetEnds
from quantkit.speculative.hidden_tap import open_engine

WRITING_SHARE = 0.4
"""Of the time, at most; the rest is training."""

Report = Callable[[str], None]


def train_drafter(
    model: Fp8Model,
    texts: Sequence[str] = (),
    minutes: float = 30.0,
    seed: int = 0,
    training: Training | None = None,
    writing: Writing | None = None,
    report: Report = lambda line: None,
) -> DraftHead:
    """Let the model write for a while, and train a drafter head on that.

    Args:
        model: The target, from `load_fp8`.
        texts: Excerpts of these are given to go on from, beside built-in tasks.
        minutes: Time for writing and training together.
        seed: Of prompts, sampling, initial weights and batches. How much is done in the time given
            still depends on the machine, unless `training.updates` and `writing` limit it.
        training: How to train; the default is Training().
        writing: How much to write; the default is Writing().
        report: Is given a line now and then about how far it is.

    Raises UnsupportedError if the model shows no hidden states, DataError if it writes too little.
    """
    shape = _head_shape(model)
    seconds, begin = 60 * minutes, time.perf_counter()
    prompts = head_prompts(model, texts, seed)
    written = _write(model, prompts, replace(writing or Writing(), seed=seed), seconds, report)
    ends = TargetEnds.read(open_checkpoint(model.path))
    trainer = Trainer(shape, ends, written, replace(training or Training(), seed=seed))
    left = max(seconds - (time.perf_counter() - begin), 0.0)
    head = trainer.run(left, _Now(report).training)
    return replace(head, report={"tokens": sum(map(len, written)), **head.report})


def _write(
    model: Fp8Model,
    prompts: Iterator[list[int]],
    writing: Writing,
    seconds: float,
    report: Report,
) -> list[Text]:
    return write_texts(
        model.engine,
        prompts,
        ending_ids(model),
        writing,
        WRITING_SHARE * seconds,
        lambda tokens: report(f"written {tokens} of {writing.most_tokens} tokens"),
    )


def _head_shape(model: Fp8Model) -> HeadShape:
    """Return a head of the size of one of the target's layers."""
    open_engine(model.engine)
    target = model_shape(parse_config(open_checkpoint(model.path).config))
    return HeadShape(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        norm_eps=target.norm_eps,
    )


class _Now:
    """Reports every hundredth of the training, with the mean loss since the last time."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._losses: list[float] = []
        self._reported = 0

    def training(self, share: float, loss: float) -> None:
        self._losses.append(loss)
        if int(100 * share) > self._reported:
            self._reported = int(100 * share)
            mean = sum(self._losses) / len(self._losses)
            self._report(f"trained {share:.0%}, loss {mean:.3f}")
            self._losses.clear()
