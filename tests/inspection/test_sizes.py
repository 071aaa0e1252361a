from __future__ import annotations

import json
from pathlib import Path

from quantkit.inspection.record import read_record
from quantkit.inspection.sizes import Rest, Sizes, read_sizes
from tests.inspection.documents import KEPT, document, older_document, write_folder


def sizes_of(folder: Path) -> Sizes:
    return read_sizes(read_record(folder))


def test_the_weight_files_decide_not_the_report(tmp_path: Path) -> None:
    value = document()
    value["layers"][0]["modules"][0]["bytes"] = 1
    folder = write_folder(tmp_path, value, weights=True)
    record, sizes = read_record(folder), sizes_of(folder)
    q, kept = record.modules[0], record.modules[-1]
    assert (sizes.before(q), sizes.after(q)) == (2 * 128, 128 + 4 * 16)
    assert (kept.name, sizes.after(kept)) == (KEPT, 2 * kept.num_weights)
    assert sizes.problem is None


def test_older_files_get_their_sizes_from_the_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, older_document(), weights=True)
    record, sizes = read_record(folder), sizes_of(folder)
    weights = sum(module.num_weights for module in record.modules)
    total = sum(module.num_weights + 4 * module.shape[0] for module in record.modules)
    assert sizes.bytes_per_weight(record.modules) == total / weights


def test_what_is_no_listed_module_is_summed_by_name_and_dtype(tmp_path: Path) -> None:
    rest = sizes_of(write_folder(tmp_path, document(), weights=True)).rest
    assert rest == (
        Rest("embed_tokens", "BF16", 1, 1600),
        Rest("norm", "BF16", 1, 16),
        Rest("k_scale", "F32", 2, 8),
    )


def test_without_weights_the_report_is_used_and_it_is_said(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, document())
    record, sizes = read_record(folder), sizes_of(folder)
    assert sizes.rest is None
    assert sizes.problem is not None
    assert "model.safetensors is missing" in sizes.problem
    assert sizes.after(record.modules[0]) == 128 + 4 * 16


def test_broken_weights_are_a_problem_not_the_end(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, document(), weights=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "truncated" in (sizes_of(folder).problem or "")


def test_bytes_a_weight_are_unknown_unless_all_sizes_are(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, older_document())
    assert sizes_of(folder).bytes_per_weight(read_record(folder).modules) is None


def test_a_float32_source_has_four_bytes_a_weight(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, document())
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    assert sizes_of(folder).before(read_record(folder).modules[0]) == 4 * 128
