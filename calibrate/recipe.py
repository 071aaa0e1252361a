"""Recipes: how a model is to be quantized.

How a file says that is in `recipe_file`; what `targets` and `ignore` select in `selection`, what
[tiers] may hold in `tiers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quantkit.calibrate.kv_layers import check_entries
from quantkit.calibrate.observers import DEFAULT_OBSERVER, ObserverFactory, observer_factory
from quantkit.calibrate.selection import ALL_LINEARS, HEAD
from quantkit.calibrate.tiers import Tiers, only_tiers
from quantkit.errors import RecipeError, nearest
from quantkit.numerics import E3M4, E4M3, FORMATS
from quantkit.scheme import Granularity, QuantSpec, Scheme

_KV_SPECS: dict[str, QuantSpec | None] = {
    "fp8": QuantSpec(Granularity.TENSOR),
    "fp8-head": QuantSpec(Granularity.HEAD),
    "fp8-e3m4": QuantSpec(Granularity.TENSOR, format=E3M4.name),
    "none": None,
}
# What a checkpoint can hold, and an engine can load: (granularity, dynamic).
_WEIGHT_KINDS = (
    (Granularity.TENSOR, False),
    (Granularity.CHANNEL, False),
    (Granularity.BLOCK, False),
)
_INPUT_KINDS = (
    (Granularity.TENSOR, False),
    (Granularity.TENSOR, True),
    (Granularity.TOKEN, True),
    (Granularity.GROUP, True),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to quantize, and how. `inputs=None` quantizes weights only.

    A `head` in 8 bits is stored beside the embedding that it may be tied to, which stays as it is.

    Raises RecipeError where the parts do not make a checkpoint that engines, or quantkit itself,
    can load.
    """

    name: str
    weights: QuantSpec
    description: str = ""
    inputs: QuantSpec | None = None
    # "fp8": E4M3, one scale per layer; "fp8-head": one per KV head; "fp8-e3m4" is native; "none"
    kv: str = "fp8"
    kv_ignore: tuple[str, ...] = ()  # layers whose cache stays as it is, see `kv_layers`
    targets: tuple[str, ...] = (ALL_LINEARS,)
    ignore: tuple[str, ...] = (HEAD,)
    head: str | None = None  # format of the output head; None treats it like any target
    tiers: Tiers = field(default_factory=Tiers)
    observer: str | ObserverFactory = DEFAULT_OBSERVER  # decides the range of static inputs

    def __post_init__(self) -> None:
        """Check the values that do not depend on a model."""
        _check_kind("weights", self.weights, _WEIGHT_KINDS)
        if self.inputs is not None:
            self._check_multiplied(self.inputs)
            _check_kind("inputs", self.inputs, _INPUT_KINDS)
        if self.kv not in _KV_SPECS:
            hint = nearest(self.kv, _KV_SPECS)
            known = ", ".join(
                name if spec is None else f"{name} ({spec.format})"
                for name, spec in _KV_SPECS.items()
            )
            raise RecipeError(f"kv is {self.kv!r}{hint}; known: {known}")
        check_entries(self.kv_ignore)
        if not self.targets:
            raise RecipeError(f'targets is empty; targets = ["{ALL_LINEARS}"] selects all modules')
        self._check_head()
        _ = self.observer_factory  # is known

    def _check_head(self) -> None:
        if self.head is None:
            return
        if self.head not in FORMATS:
            hint = nearest(self.head, FORMATS)
            raise RecipeError(f"head is {self.head!r}{hint}; known: {', '.join(FORMATS)}")
        if HEAD in self.ignore:
            raise RecipeError(f"head is {self.head!r} and ignore has {HEAD!r}; remove one of them")

    def _check_multiplied(self, inputs: QuantSpec) -> None:
        """Raise RecipeError unless weights and inputs are what 8-bit matmuls multiply."""
        if inputs.format != E4M3.name or not self._has_portable_weights:
            raise RecipeError(
                "inputs are quantized for 8-bit matmuls, which take E4M3 on both sides; weights in "
                "other formats and outlier columns are decoded first, so leave out [inputs]"
            )

    @property
    def kv_spec(self) -> QuantSpec | None:
        """How keys and values are quantized; None leaves the cache as it is."""
        return _KV_SPECS[self.kv]

    @property
    def needs_data(self) -> bool:
        """True if anything is measured on data: tiers, static inputs, or the KV cache."""
        return self.watches_inputs or self.kv_spec is not None

    @property
    def watches_inputs(self) -> bool:
        """True if something depends on what linear modules read: tiers, or static inputs."""
        return self.tiers.needs_data or self.has_static_inputs

    @property
    def has_static_inputs(self) -> bool:
        """True if the scales of inputs are fixed on data."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def observer_factory(self) -> ObserverFactory:
        """What makes the observers of static inputs."""
        if isinstance(self.observer, str):
            return observer_factory(self.observer)
        return self.observer

    def to_json(self) -> dict[str, Any]:
        """Return the recipe for quantkit.json; an observer of the caller's own goes by its name."""
        named = self.observer
        if not isinstance(named, str):
            kind = named if hasattr(named, "__qualname__") else type(named)
            named = f"{kind.__module__}.{kind.__qualname__}"
        return {**asdict(replace(self, observer=DEFAULT_OBSERVER)), "observer": named}

    @property
    def is_portable(self) -> bool:
        """True if weights and KV cache have the formats that other engines load."""
        kv = self.kv_spec
        one_kind = kv is None or (kv.format == E4M3.name and not self.kv_ignore)
        return self._has_portable_weights and one_kind

    @property
    def _has_portable_weights(self) -> bool:
        plain = self.weights.format == E4M3.name and self.head is None
        return self.tiers.is_portable and plain

    def scheme(
        self,
        ignored: Iterable[str],
        formats: Mapping[str, str] | None = None,
        kv_ignored: tuple[int, ...] = (),
    ) -> Scheme:
        """Return the scheme of a checkpoint in which `ignored` (full names) stay unquantized.

        `formats` gives the format of each quantized module, if not all have the recipe's;
        `kv_ignored` are the layers that keep keys and values as they are.
        """
        other = {n: f for n, f in (formats or {}).items() if f != self.weights.format}
        native = not self.is_portable
        return Scheme(
            self.weights, self.inputs, self.kv_spec, tuple(ignored), native, other, kv_ignored
        )

    def with_options(
        self,
        kv: str | None = None,
        ignore: Sequence[str] = (),
        tiers: str | None = None,
        budget: float | None = None,
        head: str | None = None,
        observer: str | ObserverFactory | None = None,
    ) -> Recipe:
        """Return the recipe with other values where they are given, and more `ignore` entries.

        `tiers` is "none" for plain rounding, or the names of those to use, separated by commas;
        tiers that the recipe does not use stay off. `head` is a format, or "none" to leave the
        output head as it is. Raises RecipeError for an unknown name.
        """
        chosen = self.tiers if tiers is None else only_tiers(self.tiers, tiers)
        if budget is not None:
            chosen = replace(chosen, budget=budget)
        added = [entry for entry in ignore if entry not in self.ignore]
        if head == "none" and HEAD not in (*self.ignore, *added):
            added.append(HEAD)
        kept = [entry for entry in self.ignore if entry != HEAD or head in (None, "none")]
        leaves = head == "none" or (head is None and HEAD in added)
        return replace(
            self,
            kv=self.kv if kv is None else kv,
            ignore=(*kept, *added),
            head=None if leaves else self.head if head is None else head,
            tiers=chosen,
            observer=self.observer if observer is None else observer,
        )


def _check_kind(part: str, spec: QuantSpec, known: tuple[tuple[Granularity, bool], ...]) -> None:
    """Raise RecipeError unless `spec` is one of the `known` (granularity, dynamic)."""
    if (spec.granularity, spec.dynamic) not in known:
        options = ", ".join(
            f"{granularity.value} {'dynamic' if dynamic else 'static'}"
            for granularity, dynamic in known
        )
        kind = f"{spec.granularity.value!r}, {'dynamic' if spec.dynamic else 'static'}"
        raise RecipeError(f"{part} are {kind}; checkpoints hold: {options}")
