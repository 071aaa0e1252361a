"""The few lines that sum a checkpoint up, the same in a terminal and on the page."""

from __future__ import annotations

import shlex

from quantkit.inspection import words
from quantkit.inspection.inspection import Inspection
from quantkit.inspection.record import Record


def overview(inspection: Inspection) -> list[tuple[str, str]]:
    """Return (label, text) pairs; facts that the checkpoint does not have are dashes."""
    record = inspection.record
    made_by = f"quantkit {record.version}" if record.version else words.UNKNOWN
    return [
        ("model", words.text(record.source_name)),
        ("recipe", f"{words.text(record.recipe_name)} ({words.text(record.profile)} profile)"),
        ("size", _size(record)),
        ("weights", _weights(inspection)),
        ("KV cache", words.text(record.kv)),
        ("tiers", _tiers(inspection)),
        ("sensitivity", _sensitivity(record)),
        ("calibrated on", _data(record)),
        ("made by", made_by),
    ]


def command(record: Record) -> str | None:
    """Return the command line that repeats the calibration, None if the file says too little."""
    if record.source_name is None or record.recipe_name is None:
        return None
    line = ["quantkit", "calibrate", record.source_name, "-o", "OUT"]
    line += ["--recipe", record.recipe_name]
    data = record.data
    if data is not None:
        for source in data.sources:
            line += ["--data", source]
        for option, value in (("--samples", data.samples), ("--seq-len", data.seq_len)):
            line += [option, str(value)] if value is not None else []
    line += ["--kv", record.kv] if record.kv else []
    line += ["--dtype", record.dtype] if record.dtype not in (None, "auto") else []
    line += ["--seed", str(record.seed)] if record.seed is not None else []
    return shlex.join(line)


def _size(record: Record) -> str:
    before, after = record.source_bytes, record.target_bytes
    text = f"{words.size(before)} -> {words.size(after)}"
    return f"{text} ({after / before:.0%})" if before and after is not None else text


def _weights(inspection: Inspection) -> str:
    modules = inspection.record.modules
    kept = sum(module.is_kept for module in modules)
    rate = words.number(inspection.bytes_per_weight, 3)
    text = f"{rate} bytes a weight in {len(modules):,} modules"
    return f"{text}, {kept} of them kept in the source's dtype" if kept else text


def _tiers(inspection: Inspection) -> str:
    return "; ".join(f"{row.tiers}: {row.count:,}" for row in inspection.tiers) or words.UNKNOWN


def _sensitivity(record: Record) -> str:
    found = record.sensitivity
    if found is None:
        return words.UNKNOWN
    text = f"plain rounding is predicted to cost {words.small(found.predicted_kl)} nats a token"
    if found.tokens is not None:
        text += f" (from {found.tokens:,} tokens)"
    if found.budget is not None:
        text += f"; budget {found.budget:g} bytes a weight"
    return text


def _data(record: Record) -> str:
    data = record.data
    if data is None:
        return words.UNKNOWN
    sources = ", ".join(data.sources) or words.UNKNOWN
    return f"{sources}: {words.count(data.samples)} samples, {words.count(data.tokens)} tokens"
