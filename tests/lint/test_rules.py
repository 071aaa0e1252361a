"""Every rule: one fault in a good checkpoint gives that rule's finding, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantkit.lint import lint, rules
from tests.lint import cases_config, cases_files, cases_tensors
from tests.lint.damage import Case
from tests.lint.folders import ALL, BASES

CASES = [
    *cases_files.STRUCTURE,
    *cases_config.METHOD,
    *cases_config.COMPRESSED,
    *cases_config.OTHER_CONTAINERS,
    *cases_config.IGNORE,
    *cases_tensors.SCALES,
    *cases_tensors.KV,
    *cases_tensors.SHAPES,
    *cases_files.MODEL,
    *cases_files.SIDE_FILES,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.base}")
def test_one_fault_is_one_finding(case: Case, tmp_path: Path) -> None:
    make, engines = BASES[case.base]
    draft = make()
    case.damage(draft)
    asked = tuple(dict.fromkeys((*engines, *case.engines)))
    report = lint(draft.save(tmp_path), asked, case.tensor_parallel)
    expected = (case.rule, case.severity)
    mine = [f for f in report.findings if (f.rule, f.severity) == expected]
    others = {finding.rule for finding in report.findings if finding not in mine}
    assert len(mine) == case.count, report.findings  # one cause, however many places
    assert others <= {case.rule, *case.also}, report.findings
    named = {engine for finding in mine for engine in finding.engines}
    assert named == {engine for engine in case.engines if engine in asked}
    if case.severity == "error":
        assert not report.ok
    if case.place:
        assert mine[0].places[0] == case.place
    assert all(finding.problem and finding.places for finding in report.findings)


def test_every_rule_has_a_case() -> None:
    names = {
        call.args[0].value
        for path in Path(rules.__path__[0]).glob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("error", "warning", "note")
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(names) > 60
    elsewhere = {"shard-damaged", "tensor-twice"}
    assert names - {case.rule for case in CASES} == elsewhere


@pytest.mark.parametrize("cut", [4, 100, 5000, -1], ids=str)
def test_a_truncated_shard_is_one_finding(cut: int, tmp_path: Path) -> None:
    make, _ = BASES["dynamic"]
    shard = make().save(tmp_path) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut])
    (finding, *others) = lint(tmp_path).findings
    assert (finding.rule, finding.engines) == ("shard-damaged", ALL)
    assert "truncated" in finding.problem
    assert not others


def test_a_tensor_in_two_shards_is_one_finding(tmp_path: Path) -> None:
    make, _ = BASES["dynamic"]
    draft = make()
    draft.split()
    draft.save(tmp_path)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    extra = {"lm_head.weight": draft.tensors["lm_head.weight"]}
    save_file({**load_file(first), **extra}, first, metadata={"format": "pt"})
    rules = {finding.rule: finding for finding in lint(tmp_path).findings}
    assert "lm_head.weight" in rules["tensor-twice"].places
    assert first.name in rules["tensor-twice"].problem
    assert second.name in rules["tensor-twice"].problem
