"""Static scales of what linear modules read: who is watched by which observer, and who shares.

How large an input the largest code stands for is the observer's decision, see `observers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate.amax import AmaxObserver, canonical_input
from quantkit.calibrate.groups import expert_of
from quantkit.calibrate.moments import first_members, group_name
from quantkit.calibrate.observers import ObserverFactory, RangeObserver, SharedObserver
from quantkit.calibrate.quantized_layer import QuantizedLinear
from quantkit.calibrate.ranks import ALONE, Ranks
from quantkit.errors import CalibrationError
from quantkit.numerics import Format
from quantkit.scheme import QuantSpec


@dataclass(frozen=True, slots=True)
class InputRange:
    """The largest |input| that was seen, and the one that becomes the largest code."""

    amax: float
    range: float

    def union(self, other: InputRange) -> InputRange:
        """Return the range that holds both."""
        return InputRange(max(self.amax, other.amax), max(self.range, other.range))


@dataclass(slots=True)
class _Watched:
    """One input: who decides its range, and what was seen of it."""

    observer: RangeObserver
    seen: AmaxObserver = field(default_factory=AmaxObserver)
    last: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Take in an input [..., tokens, channels] of one of the modules that may share it."""
        if x is self.last or not x.numel():
            return  # of an expert no token of a batch was sent to
        self.last = x
        self.seen.update(canonical_input(x))
        for rows in x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3):
            self.observer.update(rows)

    def end_block(self, name: str, ranks: Ranks) -> None:
        """Bring what every process has seen of this round to the first."""
        if not isinstance(self.observer, SharedObserver):
            if ranks.size == 1:
                return
            raise CalibrationError(
                f"observer {type(self.observer).__name__} of the input of {name} has no take and "
                "merge (see SharedObserver), which a run of several processes needs"
            )
        for observer, seen in ranks.gather((self.observer.take(), self.seen.take())):
            self.observer.merge(observer)
            self.seen.merge_observer(seen)

    def result(self, name: str, fmt: Format) -> InputRange:
        """Return the range; `name` is that of the module, for errors."""
        amax = 0.0 if self.seen.amax is None else float(self.seen.amax.item())
        if not amax < inf:
            raise CalibrationError(
                f"the input of {name} has NaN or infinite values on the calibration data; "
                "the model itself is broken at this layer"
            )
        chosen = float(self.observer.range(fmt))
        if not (0 < chosen < inf or chosen == amax == 0):
            raise CalibrationError(
                f"observer {type(self.observer).__name__} gives the input of {name} the range "
                f"{chosen}; it must be finite and above 0 (the largest input is {amax:.6g})"
            )
        return InputRange(amax, chosen)


class InputRanges:
    """Forward hooks that show to observers what linears read, one for each fused group.

    Members that read the same tensor show it once.
    """

    def __init__(self, modules: Mapping[str, nn.Linear], make: ObserverFactory) -> None:
        self._tokens: Counter[str] = Counter()
        self._new_tokens: Counter[str] = Counter()  # in this process, since the last block
        self._group_of = {name: group_name(name, modules) for name in modules}
        self._watched: dict[str, _Watched] = {}
        for first in dict.fromkeys(self._group_of.values()):
            width = modules[first].in_features
            readers = [modules[name] for name, group in self._group_of.items() if group == first]
            weights = [reader.weight.data for reader in readers if reader.in_features == width]
            self._watched[first] = _Watched(make(torch.cat(weights)))
        self._counted = set(first_members(self._group_of).values())
        self._handles = [
            module.register_forward_pre_hook(self._hook(name), prepend=True)
            for name, module in modules.items()
        ]

    def begin(self, first: int) -> None:
        """Announce the sequences from number `first` on: their numbers make no difference."""

    def end_block(self, ranks: Ranks = ALONE) -> None:
        """Bring what every process has seen of this round to the first, and the counts to all."""
        for name, watched in self._watched.items():
            watched.end_block(name, ranks)
        for counts in ranks.share(self._new_tokens):
            self._tokens.update(counts)
        self._new_tokens = Counter()

    @property
    def num_tokens(self) -> dict[str, int]:
        """How many tokens each module has read, or the first of its group has."""
        return {
            name: self._tokens[group] + self._new_tokens[group]
            for name, group in self._group_of.items()
        }

    def finish(
        self, linears: Mapping[str, QuantizedLinear], spec: QuantSpec, ranks: Ranks = ALONE
    ) -> None:
        """Remove the hooks and set each module's input scale, as the first process decides.

        Those that an engine multiplies with one scale share the largest: q/k/v, gate/up, and the
        same linear of all experts of a layer. Raises CalibrationError naming a module that never
        ran, whose input was not finite, or whose observer made no range of it.
        """
        for handle in self._handles:
            handle.remove()
        shared = ranks.broadcast(self._ranges(linears, spec) if ranks.is_first else {})
        for name, group in self._group_of.items():
            found = shared[_shared_key(group)]
            linears[name].set_input_range(found.range, found.amax, spec)

    def _ranges(
        self, linears: Mapping[str, QuantizedLinear], spec: QuantSpec
    ) -> dict[str, InputRange]:
        """Return the ranges by what shares them."""
        for name, count in self.num_tokens.items():
            if not count:
                raise CalibrationError(
                    f"no calibration token reached {linears[name].name}, so its input scale is "
                    "unknown; add data or use a recipe with dynamic inputs (fp8-dynamic)"
                )
        shared: dict[str, InputRange] = {}
        for first, watched in self._watched.items():
            found, key = watched.result(linears[first].name, spec.fmt), _shared_key(first)
            shared[key] = found.union(shared[key]) if key in shared else found
        return shared

    def _hook(self, name: str) -> Any:
        watched = self._watched[self._group_of[name]]

        def observe(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
            if name in self._counted:
                self._new_tokens[self._group_of[name]] += args[0].numel() // module.in_features
            watched.update(args[0])

        return observe


def _shared_key(group: str) -> str:
    expert = expert_of(group)
    return f"{expert[0]}.*.{expert[2]}" if expert else group
