"""Modules put together: by kind, by tiers, by fused group, by shared input; and the worst of them.

Pure functions from records and sizes to small frozen rows that tables, page and JSON all show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from quantkit.inspection.record import LayerRecord, ModuleRecord, Record
from quantkit.inspection.sizes import Sizes

PLAIN = "plain rounding"
UNKNOWN = "not recorded"
CHANNELS_OF_AN_INPUT = 3
"""Channels listed of one input, so that one layer does not fill the list of outliers."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KindRow:
    """All modules of one kind: medians of SQNR (dB), the worst output, sums of bytes and clips."""

    kind: str
    count: int
    kept: int
    bytes_before: int
    bytes_after: int | None
    weight_sqnr_db: float | None
    plain_output_sqnr_db: float | None
    output_sqnr_db: float | None
    worst_sqnr_db: float | None
    worst_layer: str | None
    outlier_ratio: float | None
    num_clipped: int | None


@dataclass(frozen=True, slots=True)
class TierRow:
    """Modules with the same tiers in force: how many, and what these won (dB)."""

    tiers: str
    count: int
    num_weights: int
    median_gain_db: float | None
    min_gain_db: float | None
    max_gain_db: float | None


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """A fused group: KL (nats a token) that plain rounding of it alone is predicted to cost."""

    layer: str
    modules: str
    predicted_kl: float
    num_weights: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class InputRow:
    """The input that some modules of a layer share: its range and how uneven its channels are."""

    layer: LayerRecord
    modules: str
    amax: float | None
    outlier_ratio: float | None
    top_channels: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ChannelRow:
    """One channel of an input, in the layer where it stands out most.

    `ratio` is its RMS over the median channel's. `num_layers` counts the layers whose input of the
    same modules has it among its largest.
    """

    layer: str
    modules: str
    channel: int
    rms: float
    ratio: float | None
    num_layers: int


def group(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Collect items by key, in order of first appearance."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def known(values: Iterable[T | None]) -> list[T]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def layer_label(layer: LayerRecord) -> str:
    """Name a layer by its number where it has one."""
    return layer.name if layer.number is None else str(layer.number)


def tier_label(module: ModuleRecord) -> str:
    """Say which tiers are in force."""
    if module.tiers is None:
        return UNKNOWN
    return " + ".join(module.tiers) or PLAIN


def join_kinds(modules: Sequence[ModuleRecord]) -> str:
    """Name modules together: q_proj, k_proj, v_proj as "q/k/v_proj"."""
    kinds = list(dict.fromkeys(module.kind for module in modules))
    heads = {kind.rpartition(".")[0] for kind in kinds}
    tails = {kind.rpartition("_")[2] for kind in kinds}
    if len(kinds) < 2 or len(heads) > 1 or len(tails) > 1 or not all("_" in k for k in kinds):
        return "/".join(kinds)
    stems = (kind.rpartition(".")[2].rpartition("_")[0] for kind in kinds)
    head = heads.pop()
    return (f"{head}." if head else "") + "/".join(stems) + f"_{tails.pop()}"


def by_kind(record: Record, sizes: Sizes) -> list[KindRow]:
    """Return a row for each kind of module, in the order of a layer."""
    places = [(layer, module) for layer in record.layers for module in layer.modules]
    return [
        _kind_row(kind, found, sizes) for kind, found in group(places, lambda p: p[1].kind).items()
    ]


def _kind_row(
    kind: str, places: Sequence[tuple[LayerRecord, ModuleRecord]], sizes: Sizes
) -> KindRow:
    modules = [module for _, module in places]
    after = known(sizes.after(module) for module in modules)
    worst = next(iter(_by_error(places)), None)
    return KindRow(
        kind=kind,
        count=len(modules),
        kept=sum(module.is_kept for module in modules),
        bytes_before=sum(sizes.before(module) for module in modules),
        bytes_after=sum(after) if len(after) == len(modules) else None,
        weight_sqnr_db=_median(module.weight_sqnr_db for module in modules),
        plain_output_sqnr_db=_median(m.plain_output_sqnr_db for m in modules),
        output_sqnr_db=_median(module.output_sqnr_db for module in modules),
        worst_sqnr_db=worst[0] if worst else None,
        worst_layer=layer_label(worst[1]) if worst else None,
        outlier_ratio=max(known(module.outlier_ratio for module in modules), default=None),
        num_clipped=sum(clips) if (clips := known(m.num_clipped for m in modules)) else None,
    )


def worst_modules(record: Record, count: int) -> list[tuple[LayerRecord, ModuleRecord]]:
    """Return the modules with the least output SQNR (weight SQNR in older files), worst first."""
    places = [(layer, module) for layer in record.layers for module in layer.modules]
    return [(layer, module) for _, layer, module in _by_error(places)[:count]]


def by_tiers(record: Record) -> list[TierRow]:
    """Return a row for each combination of tiers, the most frequent first."""
    rows = []
    for label, modules in group(record.modules, tier_label).items():
        gains = known(module.gain_db for module in modules)
        rows.append(
            TierRow(
                tiers=label,
                count=len(modules),
                num_weights=sum(module.num_weights for module in modules),
                median_gain_db=_median(gains),
                min_gain_db=min(gains, default=None),
                max_gain_db=max(gains, default=None),
            )
        )
    return sorted(rows, key=lambda row: -row.count)


def by_sensitivity(record: Record) -> list[SensitivityRow]:
    """Return the fused groups with a predicted KL, the most sensitive first.

    Modules of a group stand side by side in a layer and carry the same prediction; so do all
    experts of a layer.
    """
    rows = []
    for layer in record.layers:
        groups = group(layer.modules, lambda m: (_group_parent(m), m.predicted_kl))
        for (_, predicted), modules in groups.items():
            if predicted is not None:
                weights = sum(module.num_weights for module in modules)
                kept = any(module.is_kept for module in modules)
                place = layer_label(layer)
                rows.append(SensitivityRow(place, join_kinds(modules), predicted, weights, kept))
    return sorted(rows, key=lambda row: -row.predicted_kl)


def _group_parent(module: ModuleRecord) -> str:
    """Return what a module's group is in: its parent, or the list of experts that it is in."""
    parent = module.name.rpartition(".")[0]
    return parent.rpartition(".")[0] if module.kind.startswith("experts.") else parent


def inputs(record: Record) -> list[InputRow]:
    """Return the inputs of all layers; modules that read the same one are named together.

    Modules side by side read the same input if all that was noted about it is the same. Experts
    of one layer each have an input of their own; the widest stands for them.
    """
    rows = []
    for layer in record.layers:
        seen = [m for m in layer.modules if m.input_amax is not None or m.top_input_channels]
        shared = group(seen, lambda m: (m.name.rpartition(".")[0], _input_of(m)))
        found = [
            InputRow(layer, join_kinds(modules), modules[0].input_amax, ratio, channels)
            for (_, (_, ratio, channels)), modules in shared.items()
        ]
        alike = group(found, lambda row: row.modules)
        rows += [max(same, key=lambda row: row.amax or 0.0) for same in alike.values()]
    return rows


def outlier_channels(record: Record, count: int) -> list[ChannelRow]:
    """Return the channels that stand out most from their input's median, the largest first."""
    rows = inputs(record)
    seen = Counter((row.modules, channel) for row in rows for channel, _ in row.top_channels)
    found: dict[tuple[str, int], ChannelRow] = {}
    for row in rows:
        largest = row.top_channels[0][1] if row.top_channels else 0.0
        for channel, rms in row.top_channels[:CHANNELS_OF_AN_INPUT]:
            # The ratio is noted for the largest channel alone; it gives the median.
            ratio = row.outlier_ratio * rms / largest if row.outlier_ratio and largest else None
            key, place = (row.modules, channel), layer_label(row.layer)
            new = ChannelRow(place, *key, rms, ratio, seen[key])
            found[key] = max(found.get(key, new), new, key=_prominence)
    return sorted(found.values(), key=_prominence, reverse=True)[:count]


def _prominence(row: ChannelRow) -> tuple[float, float]:
    return row.ratio or 0.0, row.rms


def _input_of(
    module: ModuleRecord,
) -> tuple[float | None, float | None, tuple[tuple[int, float], ...]]:
    return module.input_amax, module.input_outlier_ratio, module.top_input_channels


def _by_error(
    places: Sequence[tuple[LayerRecord, ModuleRecord]],
) -> list[tuple[float, LayerRecord, ModuleRecord]]:
    """Sort what was rounded by output SQNR, worst first; by weight SQNR if no output has one."""
    rounded = [place for place in places if not place[1].is_kept]
    outputs = [(m.output_sqnr_db, layer, m) for layer, m in rounded]
    weights = [(m.weight_sqnr_db, layer, m) for layer, m in rounded]
    found = [(error, layer, m) for error, layer, m in outputs if error is not None]
    found = found or [(error, layer, m) for error, layer, m in weights if error is not None]
    return sorted(found, key=lambda entry: entry[0])


def _median(values: Iterable[float | None]) -> float | None:
    found = known(values)
    return median(found) if found else None
