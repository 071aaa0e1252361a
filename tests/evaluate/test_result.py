from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from quantkit.evaluate.report import make_table
from quantkit.evaluate.result import (
    Divergence,
    Measurement,
    Perplexity,
    Result,
    Setting,
    Thresholds,
)
from quantkit.evaluate.scores import TokenScores

NLL = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
OTHER = TokenScores(
    torch.tensor([1.5, 2.0, 4.25], dtype=torch.float64),
    torch.tensor([0.1, 0.3, 0.2], dtype=torch.float64),
    torch.tensor([True, False, True]),
)
SETTING = Setting(
    "c", "r", True, ["t.txt"], 1, {}, 4, 3, 8, 8, "not used by the tokenizer", "float32", "x"
)


def divergence() -> Divergence:
    found = Divergence.of(TokenScores(NLL), OTHER)
    assert found is not None
    return found


def result(thresholds: Thresholds = Thresholds()) -> Result:  # noqa: B008
    measurements = [Measurement(kv, Perplexity.of(OTHER), divergence()) for kv in ("none", "fp8")]
    return Result(SETTING, Perplexity.of(TokenScores(NLL)), measurements, thresholds)


def test_perplexity_and_its_error() -> None:
    found = Perplexity.of(TokenScores(NLL))
    assert found.perplexity == pytest.approx(math.exp(7 / 3))
    error = math.exp(7 / 3) * np.std([1, 2, 4], ddof=1) / math.sqrt(3)
    assert found.perplexity_standard_error == pytest.approx(error)
    single = Perplexity.of(TokenScores(NLL[:1]))
    assert (single.perplexity, single.perplexity_standard_error) == (pytest.approx(math.e), None)


def test_a_perplexity_beyond_a_float_is_infinite_and_null_in_json() -> None:
    scores = TokenScores(NLL * 1000, OTHER.kl, OTHER.agrees)
    found = Measurement("none", Perplexity.of(scores), Divergence.of(TokenScores(NLL), scores))
    assert found.perplexity.perplexity == math.inf
    assert found.to_json()["perplexity"] is None
    assert found.to_json()["mean_kl"] == pytest.approx(0.2)
    assert len(Thresholds(max_ppl_ratio=9.0).violations([found])) == 1


def test_divergence_and_its_errors() -> None:
    found = divergence()
    assert found.mean_kl == pytest.approx(0.2)
    assert found.mean_kl_standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert found.median_kl == 0.2
    assert found.p99_kl == pytest.approx(0.298)
    assert found.p999_kl == pytest.approx(0.2998)
    assert found.top1_agreement == pytest.approx(2 / 3)
    assert found.ppl_ratio == pytest.approx(math.exp(0.25))
    # Of the paired differences, not of the two perplexities.
    error = math.exp(0.25) * np.std([0.5, 0, 0.25], ddof=1) / math.sqrt(3)
    assert found.ppl_ratio_standard_error == pytest.approx(error)


def test_without_an_original_there_is_no_divergence() -> None:
    alone = TokenScores(NLL)
    assert Divergence.of(alone, alone) is None
    assert (
        Thresholds(max_kl=0.0).violations([Measurement("none", Perplexity.of(alone), None)]) == []
    )


def test_each_exceeded_limit_is_a_line() -> None:
    assert result(Thresholds(max_kl=0.21, max_ppl_ratio=1.3)).violations == []
    assert result(Thresholds(max_kl=0.1)).violations == [
        "mean KL is 0.2 with kv none, above --max-kl 0.1",
        "mean KL is 0.2 with kv fp8, above --max-kl 0.1",
    ]
    assert result(Thresholds(max_ppl_ratio=1.2)).violations[0] == (
        "perplexity ratio is 1.28403 with kv none, above --max-ppl-ratio 1.2"
    )


def test_json_has_every_number_flat_and_by_kv() -> None:
    value = json.loads(json.dumps(result(Thresholds(max_kl=0.1)).to_json()))
    assert value["kv"] == "none"
    assert value["mean_kl"] == value["measurements"]["none"]["mean_kl"] == pytest.approx(0.2)
    assert set(value["measurements"]) == {"none", "fp8"}
    assert value["reference_perplexity"] == pytest.approx(math.exp(7 / 3))
    assert (value["count"], value["window"], value["stride"]) == (3, 8, 8)
    assert value["thresholds"] == {"max_kl": 0.1, "max_ppl_ratio": None}
    assert len(value["violations"]) == 2


def test_the_table_has_a_column_for_each_model() -> None:
    table = make_table(result())
    headers = [column.header for column in table.columns]
    assert headers == ["", "original", "quantized, plain KV", "quantized, FP8 KV"]
    cells = [list(column.cells) for column in table.columns]
    assert cells[0][0] == "perplexity"
    assert cells[1][0].startswith("10.312 ±")
    assert cells[1][1:] == [""] * 6
    assert cells[2][2] == "0.20000 ± 0.05774"
    assert cells[2][6] == "66.67%"
