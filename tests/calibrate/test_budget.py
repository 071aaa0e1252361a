"""The budget buys the most divergence that its bytes can buy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.calibrate import calibrate
from quantkit.calibrate.budget import choose_kept
from quantkit.checkpoint import open_checkpoint


class TestBudget:
    KL = {"a": 8.0, "b": 5.0, "c": 1.0}  # noqa: RUF012
    COST = {"a": 80, "b": 10, "c": 10}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("spare", "kept"),
        [(0, ""), (9, ""), (10, "b"), (20, "bc"), (90, "ab"), (100, "abc"), (-5, "")],
    )
    def test_a_byte_goes_where_it_buys_most(self, spare: int, kept: str) -> None:
        assert choose_kept(self.KL, self.COST, spare) == frozenset(kept)

    def test_what_costs_or_brings_nothing_is_not_kept(self) -> None:
        assert choose_kept({"a": 0.0, "b": 1.0}, {"a": 1, "b": 0}, 100) == frozenset()

    def test_a_run_keeps_within_its_budget_and_says_what_and_why(
        self, tiny_llama: Path, calibration_file: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        options = {"data": [str(calibration_file)], "samples": 8, "progress": False}
        calibrate(tiny_llama, out, budget=1.3, **options)
        record = json.loads((out / "quantkit.json").read_text())
        modules = [module for layer in record["layers"] for module in layer["modules"]]
        kept = [module["name"] for module in modules if module["tiers"] == ["keep"]]
        checkpoint = open_checkpoint(out)
        assert kept
        assert not set(kept) & set(checkpoint.quantized)
        assert set(kept) <= set(checkpoint.scheme.ignore)
        # Fused groups stay whole: engines run q/k/v and gate/up as one.
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            for name in kept:
                parent, _, leaf = name.rpartition(".")
                if leaf in group:
                    assert {f"{parent}.{member}" for member in group} <= set(kept)
        weights = sum(module["shape"][0] * module["shape"][1] for module in modules)
        assert sum(module["bytes"] for module in modules) <= 1.3 * weights
        assert all(m["predicted_kl"] > 0 for m in modules if m["name"].endswith("down_proj"))
        assert record["sensitivity"]["budget"] == 1.3
