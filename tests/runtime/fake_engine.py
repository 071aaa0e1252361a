"""An Engine without a model: logits are looked up by what the cache says precedes them.

Every row depends on the whole prefix, so tokens that reach the wrong sequence, the wrong position
or a released slot change the output. `calls` records (sequences, num_new_tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class FakeCache:
    def __init__(self, num_sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.released: list[int] = []

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def truncate(self, sequence: int, length: int) -> None:
        del self.tokens[sequence][length:]

    def release(self, sequence: int) -> None:
        assert sequence not in self.released
        self.tokens[sequence] = []
        self.released.append(sequence)


class FakeEngine:
    """`row(prefix)` gives the logits [vocab] after a prefix; by default pseudo-random ones."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        vocab_size: int = 32,
        max_context: int = 4096,
        row: Callable[[Sequence[int]], Tensor] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.caches: list[FakeCache] = []
        self.calls: list[tuple[list[int], list[int]]] = []
        generator = torch.Generator().manual_seed(7)
        self._table = torch.randn(1009, vocab_size, generator=generator) * 2
        self._row = row or self._hashed_row

    def _hashed_row(self, prefix: Sequence[int]) -> Tensor:
        key = 0
        for token in prefix:
            key = (key * 31 + token + 1) % 1009
        return self._table[key]

    def new_cache(self, num_sequences: int, max_tokens: int) -> FakeCache:
        self.caches.append(FakeCache(num_sequences))
        return self.caches[-1]

    def forward(
        self,
        input_ids: Tensor,
        sequences: Sequence[int],
        num_new_tokens: Sequence[int],
        cache: FakeCache,
        last_only: bool = True,
    ) -> Tensor:
        assert input_ids.dtype == torch.int64
        assert input_ids.shape == (sum(num_new_tokens),)
        assert len(set(sequences)) == len(sequences) == len(num_new_tokens)
        self.calls.append((list(sequences), list(num_new_tokens)))
        rows = []
        pieces = input_ids.split(list(num_new_tokens))
        for sequence, piece in zip(sequences, pieces, strict=True):
            assert sequence not in cache.released
            for token in piece.tolist():
                assert 0 <= token < self.vocab_size
                cache.tokens[sequence].append(token)
                rows.append(self._row(cache.tokens[sequence]))
            assert len(cache.tokens[sequence]) <= self.max_context
            if last_only:
                del rows[len(rows) - len(piece) : -1]
        return torch.stack(rows)

    def logits(self, input_ids: Tensor) -> Tensor:
        rows = [[self._row(ids[: n + 1]) for n in range(len(ids))] for ids in input_ids.tolist()]
        return torch.stack([torch.stack(row) for row in rows])
