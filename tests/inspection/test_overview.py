from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from quantkit.inspection import Inspection, inspect
from quantkit.inspection.overview import command, overview
from tests.inspection.documents import write_folder


def test_sums_up_a_checkpoint(full: Inspection) -> None:
    lines = dict(overview(full))
    assert lines["model"] == "tiny model"
    assert lines["size"] == "20.0 MB -> 12.0 MB (60%)"
    assert lines["weights"].endswith(
        "bytes a weight in 14 modules, 1 of them kept in the source's dtype"
    )
    assert lines["tiers"] == "range + compensation: 11; plain rounding: 2; keep: 1"
    assert "0.0200 nats a token (from 2,048 tokens); budget 1.1 bytes" in lines["sensitivity"]
    assert lines["calibrated on"] == "builtin, chats.jsonl: 32 samples, 16,384 tokens"


def test_has_the_same_lines_where_nothing_is_known(full: Inspection, tmp_path: Path) -> None:
    empty = overview(inspect(write_folder(tmp_path, {})))
    assert [label for label, _ in empty] == [label for label, _ in overview(full)]
    assert dict(empty)["size"] == "- MB -> - MB"


def test_the_command_repeats_the_run(full: Inspection) -> None:
    line = command(full.record)
    assert line is not None
    assert shlex.split(line) == [
        *("quantkit", "calibrate", "tiny model", "-o", "OUT", "--recipe", "fp8-dynamic"),
        *("--data", "builtin", "--data", "chats.jsonl", "--samples", "32", "--seq-len", "512"),
        *("--kv", "fp8", "--seed", "7"),
    ]
    assert "--dtype float16" in (command(replace(full.record, dtype="float16")) or "")


def test_no_command_is_better_than_half_of_one(full: Inspection) -> None:
    assert command(replace(full.record, source_name=None)) is None
