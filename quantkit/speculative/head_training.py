"""Training of a drafter head on texts of its target.

The loss of a drafting step is the cross-entropy of the head's law q with the target's law p, and
towards the end more and more TV(p, q). The total variation distance is 1 - P(a draft of q is
accepted), the very thing that counts, but it teaches little while the two laws hardly overlap.
Tokens that the head cannot draft have q = 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.errors import DataError
from quantkit.speculative.head_data import Text, frequent_tokens
from quantkit.speculative.head_loss import Goal, draft_loss
from quantkit.speculative.head_model import HeadModel
from quantkit.speculative.head_optimizer import HeadOptimizer
from quantkit.speculative.head_weights import DraftHead, HeadShape, TargetEnds

HELD_OUT = 20
"""One text of so many is kept for the report."""
WARM_UP = 0.03
"""Share of the training in which the learning rate rises."""
TURN = (0.6, 0.8)
"""Shares of the training between which the loss turns to the total variation."""
EVALUATED_STEPS = 4
"""Drafting steps that the report is about."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a head is trained."""

    draft_vocab: int = 8192  # tokens it can draft
    steps: int = 2  # drafting steps that are unrolled
    step_weight: float = 0.8  # of the loss of each step, relative to the one before
    window: int = 128  # tokens of a text in one batch
    batch: int = 8  # texts in one batch
    learning_rate: float = 2e-3  # of vectors; that of matrices is in head_optimizer
    total_variation: float = 0.9  # of the loss in the end; the rest is cross-entropy
    updates: int | None = None  # at most; None: as many as the time allows
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of texts: what the target knew before and after each token, and the tokens.

    Shapes: known, state and embedded [batch, window, hidden_size]; p, the target's law of the next
    token, float32 [batch * window, draft vocabulary].
    """

    known: Tensor
    state: Tensor
    embedded: Tensor
    p: Tensor


class Trainer:
    """Trains one head; the target's ends are frozen."""

    def __init__(
        self, shape: HeadShape, ends: TargetEnds, texts: Sequence[Text], training: Training
    ) -> None:
        longest = max(training.steps, EVALUATED_STEPS)
        usable = [text for text in texts if len(text) > longest + 1]
        if len(usable) < 2:
            raise DataError(
                f"{len(usable)} texts are long enough to train a drafter; give more or longer data"
            )
        self.model = HeadModel(shape, training.seed)
        self._training = training
        self._shape = shape
        self._embedding = ends.embedding
        self.token_ids = frequent_tokens(usable, shape.vocab_size, training.draft_vocab)
        self._whole_output = ends.output
        self._output = ends.output[self.token_ids].float()
        self._rule = ends.logits
        self._held_out = usable[::HELD_OUT]
        self._texts = [text for n, text in enumerate(usable) if n % HELD_OUT]
        self._generator = torch.Generator().manual_seed(training.seed)
        # Matrices of 16 bits multiply several times as fast on CPUs that have them.
        self._half = ends.embedding.dtype == torch.bfloat16

    def run(
        self, seconds: float, progress: Callable[[float, float], None] = lambda share, loss: None
    ) -> DraftHead:
        """Train for a time or a number of updates; `progress` is told the share done, and the loss.

        Raises DataError if the loss stops being finite.
        """
        training = self._training
        optimizer = HeadOptimizer(self.model.parameters(), training.learning_rate)
        begin, update, share = time.perf_counter(), 0, 0.0
        while share < 1:
            loss = self._loss(self._sample(), share)
            if not math.isfinite(float(loss.detach())):
                raise DataError(f"the loss is {float(loss.detach())} after {update} updates")
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step(_schedule(share))
            update += 1
            share = (time.perf_counter() - begin) / max(seconds, 1e-9)
            if training.updates is not None:
                share = update / training.updates
            progress(min(share, 1.0), float(loss.detach()))
        report = {"updates": update, **self.evaluate()}
        return DraftHead(self._shape, self.model.weights(), self.token_ids, report)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return, per drafting step, how often tokens of held-out texts would be accepted.

        Only those that the target wrote are counted, and if all drafts before were right.
        """
        sampled, greedy = ([0.0] * EVALUATED_STEPS for _ in range(2))
        counts = [0] * EVALUATED_STEPS
        for text in self._held_out:
            batch = self._batch([(text, 0)], len(text))
            states = text.states.to(self._whole_output.dtype)
            likeliest = F.linear(states, self._whole_output).argmax(-1)  # with any LogitsRule
            for step, logits in enumerate(self._draft_logits(batch, EVALUATED_STEPS)):
                written = slice(max(step, text.prompt - 1), None)
                overlap = torch.minimum(batch.p, logits.float().softmax(-1)).sum(-1)[written]
                agreeing = (self.token_ids[logits.argmax(-1)] == likeliest)[written]
                counts[step] += len(overlap)
                sampled[step] += float(overlap.sum())
                greedy[step] += float(agreeing.sum())
        shares = [
            [hits / max(1, n) for hits, n in zip(kind, counts, strict=True)]
            for kind in (sampled, greedy)
        ]
        return {"sampled_acceptance": shares[0], "greedy_acceptance": shares[1]}

    def _loss(self, batch: Batch, share: float) -> Tensor:
        """Return the weighted mean over drafting steps, at a share of the training."""
        training, total = self._training, torch.zeros(())
        distance = training.total_variation * _risen(share, *TURN)
        positions = torch.arange(batch.state.shape[1]).repeat(len(batch.state))
        for step, logits in enumerate(self._draft_logits(batch, training.steps)):
            counted = (positions >= step).float()
            counted /= counted.sum()
            goal = Goal(batch.p, distance * counted, (1 - distance) * counted)
            total = total + training.step_weight**step * draft_loss(logits, goal)
        return total

    def _draft_logits(self, batch: Batch, steps: int) -> list[Tensor]:
        """Return the head's logits of each drafting step, [batch * window, draft vocabulary]."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
            guesses = self.model.unroll(batch.known, batch.embedded, steps)
            return [self._rule(F.linear(guess, self._output)).flatten(0, 1) for guess in guesses]

    def _sample(self) -> Batch:
        """Return windows of random texts at random places."""
        training = self._training
        picks = torch.randint(len(self._texts), (training.batch,), generator=self._generator)
        texts = [self._texts[pick] for pick in picks.tolist()]
        length = min(training.window, *(len(text) for text in texts))
        places = torch.rand(training.batch, generator=self._generator)
        starts = [
            int(place * (len(text) - length + 1))
            for text, place in zip(texts, places.tolist(), strict=True)
        ]
        return self._batch(list(zip(texts, starts, strict=True)), length)

    def _batch(self, windows: Sequence[tuple[Text, int]], length: int) -> Batch:
        before, after, tokens, sums = [], [], [], []
        for text, start in windows:
            padded = F.pad(
                text.states[max(0, start - 1) : start + length], (0, 0, int(start == 0), 0)
            )
            before.append(padded[:-1])
            after.append(padded[1:])
            tokens.append(text.tokens[start : start + length + 1])
            sums.append(text.log_sums[start : start + length])
        ids, state = torch.stack(tokens), torch.stack(after).float()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self._half):
            target = self._rule(F.linear(state, self._output)).flatten(0, 1)
        return Batch(
            known=torch.stack(before).float(),
            state=state,
            embedded=F.embedding(ids[:, :-1], self._embedding).float(),
            p=target.float().sub_(torch.cat(sums)[:, None]).exp_(),
        )


def _schedule(share: float) -> float:
    """Return the learning rate at a share of the training: a short rise, then a cosine."""
    if share < WARM_UP:
        return share / WARM_UP + 0.01
    return 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP))) + 0.01


def _risen(share: float, begin: float, end: float) -> float:
    """Return how far a rise from 0 to 1 between two shares of the training is."""
    return min(max((share - begin) / (end - begin), 0.0), 1.0)
