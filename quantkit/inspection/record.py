"""What quantkit.json of a checkpoint folder says, as frozen objects.

Older versions wrote fewer facts: what a file does not have is None. Owns names and meanings of the
file's keys; sizes on disk come from `sizes`, and what follows from the facts from `summary`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.inspection.fields import Fields
from quantkit.shards import read_json
from quantkit.staging import where_it_was_set_aside

FILE_NAME = "quantkit.json"
GIVE = "give the folder that 'quantkit calibrate' wrote"
OUTSIDE = "outside the layers"
KEEP = "keep"
"""The tier of a module that stays in the source's dtype."""


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """One linear module, weight [out, in].

    `*_sqnr_db` is 10 log10(signal power / error power): of the weight, and of the output with
    plain rounding and with `tiers` in force (() is plain rounding, None unknown). `outlier_ratio`
    is the largest over the median row amax of the weight, `input_outlier_ratio` the largest over
    the median channel RMS of the input, `top_input_channels` pairs (channel, RMS), largest first.
    `predicted_kl` (nats a token) is of plain rounding of the module's whole fused group.
    """

    name: str
    shape: tuple[int, ...]
    tiers: tuple[str, ...] | None = None
    format: str | None = None
    weight_sqnr_db: float | None = None
    plain_output_sqnr_db: float | None = None
    output_sqnr_db: float | None = None
    outlier_ratio: float | None = None
    input_outlier_ratio: float | None = None
    input_amax: float | None = None
    top_input_channels: tuple[tuple[int, float], ...] = ()
    num_clipped: int | None = None
    outlier_columns: int | None = None
    bytes: int | None = None
    predicted_kl: float | None = None

    @property
    def kind(self) -> str:
        """The name within its layer: "q_proj", or "experts.up_proj" for each of the experts."""
        first, _, last = self.name.rpartition(".")
        return f"experts.{last}" if re.search(r"\bexperts\.\d+$", first) else last

    @property
    def is_kept(self) -> bool:
        """Tell whether the module stays in the source's dtype."""
        return self.tiers is not None and KEEP in self.tiers

    @property
    def is_measured(self) -> bool:
        """Tell whether anything is known that is not in the weights themselves."""
        errors = (self.weight_sqnr_db, self.plain_output_sqnr_db, self.output_sqnr_db)
        return self.tiers is not None or any(error is not None for error in errors)

    @property
    def num_weights(self) -> int:
        """Elements of the weight."""
        return prod(self.shape)

    @property
    def gain_db(self) -> float | None:
        """What the tiers won over plain rounding, dB; None where either side is unknown."""
        if self.output_sqnr_db is None or self.plain_output_sqnr_db is None:
            return None
        return round(self.output_sqnr_db - self.plain_output_sqnr_db, 3)


@dataclass(frozen=True, slots=True)
class KvRecord:
    """What FP8 does to keys, values and attention's output of a layer (SQNR, dB).

    `plain_output_error_db` is attention's output with scales from the largest values alone,
    `key_channel_ratio` the largest over the median channel amax of the keys, `*_saturated` how many
    of the measured values are beyond their scale; `flagged` says that FP8 does not hold the keys.
    """

    key_error_db: float | None = None
    value_error_db: float | None = None
    output_error_db: float | None = None
    plain_output_error_db: float | None = None
    key_channel_ratio: float | None = None
    keys_saturated: int | None = None
    values_saturated: int | None = None
    flagged: bool = False


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One decoder layer: `number` from its name, None for what is not one of the layers."""

    name: str
    number: int | None
    output_sqnr_db: float | None
    kv: KvRecord | None
    modules: tuple[ModuleRecord, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The search for what to keep: `budget` is in bytes a weight.

    `predicted_kl` (nats a token, measured on `tokens`) is of plain rounding of all modules.
    """

    tokens: int | None
    predicted_kl: float | None
    budget: float | None


@dataclass(frozen=True, slots=True)
class DataRecord:
    """The calibration data: `sources` as given to --data, counts of what was used."""

    sources: tuple[str, ...] = ()
    samples: int | None = None
    tokens: int | None = None
    seq_len: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """All of quantkit.json; `recipe` is the resolved recipe as it stands there."""

    folder: Path
    version: str | None
    profile: str | None
    recipe: dict[str, Any]
    recipe_name: str | None
    kv: str | None
    seed: int | None
    source_name: str | None
    fingerprint: str | None
    dtype: str | None
    data: DataRecord | None
    versions: dict[str, Any]
    source_bytes: int | None
    target_bytes: int | None
    tiers: dict[str, bool] | None
    sensitivity: Sensitivity | None
    layers: tuple[LayerRecord, ...]
    warnings: tuple[str, ...]

    @property
    def modules(self) -> list[ModuleRecord]:
        """The modules of all layers, in order."""
        return [module for layer in self.layers for module in layer.modules]


def read_record(folder: Path) -> Record:
    """Read quantkit.json of a checkpoint folder.

    Raises CheckpointError if there is none, or if it is not what quantkit writes.
    """
    path = folder / FILE_NAME
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        hint = where_it_was_set_aside(folder) or f"; {GIVE}"
        raise CheckpointError(f"{folder} {state}{hint}")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {FILE_NAME}, so it is not a quantkit checkpoint; {GIVE}"
        )
    try:
        value = read_json(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; restore the file, or calibrate again") from None
    return _record(Fields(value, path), folder)


def _record(top: Fields, folder: Path) -> Record:
    recipe, source, versions = (top.child(key) for key in ("recipe", "source", "versions"))
    data, sensitivity = top.child("data"), top.child("sensitivity")
    return Record(
        folder=folder,
        version=top.text("quantkit_version"),
        profile=top.text("profile"),
        recipe=recipe.raw() if recipe else {},
        recipe_name=recipe.text("name") if recipe else None,
        kv=recipe.text("kv") if recipe else None,
        seed=top.count("seed"),
        source_name=source.text("name") if source else None,
        fingerprint=source.text("fingerprint") if source else None,
        dtype=top.text("dtype"),
        data=_data(data) if data else None,
        versions=versions.raw() if versions else {},
        source_bytes=top.count("source_bytes"),
        target_bytes=top.count("target_bytes"),
        tiers=top.flags("tiers"),
        sensitivity=_sensitivity(sensitivity) if sensitivity else None,
        layers=(*(_layer(layer) for layer in top.children("layers")), *_outside_layers(top)),
        warnings=top.texts("warnings") or (),
    )


def _data(fields: Fields) -> DataRecord:
    sources = (source.text("source") for source in fields.children("sources"))
    return DataRecord(
        sources=tuple(source for source in sources if source),
        samples=fields.count("samples"),
        tokens=fields.count("tokens"),
        seq_len=fields.count("seq_len"),
        sha256=fields.text("sha256"),
    )


def _sensitivity(fields: Fields) -> Sensitivity:
    return Sensitivity(
        fields.count("tokens"), fields.number("predicted_kl"), fields.number("budget")
    )


def _layer(fields: Fields) -> LayerRecord:
    name, kv = fields.text("name"), fields.child("kv")
    if name is None:
        raise fields.missing("name")
    last = name.rpartition(".")[2]
    return LayerRecord(
        name=name,
        number=int(last) if last.isdecimal() else None,
        output_sqnr_db=fields.number("output_sqnr_db"),
        kv=_kv(kv) if kv else None,
        modules=tuple(_module(module) for module in fields.children("modules")),
    )


def _outside_layers(top: Fields) -> list[LayerRecord]:
    """Return the output head as though it were a layer, if it was quantized."""
    modules = tuple(_module(module) for module in top.children("outside_layers"))
    return [LayerRecord(OUTSIDE, None, None, None, modules)] if modules else []


def _kv(fields: Fields) -> KvRecord:
    return KvRecord(
        key_error_db=fields.number("key_error_db"),
        value_error_db=fields.number("value_error_db"),
        output_error_db=fields.number("output_error_db"),
        plain_output_error_db=fields.number("plain_output_error_db"),
        key_channel_ratio=fields.number("key_channel_ratio"),
        keys_saturated=fields.count("keys_saturated"),
        values_saturated=fields.count("values_saturated"),
        flagged=bool(fields.flag("flagged")),
    )


def _module(fields: Fields) -> ModuleRecord:
    name, shape = fields.text("name"), fields.counts("shape")
    if name is None or shape is None:
        raise fields.missing("name" if name is None else "shape")
    return ModuleRecord(
        name=name,
        shape=shape,
        tiers=fields.texts("tiers"),
        format=fields.text("format"),
        weight_sqnr_db=fields.number("weight_sqnr_db"),
        plain_output_sqnr_db=fields.number("plain_output_sqnr_db"),
        output_sqnr_db=fields.number("output_sqnr_db"),
        outlier_ratio=fields.number("outlier_ratio"),
        input_outlier_ratio=fields.number("input_outlier_ratio"),
        input_amax=fields.number("input_amax"),
        top_input_channels=fields.pairs("top_input_channels"),
        num_clipped=fields.count("num_clipped"),
        outlier_columns=fields.count("outlier_columns"),
        bytes=fields.count("bytes"),
        predicted_kl=fields.number("predicted_kl"),
    )
