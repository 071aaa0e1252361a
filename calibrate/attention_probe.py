"""A small sample of attention as a layer computes it, which can be computed again on other K and V.

Queries, mask, sliding window, soft cap and sinks are taken from the architecture's own call of
transformers' attention interface, and the same function is called again, so nothing about any of
them is assumed here. Where an architecture does not use the interface, the sample is its keys and
values alone. What to do with a sample is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor

SAMPLE_TOKENS = 512
"""Tokens kept of a layer, in all; a sample is full with this many."""
SEQUENCE_TOKENS = 256
"""Tokens kept of one sequence: its first ones, where activations are largest."""
MAX_SEQUENCES = 8
MAX_SCORES = 2**22
"""Attention scores of one sequence, over all heads; many heads are seen on fewer tokens."""
MAX_REPLAY_ERROR = 0.05
"""Relative error beyond which a repeated call is not the layer's own attention."""


_WholeCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""An attention function and its arguments; the first are module, query, keys, values."""


@dataclass(frozen=True, slots=True)
class AttentionSample:
    """The attention of one sequence.

    keys, values: float32 [kv_heads, tokens, head_dim]. attend: computes the output, float32
    [heads, tokens, head_dim], from other keys and values of these shapes; None if unknown.
    """

    keys: Tensor
    values: Tensor
    attend: Callable[[Tensor, Tensor], Tensor] | None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an attention function, cut down to the first tokens of one sequence."""

    function: Callable[..., Any]
    module: Any
    query: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return the output, in the dtype of the keys. Shapes: as `AttentionSample.attend`."""
        dtype = keys.dtype
        args = [_as_dtype(arg, dtype) for arg in self.args]
        kwargs = {name: _as_dtype(value, dtype) for name, value in self.kwargs.items()}
        query = self.query.to(dtype)
        result = self.function(self.module, query, keys[None], values[None], *args, **kwargs)
        output: Tensor = result[0]  # with the weights, or None, as the second
        return output[0].transpose(0, 1)


class AttentionProbe:
    """Takes samples of one layer's attention while it runs, until it has enough.

    `install` and `remove` bracket the runs of the layer; in between, every attention function that
    a module looks up is watched. `offer` announces what the layer caches; `flush` ends a run.
    Which tokens are taken does not depend on how sequences are batched.
    """

    def __init__(self) -> None:
        self.samples: list[AttentionSample] = []
        self._num_tokens = 0
        self._offered: tuple[Tensor, Tensor] | None = None
        self._lookup: Any = None

    @property
    def full(self) -> bool:
        """Whether there are enough tokens to choose scales by."""
        return self._num_tokens >= SAMPLE_TOKENS

    @property
    def _done(self) -> bool:
        return self.full or len(self.samples) >= MAX_SEQUENCES

    def install(self) -> None:
        """Watch the attention functions of transformers, for all models of the process."""
        from transformers.modeling_utils import AttentionInterface

        if self._lookup is not None:
            return
        original = self._lookup = AttentionInterface.get_interface

        def get_interface(interface: Any, *args: Any, **kwargs: Any) -> Any:
            return self._watch(original(interface, *args, **kwargs))

        AttentionInterface.get_interface = get_interface

    def remove(self) -> None:
        """Undo `install`, and take what is still on offer without its queries."""
        from transformers.modeling_utils import AttentionInterface

        if self._lookup is not None:
            AttentionInterface.get_interface = self._lookup
            self._lookup = None
        self.flush()

    def offer(self, keys: Tensor, values: Tensor) -> None:
        """Announce what is cached. Shapes: [batch, kv_heads, tokens, head_dim]."""
        self.flush()
        if not self._done:
            self._offered = (keys, values)

    def flush(self) -> None:
        """Take the keys and values on offer, if no attention function was called with them."""
        if self._offered is not None:
            keys, values = self._offered
            self._offered = None
            for row in range(keys.shape[0]):
                self._take(keys, values, row, None, None)

    def _watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def attention(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if len(args) >= 4 and self._is_offered(args[2], args[3]):
                self._offered = None
                for row in range(args[2].shape[0]):
                    call = (function, args, kwargs)
                    self._take(args[2], args[3], row, call, result[0])
            return result

        return attention

    def _is_offered(self, keys: Any, values: Any) -> bool:
        """Whether attention sees exactly what was cached; some models repeat heads before it."""
        if self._offered is None:
            return False
        return all(
            isinstance(seen, Tensor)
            and (seen is cached or (seen.shape == cached.shape and torch.equal(seen, cached)))
            for seen, cached in zip((keys, values), self._offered, strict=True)
        )

    def _take(
        self,
        keys: Tensor,
        values: Tensor,
        row: int,
        call: _WholeCall | None,
        output: Tensor | None,
    ) -> None:
        """Keep the first tokens of one sequence of a batch."""
        if self._done:
            return
        heads = keys.shape[1] if call is None else call[1][1].shape[1]
        most = min(SEQUENCE_TOKENS, isqrt(MAX_SCORES // heads), SAMPLE_TOKENS - self._num_tokens)
        tokens = min(keys.shape[2], most)
        keys, values = (x[row, :, :tokens].detach().clone() for x in (keys, values))
        cut = None
        if call is not None and output is not None:
            cut = _replayable(_cut(call, row, tokens), keys, values, output[row, :tokens])
        self._num_tokens += tokens
        self.samples.append(AttentionSample(keys.float(), values.float(), cut))


def _cut(call: _WholeCall, row: int, tokens: int) -> _Call:
    """Return a call of the attention function on the first `tokens` of sequence `row`."""
    function, (module, query, keys, _, *rest), kwargs = call
    batch, _, num_queries, _ = query.shape

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if batch > 1 and value.shape[0] == batch:
            value = value[row : row + 1]
        if value.ndim == 4 and value.shape[2:] == (num_queries, keys.shape[2]):
            value = value[..., :tokens, :tokens]  # a mask, or a bias by position
        return value

    return _Call(
        function,
        module,
        query[row : row + 1, :, :tokens].detach().clone(),
        tuple(cut(value) for value in rest),
        {name: cut(value) for name, value in kwargs.items()},
    )


def _replayable(call: _Call, keys: Tensor, values: Tensor, output: Tensor) -> _Call | None:
    """Return the call if it gives what the layer itself got, else None.

    It does not where an argument that could not be cut refers to the whole sequence, or where
    early tokens see later ones. Shapes: output [tokens, heads, head_dim].
    """
    try:
        replayed = call(keys, values).transpose(0, 1)
    except (RuntimeError, ValueError, TypeError, LookupError):
        return None
    if replayed.shape != output.shape or replayed.shape[1] % keys.shape[0]:
        return None
    error = torch.linalg.vector_norm(replayed.float() - output.float())
    close = error <= MAX_REPLAY_ERROR * torch.linalg.vector_norm(output.float())
    return call if bool(close) else None


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Convert masks that are added to scores; attention functions want them in one dtype."""
    if isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point():
        return value.to(dtype)
    return value
