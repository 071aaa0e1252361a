from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError
from quantkit.inspection.record import KvRecord, ModuleRecord, Sensitivity, read_record
from tests.inspection.documents import KEPT, document, older_document, write_folder


def test_every_fact_is_read(tmp_path: Path) -> None:
    record = read_record(write_folder(tmp_path, document()))
    assert (record.recipe_name, record.kv, record.profile) == ("fp8-dynamic", "fp8", "portable")
    assert record.sensitivity == Sensitivity(2048, 0.02, 1.1)
    assert record.data is not None
    assert record.data.sources == ("builtin", "chats.jsonl")
    assert [layer.number for layer in record.layers] == [0, 1]
    assert record.layers[1].kv == KvRecord(20.0, 31.0, 28.0, None, 105.0, flagged=True)
    q = record.layers[1].modules[0]
    assert (q.kind, q.shape, q.num_weights) == ("q_proj", (16, 8), 128)
    assert q.gain_db == 4.0
    assert q.top_input_channels[0] == (5, 10.0)
    kept = record.layers[1].modules[-1]
    assert (kept.name, kept.is_kept, kept.gain_db) == (KEPT, True, None)


def test_what_an_older_file_lacks_is_unknown_not_zero(tmp_path: Path) -> None:
    record = read_record(write_folder(tmp_path, older_document()))
    module = record.modules[0]
    assert module == ModuleRecord(module.name, (16, 8), weight_sqnr_db=31.0)
    assert (module.tiers, module.num_clipped, module.bytes) == (None, None, None)
    assert not module.is_kept
    assert (record.tiers, record.sensitivity, record.layers[0].kv) == (None, None, None)


def test_an_almost_empty_file_is_read_too(tmp_path: Path) -> None:
    record = read_record(write_folder(tmp_path, {}))
    assert (record.recipe_name, record.source_name, record.layers) == (None, None, ())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.self_attn.q_proj", "q_proj"),
        ("model.layers.0.mlp.experts.11.up_proj", "experts.up_proj"),
        ("model.layers.0.mlp.shared_experts.up_proj", "up_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_a_kind_is_the_name_within_a_layer(name: str, kind: str) -> None:
    assert ModuleRecord(name, (1, 1)).kind == kind


def test_text_cannot_steer_a_terminal(tmp_path: Path) -> None:
    value = document() | {"warnings": ["red \x1b[31m\nnext"]}
    assert read_record(write_folder(tmp_path, value)).warnings == ("red  [31m next",)


class TestErrors:
    def test_of_a_path_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="absent does not exist; give the folder"):
            read_record(tmp_path / "absent")

    def test_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="file is not a folder; give the folder"):
            read_record(tmp_path / "file")

    def test_of_a_folder_that_is_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no quantkit\.json, so it is not"):
            read_record(tmp_path)

    @pytest.mark.parametrize("content", [b'{"layers": [', b"[]", b"\xff\xfe", b""])
    def test_of_a_file_that_is_no_json_object(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "quantkit.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"quantkit\.json.*; restore the file, or cali"):
            read_record(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("layers", {}, r"layers is \{\}, expected a list"),
            ("layers", [3], r"layers\[0\] is 3, expected an object"),
            ("layers", [{}], r"has no layers\[0\]\.name"),
            ("layers", [{"name": "a", "modules": [{"name": "a"}]}], r"no .*modules\[0\]\.shape"),
            ("layers", [{"name": "a", "output_sqnr_db": "9"}], r"output_sqnr_db is '9', expected"),
            ("layers", [{"name": "a", "kv": {"flagged": 1}}], r"kv\.flagged is 1, expected true"),
            ("source_bytes", -1, "source_bytes is -1, expected an integer >= 0"),
            ("source_bytes", True, "source_bytes is True, expected an integer"),
            ("recipe", {"name": 5}, r"recipe\.name is 5, expected text"),
            ("tiers", {"range": "yes"}, r"tiers\.range is 'yes', expected true or false"),
            ("sensitivity", {"budget": float("nan")}, "budget is nan, expected a finite number"),
            ("warnings", "none", "warnings is 'none', expected a list"),
        ],
    )
    def test_of_a_value_that_we_never_write(
        self, tmp_path: Path, key: str, value: Any, message: str
    ) -> None:
        folder = write_folder(tmp_path, document() | {key: value})
        with pytest.raises(CheckpointError, match=rf"quantkit\.json.*{message}"):
            read_record(folder)

    @pytest.mark.parametrize("pair", [[1], [1, 2, 3], 5, ["a", 1.0], [1, None]])
    def test_of_an_outlier_channel(self, tmp_path: Path, pair: Any) -> None:
        value = document()
        value["layers"][0]["modules"][0]["top_input_channels"] = [pair]
        with pytest.raises(CheckpointError, match=r"top_input_channels is .*, expected"):
            read_record(write_folder(tmp_path, value))

    def test_show_no_more_than_a_line(self, tmp_path: Path) -> None:
        value = document() | {"profile": [*"a\n" * 1000]}
        with pytest.raises(CheckpointError) as caught:
            read_record(write_folder(tmp_path, value))
        assert len(str(caught.value)) < 200 + len(str(tmp_path))
        assert "\n" not in str(caught.value)
        assert json.loads((tmp_path / "quantkit.json").read_text()) == value
