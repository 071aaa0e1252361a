"""Bytes of a checkpoint: of each listed module before and after, and of all that stays as it was.

The weight files' headers are the truth; where they are missing or broken, what quantkit.json says
about modules is used, and the problem is reported, not hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.inspection.record import ModuleRecord, Record
from quantkit.shards import ShardReader, read_json

BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F16": 16, "BF16": 16, "I16": 16}
BITS |= {"F32": 32, "I32": 32, "F64": 64, "I64": 64}
DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Rest:
    """Tensors that belong to no listed module: same last names, same dtype, summed."""

    name: str
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """`modules` maps names to bytes on disk; `source_item` is the bytes of a source's weight.

    `rest` is None, and `problem` says why, if the weight files could not be read.
    """

    modules: dict[str, int] = field(default_factory=dict)
    source_item: int = 2
    rest: tuple[Rest, ...] | None = None
    problem: str | None = None

    def before(self, module: ModuleRecord) -> int:
        """Bytes of a module's weight in the source."""
        return module.num_weights * self.source_item

    def after(self, module: ModuleRecord) -> int | None:
        """Bytes of a module with its scales on disk."""
        return self.modules.get(module.name, module.bytes)

    def bytes_per_weight(self, modules: Iterable[ModuleRecord]) -> float | None:
        """Bytes on disk over weights, for modules whose bytes are all known."""
        found = list(modules)
        sizes = [size for module in found if (size := self.after(module)) is not None]
        if not found or len(sizes) < len(found):
            return None
        return sum(sizes) / max(1, sum(module.num_weights for module in found))


def read_sizes(record: Record) -> Sizes:
    """Read the headers of the weight files beside quantkit.json; never raises for their state."""
    item = _source_item(record.folder)
    try:
        reader = ShardReader(record.folder)
    except CheckpointError as error:
        problem = f"sizes are those noted at calibration, the weights were not read: {error}"
        return Sizes(source_item=item, problem=problem)
    listed = {module.name: 0 for module in record.modules}
    rest: dict[tuple[str, str], list[int]] = {}
    for name in reader.names:
        owner, _, last = name.rpartition(".")
        dtype = reader.dtype(name)
        size = prod(reader.shape(name)) * BITS.get(dtype, 8) // 8
        if owner in listed:
            listed[owner] += size
        else:
            kind = last if last.endswith("_scale") else owner.rpartition(".")[2]
            rest.setdefault((kind or last, dtype), []).append(size)
    found = {name: size for name, size in listed.items() if size}
    summed = [Rest(*key, len(values), sum(values)) for key, values in rest.items()]
    return Sizes(found, item, tuple(sorted(summed, key=lambda entry: -entry.bytes)))


def _source_item(folder: Path) -> int:
    """Bytes of a number of the source by config.json; 16-bit if it does not say."""
    try:
        config = read_json(folder / "config.json")
    except CheckpointError:
        return 2
    return DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
