from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import QuantKitError
from quantkit.evaluate import Result, TaskResult
from quantkit.evaluate.distribution import Distribution
from quantkit.evaluate.page import render_page, write_page
from quantkit.evaluate.result import Measurement, Perplexity, Thresholds
from quantkit.evaluate.scores import TokenScores
from tests.evaluate import test_result, test_task_result

VOID = {"meta", "path", "use", "rect", "br"}


@pytest.fixture(scope="module")
def result() -> Result:
    kl = np.geomspace(1e-5, 2.0, 200)
    context = np.arange(1, 201)
    measurements = [
        Measurement(
            kv,
            Perplexity.of(test_result.OTHER),
            test_result.divergence(),
            Distribution.of(factor * kl, context),
        )
        for kv, factor in (("none", 1.0), ("fp8", 2.0))
    ]
    original = Perplexity.of(TokenScores(test_result.NLL))
    return Result(test_result.SETTING, original, measurements, Thresholds(max_kl=0.1))


@pytest.fixture(scope="module")
def scored() -> TaskResult:
    return test_task_result.result((1.0, 1.0, 0.0), (1.0, 0.0, 0.0), max_drop=0.2)


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_is_well_formed_and_fetches_nothing(result: Result, scored: TaskResult) -> None:
    page = render_page(result, scored)
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"https?:|@import|url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_page_has_every_number_and_chart(result: Result, scored: TaskResult) -> None:
    page = render_page(result, scored)
    assert page.count("<svg ") == page.count("<figcaption>") == 3
    for text in (
        "10.312 ±",  # the original's perplexity
        "0.20000 ± 0.05774",  # mean KL
        "99.9 % KL",
        "-0.3333 ± 0.3333",  # paired
        "mean KL is 0.2 with kv fp8, above --max-kl 0.1",
        "acc of t is 0.3333",
        "quantized less original",
        "128-200",  # tokens before the predicted one
    ):
        assert text in page, text


def test_text_and_tasks_make_a_page_each(result: Result, scored: TaskResult) -> None:
    text, tasks = render_page(result, None), render_page(None, scored)
    assert ('id="text"' in text, 'id="tasks"' in text) == (True, False)
    assert ('id="text"' in tasks, 'id="tasks"' in tasks) == (False, True)
    assert (text.count("<svg "), tasks.count("<svg ")) == (2, 1)


def test_perplexity_alone_has_no_chart() -> None:
    alone = Measurement("none", Perplexity.of(TokenScores(test_result.NLL)), None)
    page = render_page(Result(test_result.SETTING, None, [alone]), None)
    assert "<svg " not in page
    assert "10.312 ±" in page


def test_scores_of_another_scale_are_in_the_table_only() -> None:
    page = render_page(None, test_task_result.result((900.0, 800.0), (950.0, 700.0)))
    assert "<svg " not in page
    assert "825.0000" in page


def test_charts_follow_the_theme(result: Result, scored: TaskResult) -> None:
    page = render_page(result, scored)
    charts = "".join(re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL))
    assert "var(--s1)" in charts
    assert set(re.findall(r"#[0-9a-f]{6}", charts)) <= {"#000000", "#ffffff"}


def test_the_same_results_give_the_same_page(result: Result, scored: TaskResult) -> None:
    assert render_page(result, scored) == render_page(result, scored)


def test_a_failure_leaves_the_earlier_page(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(result, None, path)
    earlier = path.read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantKitError, match="cannot write"):
        write_page(result, None, tmp_path / "file" / "report.html")
    assert path.read_text() == earlier
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "report.html"]
