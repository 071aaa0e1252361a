"""The model card: metadata that the Hub parses, facts from the report, quality only if measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from quantkit.export import export
from quantkit.shards import read_json, write_json
from tests.export.test_export import make

CARD = """---
license: apache-2.0
language: [en, de]
tags: [chat, small]
base_model: org/base
---
# The original
"""
QUALITY = {
    "measurements": {
        "none": {
            "mean_kl": 0.016966,
            "p99_kl": 0.16712,
            "top1_agreement": 0.93312,
            "ppl_ratio": 1.01332,
            "ppl_ratio_standard_error": 0.00164,
        }
    },
    "count": 12427, "data": ["/home/me/wiki.txt", "hf:org/name"], "window": 512,
    "stride": 512, "dtype": "float32",
    "activations": "quantized as an 8-bit engine does",
}  # fmt: skip


def card_of(source: Path, output: Path, **options: Any) -> ModelCard:
    export(source, output, progress=False, **options)
    return ModelCard.load(output / "README.md")


def test_licence_tags_and_languages_are_carried_over(tmp_path: Path) -> None:
    source = make(tmp_path)
    (source / "README.md").write_text(CARD)
    data = card_of(source, tmp_path / "out").data
    assert data.license == "apache-2.0"
    assert data.language == ["en", "de"]
    assert data.tags[:2] == ["chat", "small"]
    assert {"fp8", "quantkit", "compressed-tensors"} <= set(data.tags)
    assert data.base_model == "org/tiny"  # the report's source comes before its own base model
    assert data.base_model_relation == "quantized"
    assert data.pipeline_tag == "text-generation"
    assert (tmp_path / "out" / "README.source.md").read_text() == CARD


def test_the_original_card_outlives_a_second_export(tmp_path: Path) -> None:
    source = make(tmp_path)
    (source / "README.md").write_text(CARD)
    card_of(source, tmp_path / "one")
    assert card_of(tmp_path / "one", tmp_path / "two").data.license == "apache-2.0"
    assert (tmp_path / "two" / "README.source.md").read_text() == CARD


def test_a_local_source_gives_the_base_model_of_its_card(tmp_path: Path) -> None:
    source = make(tmp_path)
    (source / "README.md").write_text(CARD)
    report = read_json(source / "quantkit.json")
    write_json(source / "quantkit.json", {**report, "source": {"name": "my-folder"}})
    assert card_of(source, tmp_path / "out").data.base_model == "org/base"


def test_nothing_is_said_that_is_not_known(tmp_path: Path) -> None:
    card = card_of(make(tmp_path), tmp_path / "out")
    assert card.data.license is None
    assert card.data.language is None
    assert "Not measured" in card.text
    assert "mean KL |" not in card.text


def test_a_licence_file_without_a_card_is_pointed_to(tmp_path: Path) -> None:
    source = make(tmp_path)
    (source / "LICENSE").write_text("Do what you like.")
    data = card_of(source, tmp_path / "out").data
    assert data.license == "other"
    assert (tmp_path / "out" / "LICENSE").exists()


def test_a_card_that_cannot_be_parsed_is_kept_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(tmp_path)
    (source / "README.md").write_text("---\ntags: [a, b\n---\n")
    assert card_of(source, tmp_path / "out").data.license is None
    assert "cannot be read" in caplog.text
    assert (tmp_path / "out" / "README.source.md").exists()


def test_measured_quality_is_a_table(tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    file.write_text(json.dumps(QUALITY))
    text = card_of(make(tmp_path), tmp_path / "out", quality=file).text
    row = "| not quantized | 0.01697 | 0.167 | 93.3% | 1.0133 ± 0.0016 |"
    assert row in text
    assert "12,427 tokens of wiki.txt, hf:org/name; window 512" in text
    assert "Not measured" not in text


@pytest.mark.parametrize(
    ("format_name", "present", "absent"),
    [
        ("compressed-tensors", "vllm serve out\n", "trtllm-serve x"),
        ("fp8-block", "vllm serve out --kv-cache-dtype fp8", "trtllm-serve"),
        ("modelopt", "trtllm-serve out", "AutoModelForCausalLM"),
    ],
)
def test_commands_are_those_of_engines_that_load_it(
    tmp_path: Path, format_name: str, present: str, absent: str
) -> None:
    text = card_of(make(tmp_path), tmp_path / "out", format=format_name).text
    assert present in text
    assert absent not in text


def test_a_pushed_card_names_the_repository(tmp_path: Path, monkeypatch: Any) -> None:
    from tests.export.test_hub import FakeApi

    api = FakeApi()
    monkeypatch.setattr("quantkit.export.hub._client", lambda: api)
    result = export(make(tmp_path), tmp_path / "out", push="me/tiny-fp8", progress=False)
    assert result.url == "https://hub.example/me/tiny-fp8"
    text = (tmp_path / "out" / "README.md").read_text()
    assert "# tiny-fp8" in text
    assert "vllm serve me/tiny-fp8" in text
