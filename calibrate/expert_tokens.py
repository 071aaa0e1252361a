"""Which tokens each expert of a layer is calibrated on.

An expert is calibrated on the tokens that the router sent to it. One that too few were sent to is
calibrated on every token of some sequences instead, as though the router had sent it all of them:
so each has moments and a range, and any prompt may reach it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from quantkit.calibrate.batches import Batch
from quantkit.calibrate.groups import expert_of
from quantkit.calibrate.layerwise import LayerwiseModel, Watcher
from quantkit.calibrate.moments import HOLD_OUT_EVERY, InputMoments, MomentObservers
from quantkit.calibrate.moving import Moving
from quantkit.experts import SplitExperts

ENOUGH_SHARE = 1 / 4
"""Tokens per input channel that an expert needs to be calibrated on its own ones."""
EVERY_TOKEN_SHARE = 4
"""Tokens per input channel of the sequences that the other experts see."""


@dataclass(frozen=True, slots=True)
class ExpertReach:
    """A list of experts, by its name on disk, and how many calibration tokens reached each.

    on_every_token: numbers of those calibrated on every token of some sequences, because too few
    tokens reached them.
    """

    name: str
    tokens: tuple[int, ...]
    on_every_token: tuple[int, ...] = ()


_Scarce = Mapping[str, frozenset[int]]  # numbers of experts, by the full name of their list


def add_scarce_moments(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    modules: Mapping[str, nn.Linear],
    observers: MomentObservers,
    moments: dict[str, InputMoments],
    watchers: Sequence[Watcher] = (),
) -> list[ExpertReach]:
    """Replace the moments of experts that few tokens reached by those of every token.

    The range of their inputs covers both. Runs layer `number` once more if there are such experts;
    `modules` are the linears to quantize in it, `observers` made `moments`, and `watchers` see that
    run too. Returns what to report.
    """

    def is_enough(name: str) -> bool:
        known, needed = observers.counts_of(name), ENOUGH_SHARE * modules[name].in_features
        return known.tokens >= needed and known.held_out > 0

    tokens = {name: observers.counts_of(name).tokens for name in modules}
    scarce = _experts_for_which(modules, lambda name: not is_enough(name))
    chosen = {name: module for name, module in modules.items() if _is_among(name, scarce)}
    if chosen:
        observers = MomentObservers(chosen, observers.owners)
        _run_on_every_token(model, number, moving, chosen, scarce, [observers, *watchers])
        for name, found in observers.finish().items():
            if name in moments:
                found.amax = found.amax.maximum(moments[name].amax)
            moments[name] = found
    return _reports(model, modules, tokens, scarce)


def reach_unreached(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    modules: Mapping[str, nn.Linear],
    num_tokens: Mapping[str, int],
    watchers: Sequence[Watcher],
) -> list[ExpertReach]:
    """Run layer `number` once more if it has experts that no token reached: they get every token.

    For the `watchers` that observe them meanwhile; `num_tokens` is what each linear saw before.
    Returns what to report.
    """
    scarce = _experts_for_which(modules, lambda name: not num_tokens.get(name))
    chosen = {name: module for name, module in modules.items() if _is_among(name, scarce)}
    if chosen:
        _run_on_every_token(model, number, moving, chosen, scarce, watchers)
    return _reports(model, modules, num_tokens, scarce)


def scarce_warnings(reports: Mapping[str, Sequence[ExpertReach]]) -> list[str]:
    """Return one line that names layers and experts which few tokens reached, if there are any.

    `reports` are by the layers' names.
    """
    places = [
        f"{layer}: {', '.join(map(str, experts.on_every_token))} of {len(experts.tokens)}"
        for layer, lists in reports.items()
        for experts in lists
        if experts.on_every_token
    ]
    if not places:
        return []
    return [
        "too few calibration tokens reached some experts, which were therefore calibrated on "
        f"tokens that the router sent elsewhere (more --samples help): {'; '.join(places)}"
    ]


def _experts_for_which(
    modules: Iterable[str], is_so: Callable[[str], bool]
) -> dict[str, frozenset[int]]:
    """Return the experts of which at least one linear is so."""
    found: dict[str, set[int]] = {}
    for name in modules:
        expert = expert_of(name)
        if expert is not None and is_so(name):
            found.setdefault(expert[0], set()).add(expert[1])
    return {name: frozenset(numbers) for name, numbers in found.items()}


def _is_among(name: str, scarce: _Scarce) -> bool:
    expert = expert_of(name)
    return expert is not None and expert[1] in scarce.get(expert[0], ())


def _reports(
    model: LayerwiseModel, modules: Iterable[str], tokens: Mapping[str, int], scarce: _Scarce
) -> list[ExpertReach]:
    """Return a report of each list of experts; `tokens` are those that each linear saw."""
    found: dict[str, dict[int, int]] = {}
    for name in modules:
        expert = expert_of(name)
        if expert is not None:
            found.setdefault(expert[0], {})[expert[1]] = tokens.get(name, 0)
    return [
        ExpertReach(
            name=model.skeleton.disk_name(name),
            tokens=tuple(counts.values()),
            on_every_token=tuple(sorted(scarce.get(name, ()))),
        )
        for name, counts in found.items()
    ]


def _run_on_every_token(
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    modules: Mapping[str, nn.Linear],
    scarce: _Scarce,
    watchers: Sequence[Watcher],
) -> None:
    """Run layer `number`, the linears of `scarce` experts, on every token of the first batches."""
    needed = EVERY_TOKEN_SHARE * max(module.in_features for module in modules.values())
    first = ([batch for batch in block if _is_needed(batch, needed)] for block in moving.rounds())
    with _on_every_token(model.skeleton.experts, scarce):
        for _ in model.watch(number, first, watchers):
            pass


def _is_needed(batch: Batch, num_tokens: int) -> bool:
    """Whether those before have too few tokens, or too few sequences to hold some out."""
    return batch.tokens_before < num_tokens or batch.first < HOLD_OUT_EVERY


@contextmanager
def _on_every_token(experts: Mapping[str, SplitExperts], scarce: _Scarce) -> Iterator[None]:
    for name, numbers in scarce.items():
        experts[name].on_every_token = numbers
    try:
        yield
    finally:
        for name in scarce:
            experts[name].on_every_token = frozenset()
