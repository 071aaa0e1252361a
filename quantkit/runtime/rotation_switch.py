"""LongRoPE: a sequence that outgrows the model's first length is turned otherwise, all of it.

The rule, which is that of transformers' `generate` for Phi-3: logits that follow the n-th token of
a sequence come from keys that all took the short factors if n is at most `limit`, and the long ones
if it is more. What the cache holds of a sequence that crosses `limit`, either way, was computed
with the other factors, in all layers; it is computed again from the sequence's tokens, once a
crossing. (vLLM avoids that by taking the long factors for every sequence as soon as the server's
max_model_len exceeds `limit`.) A sequence's first tokens are one pass with the factors of its
length, as in transformers, so only the logits after its last token follow the rule there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quantkit.runtime.kv_cache import PagedCache

Append = Callable[[Tensor, Sequence[int], Sequence[int], PagedCache], Tensor]
"""(token ids, sequences, new tokens of each, cache) -> [num_tokens, hidden_size]."""


@dataclass(slots=True)
class Stored:
    """What a cache holds of a sequence: its first tokens, and whether keys took the long factors.

    What was rolled back may still be listed.
    """

    tokens: list[int] = field(default_factory=list)
    is_long: bool = False


class RotationSwitch:
    """Splits and repeats the passes of a decoder so that the rule above holds.

    `append` does a pass, each sequence turned by its length after it.
    """

    def __init__(self, append: Append, limit: int) -> None:
        self._append = append
        self._limit = limit
        self._stored: WeakKeyDictionary[PagedCache, defaultdict[int, Stored]] = WeakKeyDictionary()

    def append(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        cache: PagedCache,
    ) -> Tensor:
        """Append tokens to the cache; arguments and result as the decoder's `hidden`."""
        parts = torch.split(input_ids, list(num_new_tokens))
        short, long = {}, {}
        for sequence, ids in zip(sequences, parts, strict=True):
            count = self._before(cache.lengths[sequence], len(ids))
            short[sequence], long[sequence] = ids[:count], ids[count:]
        done = [self._pass(some, cache) for some in (short, long)]
        rows = [part[sequence] for sequence in sequences for part in done if sequence in part]
        return torch.cat(rows)

    def _before(self, length: int, new: int) -> int:
        """Return how many of the new tokens of a sequence come before it changes."""
        if length == 0 or length + new <= self._limit:
            return new
        return max(0, self._limit - length)

    def _pass(self, batch: dict[int, Tensor], cache: PagedCache) -> dict[int, Tensor]:
        """Append the tokens of some sequences; return their hidden states. Empty ones are left."""
        batch = {sequence: ids for sequence, ids in batch.items() if len(ids)}
        if not batch:
            return {}
        again = [self._again(sequence, ids, cache) for sequence, ids in batch.items()]
        ids = [torch.cat([old, new]) for old, new in zip(again, batch.values(), strict=True)]
        counts = [len(part) for part in ids]
        hidden = self._append(torch.cat(ids), list(batch), counts, cache)
        return {
            sequence: rows[len(old) :].clone()  # the next pass may write where this one did
            for sequence, old, rows in zip(batch, again, torch.split(hidden, counts), strict=True)
        }

    def _again(self, sequence: int, ids: Tensor, cache: PagedCache) -> Tensor:
        """Note the new tokens; return those before them that must be computed again, forgotten."""
        length, total = cache.lengths[sequence], cache.lengths[sequence] + len(ids)
        stored = self._stored.setdefault(cache, defaultdict(Stored))[sequence]
        changes = length > 0 and stored.is_long != (total > self._limit)
        stored.is_long = total > self._limit
        del stored.tokens[length:]
        old = torch.tensor(stored.tokens if changes else [], dtype=ids.dtype, device=ids.device)
        room = self._limit - length
        if room > 0:  # no more can ever be asked for
            stored.tokens += ids[:room].tolist()
        if changes:
            cache.truncate(sequence, 0)
        return old
