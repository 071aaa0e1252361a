"""The batches' way through one decoder layer, with stops in front of the linears to be quantized.

A group of linears is quantized on what it will read: on what comes out of those before it in the
layer, which are quantized by then. So every batch stops where a group reads, goes on when the group
is quantized, and passes the layer once in all. What it has computed so far is kept meanwhile, in
the frames of the model's own code. Where there is no memory for that, each stop is the end of a run
from the beginning, which takes longer and gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from quantkit.calibrate.batches import Batch
from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.layerwise import EndOfLayersError, LayerwiseModel, Watcher
from quantkit.calibrate.moving import Moving


class Passage(ABC):
    """Batches that pass through layer `number`, which is loaded; use as a context manager.

    `observer` sees once what the layer caches.
    """

    repeats: bool
    """Whether modules run more than once after they were quantized, the last time in `finish`."""

    def __init__(
        self, model: LayerwiseModel, number: int, moving: Moving, observer: KvObserver | None = None
    ) -> None:
        self._model = model
        self._number = number
        self._moving = moving
        self._observer = observer

    def __enter__(self) -> Passage:
        if self._observer is not None:
            self._observer.attach(self._model.skeleton.layers[self._number])
        return self

    def __exit__(self, *error: object) -> None:
        if self._observer is not None:
            self._observer.detach()

    def show(self, modules: Collection[nn.Module], watchers: Sequence[Watcher]) -> None:
        """Let the watchers see what `modules` read of every batch, in all processes."""
        with torch.no_grad(), self._showing(modules):
            for block in self._moving.rounds():
                for batch in block:
                    for watcher in watchers:
                        watcher.begin(batch.first)
                    self._go_on(batch)
                for watcher in watchers:
                    watcher.end_block(self._model.ranks)

    @torch.no_grad()
    def finish(self) -> Iterator[tuple[Batch, Tensor]]:
        """Bring every batch to the end; yield it with the output, to be set as its `hidden`."""
        for block in self._moving.rounds(moves=True):
            for batch in block:
                yield batch, self._end(batch)

    @abstractmethod
    def _showing(self, modules: Collection[nn.Module]) -> AbstractContextManager[None]:
        """Bracket the runs that show what `modules` read."""

    @abstractmethod
    def _go_on(self, batch: Batch) -> None:
        """Run a batch until the modules that are shown have read."""

    @abstractmethod
    def _end(self, batch: Batch) -> Tensor:
        """Run a batch to the end; return the output of the layer."""


class RepeatedPassage(Passage):
    """Keeps nothing of a batch between stops: each is a run from the beginning.

    A run ends when all modules that are shown have read, if the first run read each of them once.
    """

    repeats = True
    _ends = False
    _times: dict[nn.Module, int]  # that each module which is shown has read in a run

    @contextmanager
    def _showing(self, modules: Collection[nn.Module]) -> Iterator[None]:
        self._times = dict.fromkeys(modules, 0)
        self._ends = False
        handles = [module.register_forward_pre_hook(self._count) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _go_on(self, batch: Batch) -> None:
        self._times = dict.fromkeys(self._times, 0)
        with suppress(EndOfLayersError):
            self._model.output(self._number, batch, batch.hidden)
        self._ends = all(times == 1 for times in self._times.values())

    def _count(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._times[module] += 1
        if self._ends and all(self._times.values()):
            raise EndOfLayersError

    def _end(self, batch: Batch) -> Tensor:
        return self._model.output(self._number, batch, batch.hidden, self._observer)


class HeldPassage(Passage):
    """Keeps every batch where it has stopped: a run of the layer for each, all under way at once.

    `stops` are the modules that each call of `show` begins with, in the order of reading; each
    reads once in a run. Hooks that were there before see a module's input before its stop, later
    ones after it. A batch that takes another way through the layer than these stops is run from the
    beginning each time.
    """

    repeats = False

    def __init__(
        self,
        model: LayerwiseModel,
        number: int,
        moving: Moving,
        stops: Sequence[nn.Module],
        observer: KvObserver | None = None,
    ) -> None:
        super().__init__(model, number, moving, observer)
        self._runs: dict[int, greenlet] = {}  # by the number of the batch's first sequence
        self._outputs: dict[int, Tensor] = {}  # of runs that came to the end too early
        self._strays: set[int] = set()
        self._closed = set(stops)
        self._shown: nn.Module | None = None
        self._reached: nn.Module | None = None
        self._driver = getcurrent()
        self._handles = [stop.register_forward_pre_hook(self._wait) for stop in stops]

    @contextmanager
    def _showing(self, modules: Collection[nn.Module]) -> Iterator[None]:
        self._shown = next(iter(modules))
        yield
        self._closed.discard(self._shown)

    def _go_on(self, batch: Batch) -> None:
        first = batch.first
        if first in self._outputs:
            return
        if first not in self._strays:
            output = self._resume(batch)
            if output is not None:
                self._outputs[first] = output
            if output is not None or self._reached is self._shown:
                return
            self._runs.pop(first).throw()
            self._strays.add(first)
        self._model.output(self._number, batch, batch.hidden)

    def _end(self, batch: Batch) -> Tensor:
        first = batch.first
        if first in self._outputs:
            return self._outputs.pop(first)
        self._closed.clear()
        if first in self._strays:
            return self._model.output(self._number, batch, batch.hidden, self._observer)
        output = self._resume(batch)
        assert output is not None
        return output

    def _resume(self, batch: Batch) -> Tensor | None:
        """Let a batch run on to the next stop; return the layer's output if it gets there."""
        run = self._runs.get(batch.first)
        if run is None:
            call = partial(self._model.forward, self._number, batch, batch.hidden, self._observer)
            run = self._runs[batch.first] = greenlet(call)
        if self._observer is not None:
            self._observer.begin(batch.first)
        with self._model.by_sequence(self._number, batch.hidden.shape[:2]):
            output: Tensor | None = run.switch()
        if not run.dead:
            return None
        del self._runs[batch.first]
        return output

    def _wait(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        while module in self._closed and getcurrent() is not self._driver:
            self._reached = module
            self._driver.switch()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        for run in self._runs.values():
            run.throw()  # GreenletExit: what it was in the middle of is undone
        self._runs.clear()
