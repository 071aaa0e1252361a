"""The head drafter: one decoder layer that goes on from the target's last hidden state.

Entry j reads what the target knew before token j, and token j: `input @ [norm(h[j-1]), norm(e)]`.
One layer with a cache of its own turns it into a guess of h[j], from which the target's output head
reads token j + 1. Where h[j-1] is not known yet, because token j is itself drafted, the guess takes
its place. Once tokens are committed their entries are made anew, from what the target knew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.decoder_ops import StepLayers, StepLinear
from quantkit.errors import CheckpointError
from quantkit.head_ops import StepHead, head_step
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import PREFILL_CHUNK
from quantkit.runtime.kv_cache import CacheLayout, PagedCache
from quantkit.runtime.request import Request
from quantkit.runtime.rotation import Rotation
from quantkit.runtime.sending import send_numbers
from quantkit.runtime.verification import Draft
from quantkit.speculative.drafter import DraftSession, Judge
from quantkit.speculative.drawing import Draw
from quantkit.speculative.head_weights import (
    DraftHead,
    TargetEnds,
    quantize_rows,
    rotation_frequencies,
)
from quantkit.speculative.hidden_tap import HiddenTap, open_engine
from quantkit.speculative.model_drafter import Attempt
from quantkit.speculative.vocabulary import DraftVocabulary

SOURCE = "head"
ACTIVATION = "silu"


class HeadRunner:
    """The layer, ready to run on the target's device. All activations are in the target's dtype."""

    def __init__(self, head: DraftHead, ends: TargetEnds, target: Engine) -> None:
        shape = self.shape = head.shape
        device, self.dtype = target.device, target.dtype
        norms = {
            name: tensor.to(device, self.dtype)
            for name, tensor in head.weights.items()
            if tensor.dim() == 1
        }
        linears = {
            name: _linear(tensor, device)
            for name, tensor in head.weights.items()
            if tensor.dim() == 2
        }
        output = _linear(ends.output[head.token_ids].float(), device)
        layer = StepLayers()
        before, after = norms["input_norm"], norms["post_norm"]
        inner = (linears["gate_up"], linears["down"])
        layer.add(before, None, None, after, linears["qkv"], linears["out"], *inner, None, 1)
        ends_of = (norms["hidden_norm"], norms["token_norm"], norms["norm"])
        self._head = StepHead.of(ends_of, linears["input"], layer, output)
        self._rule = ends.logits
        self._embedding = ends.embedding.to(device, self.dtype)
        self.vocabulary = DraftVocabulary(head.token_ids.to(device), shape.vocab_size)
        self._rotation = Rotation(rotation_frequencies(shape).to(device), 1.0)
        self._layout = CacheLayout(1, shape.num_kv_heads, shape.head_dim, self.dtype, device)

    def new_cache(self, num_sequences: int) -> PagedCache:
        """Return an empty cache."""
        return PagedCache(self._layout, num_sequences, PREFILL_CHUNK)

    def run(
        self,
        known: Tensor,
        token_ids: Tensor,
        sequences: Sequence[int],
        counts: Sequence[int],
        cache: PagedCache,
    ) -> tuple[Tensor, Tensor]:
        """Append entries; return what is guessed after the last of each sequence, and its logits.

        Shapes: known [num_entries, hidden_size], what the target knew before each token; token_ids
        int64 [num_entries] -> [num_sequences, hidden_size], float32 [num_sequences, columns of
        `vocabulary`].
        """
        shape = self.shape
        step = cache.plan(sequences, counts).to(known.device)
        hidden, products = head_step(
            known,
            token_ids,
            self._embedding,
            self._head,
            cache.tensors(),
            self._rotation.tables(max(step.new_lengths), self.dtype),
            step.positions,
            step.slots,
            step.block_tables,
            step.lengths,
            step.query_starts,
            shape.num_heads,
            shape.num_kv_heads,
            shape.norm_eps,
            shape.head_dim**-0.5,
            ACTIVATION,
        )
        cache.commit(step)
        return hidden, self._rule(products)


class HeadSession:
    """Drafting for one generation; implements DraftSession."""

    def __init__(self, runner: HeadRunner, target: Engine, num_sequences: int, draw: Draw) -> None:
        self.passes = 0
        self.engine = HiddenTap(target, num_sequences)
        self._runner = runner
        self._draw = draw
        self._cache = runner.new_cache(num_sequences)
        self._entries = [0] * num_sequences  # made from what the target knew

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], judge: Judge
    ) -> list[Draft]:
        """Draft while it pays, all sequences in one pass; see DraftSession."""
        attempts = [
            Attempt(request, limit) for request, limit in zip(requests, limits, strict=True)
        ]
        active = [attempts[row] for row in self._going_on(attempts, judge)]
        guesses = self._catch_up(active) if active else None
        while guesses is not None:
            hidden, logits = guesses
            self._extend(active, logits)
            rows = self._going_on(active, judge)
            if not rows:
                break
            if len(rows) < len(active):
                hidden, active = hidden[rows], [active[row] for row in rows]
            guesses = self._pass(hidden, [attempt.tokens[-1:] for attempt in active], active)
        return [attempt.draft() for attempt in attempts]

    def finish(self, request: Request) -> None:
        """Free the cache of a request."""
        self._cache.release(request.sequence)
        self._entries[request.sequence] = 0
        self.engine.drop(request.sequence)

    def _going_on(self, attempts: Sequence[Attempt], judge: Judge) -> list[int]:
        """Return which attempts are to get another token."""
        count = len(attempts)
        return [
            row for row, attempt in enumerate(attempts) if attempt.goes_on(SOURCE, judge, count)
        ]

    def _extend(self, attempts: Sequence[Attempt], logits: Tensor) -> None:
        """Draw a token for each attempt; logits [len(attempts), columns]."""
        drawn = self._draw(
            logits,
            [attempt.request for attempt in attempts],
            [attempt.tokens for attempt in attempts],
            self._runner.vocabulary,
        )
        for row, attempt in enumerate(attempts):
            law = None if drawn.laws is None else drawn.laws[row]
            attempt.add(SOURCE, drawn.tokens[row], drawn.confidences[row], law)

    def _catch_up(self, attempts: Sequence[Attempt]) -> tuple[Tensor, Tensor]:
        """Make the entries of all committed tokens; return what `_pass` does."""
        known, tokens = [], []
        for attempt in attempts:
            request, sequence = attempt.request, attempt.request.sequence
            entries = self._entries[sequence]
            self._cache.truncate(sequence, entries)
            states = self.engine.take(sequence, request.length - 1)
            if entries == 0:  # nothing was known before the first token
                states = F.pad(states, (0, 0, 1, 0))
            known.append(states)
            tokens.append(request.tokens_from(entries))
            self._entries[sequence] = request.length
        return self._pass(torch.cat(known), tokens, attempts)

    def _pass(
        self, known: Tensor, tokens: Sequence[list[int]], attempts: Sequence[Attempt]
    ) -> tuple[Tensor, Tensor]:
        """Append entries for several tokens a sequence; return hidden states and logits of each."""
        self.passes += 1
        ids = send_numbers((token for row in tokens for token in row), known.device)
        sequences = [attempt.request.sequence for attempt in attempts]
        return self._runner.run(known, ids, sequences, [len(row) for row in tokens], self._cache)


class HeadDrafter:
    """Drafts with a trained head; implements Drafter.

    Raises CheckpointError if the head is for a model of other sizes, and UnsupportedError if the
    target does not give its hidden states.
    """

    def __init__(self, head: DraftHead, ends: TargetEnds, target: Engine) -> None:
        open_engine(target)
        vocab, hidden = ends.output.shape
        if (head.shape.vocab_size, head.shape.hidden_size) != (vocab, hidden):
            raise CheckpointError(
                f"the drafter head is for {head.shape.vocab_size} tokens and hidden size "
                f"{head.shape.hidden_size}, the target has {vocab} and {hidden}; train one for it "
                "with 'quantkit draft'"
            )
        self._runner = HeadRunner(head, ends, target)

    def session(self, target: Engine, num_sequences: int, draw: Draw) -> DraftSession:
        """Return a session that watches the target's hidden states."""
        return HeadSession(self._runner, target, num_sequences, draw)

    def forget(self) -> None:
        """Do nothing: a head keeps no texts."""


def _linear(weight: Tensor, device: torch.device) -> StepLinear:
    codes, scale = quantize_rows(weight)
    return StepLinear(codes.to(device), scale.to(device), None, weight.shape[1])
