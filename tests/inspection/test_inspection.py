from __future__ import annotations

import json
from pathlib import Path

from quantkit.inspection import Inspection, inspect
from tests.inspection.documents import document, write_folder


def test_json_has_every_module_with_what_follows_from_its_facts(full: Inspection) -> None:
    value = json.loads(json.dumps(full.to_json(), allow_nan=False))
    assert value["path"] == str(full.record.folder)
    assert (value["recipe"], value["profile"]) == ("fp8-dynamic", "portable")
    modules = [module for layer in value["layers"] for module in layer["modules"]]
    assert len(modules) == 14
    q = modules[0]
    assert (q["kind"], q["gain_db"], q["bytes_before"], q["bytes"]) == ("q_proj", 3.0, 256, 192)
    assert value["layers"][1]["kv"]["flagged"] is True
    assert value["bytes_per_weight"] == full.bytes_per_weight
    assert {row["kind"] for row in value["kinds"]} == {module["kind"] for module in modules}


def test_json_of_an_older_checkpoint_has_nulls_in_the_same_places(
    full: Inspection, older: Inspection
) -> None:
    value, older_value = full.to_json(), older.to_json()
    assert value.keys() == older_value.keys()
    new, old = value["layers"][0]["modules"][0], older_value["layers"][0]["modules"][0]
    assert new.keys() == old.keys()
    assert (old["output_sqnr_db"], old["tiers"], old["bytes"]) == (None, None, None)
    json.dumps(older_value, allow_nan=False)


def test_warnings_are_those_of_calibration_and_what_the_numbers_say(full: Inspection) -> None:
    assert full.warnings == [
        "16 of 32 samples usable",
        "FP8 does not hold the keys of these layers well: 1",
    ]


def test_a_module_that_lost_is_named(tmp_path: Path) -> None:
    value = document()
    value["layers"][0]["modules"][0]["output_sqnr_db"] = 29.0
    value["layers"][0]["modules"][1]["output_sqnr_db"] = 29.95  # within chance
    warnings = inspect(write_folder(tmp_path, value, weights=True)).warnings
    lost = "worse than with plain rounding, in output SQNR: model.layers.0.self_attn.q_proj"
    assert warnings[-1] == lost


def test_no_layers_is_a_warning(tmp_path: Path) -> None:
    warnings = inspect(write_folder(tmp_path, {})).warnings
    assert any("lists no layers" in warning for warning in warnings)
