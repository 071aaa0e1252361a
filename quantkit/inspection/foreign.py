"""A Record of a checkpoint that another tool wrote: what its config and its tensors say."""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.containers import is_quantized
from quantkit.errors import CheckpointError
from quantkit.inspection.record import FILE_NAME, LayerRecord, ModuleRecord, Record
from quantkit.scheme import Granularity, QuantSpec
from quantkit.shards import read_json

WARNING = f"there is no {FILE_NAME}: only what the weight files say is shown, errors are unknown"


def is_foreign(folder: Path) -> bool:
    """Tell whether a folder has a quantized checkpoint and nothing that quantkit wrote."""
    if (folder / FILE_NAME).is_file():
        return False
    try:
        return is_quantized(read_json(folder / "config.json"), folder)
    except CheckpointError:
        return False


def read_foreign(folder: Path) -> Record:
    """Return what a checkpoint's own files say; all that only calibration knows is None.

    Raises CheckpointError if quantkit cannot read it.
    """
    checkpoint = open_checkpoint(folder)
    scheme = checkpoint.scheme
    return Record(
        folder=folder,
        version=None,
        profile="native" if scheme.native else "portable",
        recipe={},
        recipe_name=_summary(checkpoint),
        kv=_kv(scheme.kv),
        seed=None,
        source_name=str(folder),
        fingerprint=None,
        dtype=None,
        data=None,
        versions={},
        source_bytes=None,
        target_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        tiers=None,
        sensitivity=None,
        layers=_layers(checkpoint),
        warnings=(WARNING,),
    )


def _summary(checkpoint: Checkpoint) -> str:
    """Name the format, and what shares a scale."""
    scheme = checkpoint.scheme
    parts = [checkpoint.container.method, f"weights {_spec(scheme.weights)}"]
    inputs = scheme.inputs
    if inputs is None:
        parts.append("inputs not quantized")
    else:
        parts.append(f"inputs {'dynamic' if inputs.dynamic else 'static'} {_spec(inputs)}")
    return ", ".join(parts)


def _spec(spec: QuantSpec) -> str:
    match spec.granularity:
        case Granularity.BLOCK if spec.block_shape is not None:
            return "per {} x {} block".format(*spec.block_shape)
        case Granularity.GROUP:
            return f"per {spec.group_size} features"
        case _:
            return f"per {spec.granularity.value}"


def _kv(spec: QuantSpec | None) -> str:
    if spec is None:
        return "none"
    return "fp8-head" if spec.granularity is Granularity.HEAD else "fp8"


def _layers(checkpoint: Checkpoint) -> tuple[LayerRecord, ...]:
    """Put the quantized modules into layers, in the order of their numbers."""
    groups: dict[tuple[int | None, str], list[ModuleRecord]] = {}
    for module in checkpoint.quantized:
        match = re.match(r"(.*?\.(\d+))\.", module)
        key = (int(match.group(2)), match.group(1)) if match else (None, module)
        shape = checkpoint.shape(f"{module}.weight")
        spec = checkpoint.scheme.weights_of(module)
        groups.setdefault(key, []).append(ModuleRecord(module, shape, format=spec.format))
    ordered = sorted(groups, key=lambda key: (key[0] is None, key[0] or 0, key[1]))
    return tuple(LayerRecord(key[1], key[0], None, None, tuple(groups[key])) for key in ordered)
