"""Run a model one decoder layer at a time, without tracing it.

Every layer is replaced once by a recorder while the model's own forward runs on each batch. That
yields the hidden states that enter the first layer and the arguments that the model gives to each
layer (masks, position embeddings), whatever the architecture. From then on only layers run.

Batches hold sequences of equal length, so there is no padding and no mask to interpret; linear
modules multiply one sequence at a time, so what a layer computes for a sequence does not depend on
its neighbours, to the last bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.calibrate.batches import Batch, Call, own_blocks
from quantkit.calibrate.kv_scales import KvObserver, observing_cache
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.ranks import ALONE, BLOCK_SEQUENCES, Ranks
from quantkit.calibrate.skeleton import Skeleton
from quantkit.errors import UnsupportedError

FEW_TOKENS = 16


class Watcher(Protocol):
    """Sees what runs, with hooks of its own, and is told of which sequences it is."""

    def begin(self, first: int) -> None:
        """Learn that the sequences from number `first` on come next."""

    def end_block(self, ranks: Ranks) -> None:
        """Sum up what was seen of this round, in all processes."""


class EndOfLayersError(Exception):
    """Raised where the rest of the model, or of a layer, need not run."""


class _Recorder(nn.Module):
    """Stands in for a decoder layer: records the call, passes on `output` or the hidden states."""

    def __init__(
        self,
        layer: nn.Module,
        log: list[tuple[Tensor, Call]],
        is_last: bool,
        output_size: int | None,
        output: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._log = log
        self._is_last = is_last
        self._output_size = output_size
        self._output = output
        object.__setattr__(self, "_layer", layer)  # not a submodule: its weights stay put

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Models read attributes of their layers (the attention type) to choose a mask.
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, args, kwargs = _take_hidden(args, kwargs)
        self._log.append((hidden, Call(args, kwargs)))
        if self._is_last:
            raise EndOfLayersError
        passed_on = hidden if self._output is None else self._output
        if self._output_size is None:
            return passed_on
        return (passed_on,) + (None,) * (self._output_size - 1)


class LayerwiseModel:
    """Batches of token ids, moved through the decoder layers of a skeleton one layer at a time.

    `ranks` are the processes that do so together, each with batches of its own.
    """

    def __init__(self, skeleton: Skeleton, ranks: Ranks = ALONE) -> None:
        self.skeleton = skeleton
        self.ranks = ranks
        parameters = inspect.signature(skeleton.decoder.forward).parameters
        # transformers is renaming the argument.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._shared: dict[tuple[Any, ...], list[Tensor]] = {}
        self._few: Batch | None = None
        self._output_size: int | None = None  # of a layer's tuple; None for a bare tensor

    @torch.no_grad()
    def prepare(self, batches: Sequence[Tensor]) -> list[Batch]:
        """Return the batches at the door of layer 0.

        Shapes: each batch [sequences, tokens] int64. Loads the embeddings for it and frees them.
        """
        with self._embeddings(batches[0]):
            return [self._record(ids, self._output_size) for ids in batches]

    @torch.no_grad()
    def start(
        self,
        batches: Sequence[Tensor],
        folder: Path | None = None,
        begins_at: int = 0,
        holds: bool = True,
    ) -> Moving:
        """As `prepare`, with what is this process's of the batches; see `Moving`."""
        num_blocks = -(-sum(len(ids) for ids in batches) // BLOCK_SEQUENCES)
        rounds = self.ranks.num_rounds(num_blocks)
        moving = Moving(rounds, len(batches), self.ranks, folder, begins_at, holds)
        with self._embeddings(batches[0]):
            for block in own_blocks(batches, self.ranks):
                recorded = [(place, self._record(place.ids, self._output_size)) for place in block]
                moving.append(
                    [
                        replace(batch, first=place.first, tokens_before=place.tokens_before)
                        for place, batch in recorded
                    ]
                )
        return moving

    @contextmanager
    def _embeddings(self, first: Tensor) -> Iterator[None]:
        """Load what comes before the layers; learn from the first batch what layers return."""
        skeleton = self.skeleton
        skeleton.load(skeleton.layer_names[0])
        with skeleton.visit(""):
            self._output_size = self._probe(first[:1, :2])
            self._few = self._record(first[:1, :FEW_TOKENS], self._output_size)
            yield

    def output_of_few(self, number: int, batch: Batch) -> Tensor:
        """Return layer `number`'s output for a few tokens of a batch: a cheap test of a change."""
        if self._few is None:
            raise ValueError("no batch was prepared")
        few = self._few.hidden.shape[1]
        return self.output(number, self._few, batch.hidden[:1, :few])

    @torch.no_grad()
    def run(
        self, number: int, batches: Sequence[Batch], observer: KvObserver | None = None
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Run layer `number` on each batch, yielding (batch, output hidden states)."""
        for batch in batches:
            yield batch, self.output(number, batch, batch.hidden, observer)

    def watch(
        self,
        number: int,
        rounds: Iterable[Sequence[Batch]],
        watchers: Sequence[Watcher] = (),
    ) -> Iterator[tuple[Batch, Tensor]]:
        """As `run`, on blocks of batches, in all processes as many; watchers see what runs."""
        for block in rounds:
            for batch in block:
                for watcher in watchers:
                    watcher.begin(batch.first)
                yield from self.run(number, [batch])
            for watcher in watchers:
                watcher.end_block(self.ranks)

    def output(
        self, number: int, batch: Batch, hidden: Tensor, observer: KvObserver | None = None
    ) -> Tensor:
        """Return what layer `number` makes of `hidden`, with the arguments of `batch`.

        Shapes: [sequences, tokens, hidden_size] in and out. Gradients flow where they are enabled.
        `observer` sees what is cached.
        """
        with self.by_sequence(number, hidden.shape[:2]):
            return self.forward(number, batch, hidden, observer)

    def forward(
        self, number: int, batch: Batch, hidden: Tensor, observer: KvObserver | None = None
    ) -> Tensor:
        """As `output`, within `by_sequence`."""
        call = batch.calls[number]
        batch.cache.observer = observer
        try:
            output = self.skeleton.layers[number](hidden, *call.args, **call.kwargs)
        finally:
            batch.cache.observer = None
            batch.cache.forget()  # or the next run would continue this one
        return output if isinstance(output, Tensor) else output[0]

    @contextmanager
    def by_sequence(self, number: int, shape: torch.Size) -> Iterator[None]:
        """Let every linear module of a layer multiply one sequence at a time.

        A matmul may sum in another order for another number of rows, and a model with massive
        activations amplifies that: scales would depend on the batch size. `shape` is the batch's
        (sequences, tokens). Experts that gather tokens of all sequences are not covered.
        """
        modules = self.skeleton.layers[number].modules()
        linears = [module for module in modules if type(module) is nn.Linear]
        for module in linears:
            module.forward = partial(_linear_by_sequence, module, shape)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module in linears:
                del module.forward

    def logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the model's logits for the last layer's output; embeddings and head are loaded.

        Shapes: ids [sequences, tokens], hidden [sequences, tokens, hidden_size] -> [..., vocab].
        """
        with self._recorders(None, self._output_size, hidden):
            device_ids = ids.to(self.skeleton.device)
            logits: Tensor = self.skeleton.model(input_ids=device_ids, use_cache=False).logits
        return logits

    @torch.no_grad()
    def head_inputs(
        self, rounds: Iterable[Sequence[Batch]]
    ) -> Iterator[list[tuple[Batch, Tensor]]]:
        """Yield what the output head reads of the batches of each block, past the last layer.

        Shapes: [sequences, tokens, hidden_size] each. Embeddings and head are loaded for it, and
        the head does not run.
        """
        found: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found.append(args[0])
            raise EndOfLayersError

        with self.skeleton.visit(""):
            handle = self.skeleton.model.get_output_embeddings().register_forward_pre_hook(stop)
            try:
                for block in rounds:
                    for batch in block:
                        ids = torch.zeros(batch.hidden.shape[:2], dtype=torch.int64)
                        with suppress(EndOfLayersError):
                            self.logits(ids, batch.hidden)
                    yield list(zip(block, found, strict=True))
                    found.clear()
            finally:
                handle.remove()

    @contextmanager
    def _recorders(
        self, stop_after: int | None, output_size: int | None, output: Tensor | None = None
    ) -> Iterator[list[tuple[Tensor, Call]]]:
        """Put a recorder in the place of every layer for a while; yield what they log."""
        layers, log = self.skeleton.layers, list[tuple[Tensor, Call]]()
        originals = list(layers)
        for number, layer in enumerate(originals):
            is_last = number + 1 == stop_after
            layers[number] = _Recorder(layer, log, is_last, output_size, output)
        try:
            yield log
        finally:
            for number, layer in enumerate(originals):
                layers[number] = layer

    def _probe(self, ids: Tensor) -> int | None:
        """Check on a few tokens that the model can be run by layers.

        Tells what layers return: None for a bare tensor, else the length of the tuple.
        """
        try:
            first = self._record(ids, None, stop_after=1)
            call = first.calls[0]
            output = self.skeleton.layers[0](first.hidden, *call.args, **call.kwargs)
            size = None if isinstance(output, Tensor) else len(output)
            # To the end of the model: one that loops over its layers shows it only there.
            self._record(ids, size, stop_after=len(self.skeleton.layers) + 1)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise UnsupportedError(
                f"{type(self.skeleton.model).__name__} cannot be run one decoder layer at a time "
                f"({error}); quantkit cannot calibrate it"
            ) from error
        return size

    def _record(self, ids: Tensor, output_size: int | None, stop_after: int | None = None) -> Batch:
        """Run the model's forward with recorders for layers, through all of them by default."""
        count = len(self.skeleton.layers)
        stop_after = stop_after or count
        cache = observing_cache(self.skeleton.model.config)
        with self._recorders(stop_after, output_size) as log, suppress(EndOfLayersError):
            self.skeleton.decoder(
                input_ids=ids.to(self.skeleton.device),
                use_cache=True,
                **{self._cache_name: cache},
            )
        self._check_log(log, min(stop_after, count))
        calls = [Call(self._share(call.args), self._share(call.kwargs)) for _, call in log]
        return Batch(log[0][0], cache, calls)

    def _check_log(self, log: Sequence[tuple[Tensor, Call]], expected: int) -> None:
        """Raise UnsupportedError unless each layer ran once, on what came out of the one before."""
        kind = type(self.skeleton.model).__name__
        if len(log) != expected:
            raise UnsupportedError(
                f"{kind} has {expected} decoder layers and runs {len(log)} times through one; "
                "quantkit cannot calibrate it layer by layer"
            )
        hidden = log[0][0]
        if any(other is not hidden and not torch.equal(other, hidden) for other, _ in log):
            raise UnsupportedError(
                f"{kind} changes hidden states between its decoder layers; quantkit cannot "
                "calibrate it layer by layer"
            )

    def _share(self, value: Any) -> Any:
        """Keep one copy of equal tensors: masks and positions are the same for most batches."""
        if isinstance(value, Tensor):
            known = self._shared.setdefault((value.shape, value.dtype), [])
            for other in known:
                if other is value or torch.equal(other, value):
                    return other
            known.append(value)
            return value
        if isinstance(value, dict):
            return {key: self._share(item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._share(item) for item in value)
        return value


def _linear_by_sequence(module: nn.Linear, shape: torch.Size, x: Tensor) -> Tensor:
    sequences, tokens = shape
    if sequences == 1 or x.shape[:-1].numel() != sequences * tokens:
        return F.linear(x, module.weight, module.bias)
    out = x.new_empty(sequences, tokens, module.out_features)
    in_place = not torch.is_grad_enabled() and module.bias is None
    for number, rows in enumerate(x.reshape(sequences, tokens, -1)):
        if in_place:  # the same product, without a copy
            torch.mm(rows, module.weight.t(), out=out[number])
        else:
            out[number] = F.linear(rows, module.weight, module.bias)
    return out.view(*x.shape[:-1], -1)


def _take_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Split a layer call into the hidden states and everything else."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest
