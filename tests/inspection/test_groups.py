from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.inspection import Inspection, groups, inspect
from quantkit.inspection.groups import ChannelRow, SensitivityRow, TierRow
from quantkit.inspection.record import ModuleRecord
from tests.inspection.documents import document, write_folder


def test_kinds_have_medians_and_their_worst_module(full: Inspection) -> None:
    rows = {row.kind: row for row in full.kinds}
    assert list(rows)[:3] == ["q_proj", "k_proj", "v_proj"]
    q = rows["q_proj"]
    assert (q.count, q.kept, q.bytes_before, q.bytes_after) == (2, 0, 512, 384)
    assert (q.plain_output_sqnr_db, q.output_sqnr_db) == (30.0, 33.5)
    assert (q.worst_sqnr_db, q.worst_layer) == (33.0, "0")
    assert (q.outlier_ratio, q.num_clipped) == (5.0, 6)
    assert (rows["down_proj"].kept, rows["down_proj"].output_sqnr_db) == (1, 33.0)


def test_without_output_errors_the_worst_is_by_weight(older: Inspection) -> None:
    assert {row.worst_sqnr_db for row in older.kinds} == {31.0}
    assert {row.output_sqnr_db for row in older.kinds} == {None}


def test_output_and_weight_errors_are_never_compared(tmp_path: Path) -> None:
    value = document()
    unmeasured = value["layers"][0]["modules"][0]
    unmeasured |= {"output_sqnr_db": None, "weight_sqnr_db": 1.0}
    record = inspect(write_folder(tmp_path, value)).record
    worst = groups.worst_modules(record, 3)
    assert unmeasured["name"] not in [module.name for _, module in worst]
    assert worst[0][1].kind == "o_proj"


def test_what_is_kept_is_not_among_the_worst(full: Inspection) -> None:
    worst = groups.worst_modules(full.record, 100)
    assert len(worst) == 13
    assert not any(module.is_kept for _, module in worst)


def test_tiers_are_rows_by_what_is_in_force(full: Inspection) -> None:
    rows = {row.tiers: row for row in full.tiers}
    assert list(rows) == ["range + compensation", "plain rounding", "keep"]
    assert rows["plain rounding"] == TierRow("plain rounding", 2, 256, 0.0, 0.0, 0.0)
    assert rows["keep"] == TierRow("keep", 1, 192, None, None, None)
    tiered = rows["range + compensation"]
    assert (tiered.count, tiered.min_gain_db, tiered.max_gain_db) == (11, 3.0, 4.0)


def test_tiers_of_an_older_file_are_not_plain_rounding(older: Inspection) -> None:
    assert [row.tiers for row in older.tiers] == ["not recorded"]


def test_a_fused_group_counts_once(full: Inspection) -> None:
    assert full.sensitivity[0] == SensitivityRow("0", "gate/up_proj", 0.004, 384, False)
    assert [row.modules for row in full.sensitivity].count("q/k/v_proj") == 2
    assert sum(row.predicted_kl for row in full.sensitivity) == pytest.approx(0.02)
    kept = [(row.layer, row.modules) for row in full.sensitivity if row.is_kept]
    assert kept == [("1", "down_proj")]


def test_all_experts_of_a_layer_count_once(tmp_path: Path) -> None:
    value = document(1)
    value["layers"][0]["modules"] = [
        {"name": f"layers.0.mlp.experts.{n}.{kind}", "shape": [2, 2], "predicted_kl": 0.5}
        for n in range(3)
        for kind in ("gate_proj", "up_proj", "down_proj")
    ]
    (row,) = inspect(write_folder(tmp_path, value)).sensitivity
    assert row == SensitivityRow("0", "experts.gate/up/down_proj", 0.5, 36, False)


def test_modules_that_read_one_input_are_named_together(full: Inspection) -> None:
    rows = groups.inputs(full.record)
    names = [row.modules for row in rows if row.layer.number == 0]
    assert names == ["q/k/v_proj", "o_proj", "gate/up_proj", "down_proj"]
    assert [row.amax for row in rows if row.modules == "down_proj"] == [1000.0]


def test_experts_are_one_input_by_the_widest(tmp_path: Path) -> None:
    value = document(1)
    value["layers"][0]["modules"] = [
        {"name": f"model.layers.0.mlp.experts.{n}.{kind}", "shape": [2, 2], "input_amax": float(n)}
        for n in range(3)
        for kind in ("gate_proj", "up_proj")
    ]
    (row,) = groups.inputs(inspect(write_folder(tmp_path, value)).record)
    assert (row.modules, row.amax) == ("experts.gate/up_proj", 2.0)


def test_a_channel_is_listed_once_where_it_stands_out_most(full: Inspection) -> None:
    assert full.channels[0] == ChannelRow("0", "down_proj", 5, 10.0, 50.0, 1)
    assert ChannelRow("0", "q/k/v_proj", 5, 10.0, 10.0, 2) in full.channels
    # The ratio of others follows from their RMS; the fourth largest of an input is not listed.
    assert ChannelRow("0", "down_proj", 3, 4.0, 20.0, 1) in full.channels
    assert not [row for row in full.channels if row.channel == 0]
    places = [(row.modules, row.channel) for row in full.channels]
    assert len(places) == len(set(places)) == 12


@pytest.mark.parametrize(
    ("kinds", "label"),
    [
        (["q_proj", "k_proj", "v_proj"], "q/k/v_proj"),
        (["down_proj"], "down_proj"),
        (["w1", "w3"], "w1/w3"),
        (["qkv_proj", "fc1"], "qkv_proj/fc1"),
        (["experts.0.gate_proj", "experts.0.up_proj"], "experts.gate/up_proj"),
    ],
)
def test_joined_kinds_share_their_ending(kinds: list[str], label: str) -> None:
    assert groups.join_kinds([ModuleRecord(f"layer.{kind}", (1,)) for kind in kinds]) == label
