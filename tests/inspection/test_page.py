from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quantkit.errors import QuantKitError, UnsupportedError
from quantkit.inspection import Inspection, inspect
from quantkit.inspection.page import render_page, write_page
from tests.inspection.documents import document, write_folder

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Checks that tags are closed in order, and collects ids, links and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


@pytest.fixture(scope="module")
def page(full: Inspection) -> str:
    return render_page(full)


def test_the_page_is_well_formed_and_fetches_nothing(page: str) -> None:
    found = check(page)
    assert len(found.ids) == len(set(found.ids))
    assert found.links
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert "<script" not in page
    assert not re.search(r"https?:|@import|url\((?!#)", page)


def test_the_page_has_every_part(page: str, full: Inspection) -> None:
    sections = ["error", "tiers", "ranges", "bytes", "sensitivity", "kv", "modules", "reproduce"]
    assert re.findall(r'<section id="(\w+)"', page) == sections
    assert page.count("<svg ") == 6
    assert page.count("<figcaption>") == 6
    assert 'class="absent">' not in page
    text = " ".join("".join(check(page).text).split())
    assert "16 of 32 samples usable" in text
    assert "quantkit calibrate 'tiny model' -o OUT" in text
    for layer in full.record.layers:
        for module in layer.modules:
            assert module.name.removeprefix(f"{layer.name}.") in text


def test_the_page_is_readable_in_light_and_dark(page: str) -> None:
    dark = page[page.index("prefers-color-scheme: dark") : page.index("box-sizing")]
    used = set(re.findall(r"var\((--\w+(?:-\w+)*)\)", page))
    light = page[page.index(":root") : page.index("prefers-color-scheme: dark")]
    for variable in used:
        assert f"{variable}: " in light
        assert f"{variable}: " in dark or variable == "--font"


def test_an_older_checkpoint_says_what_it_lacks(older: Inspection) -> None:
    page = render_page(older)
    check(page)
    assert page.count("<svg ") == 2
    assert page.count("Calibrate again with this version") == 4


def test_an_empty_report_makes_a_page(tmp_path: Path) -> None:
    page = render_page(inspect(write_folder(tmp_path, {})))
    check(page)
    assert "lists no layers" in page


def test_a_recipe_without_a_kv_cache_misses_nothing(tmp_path: Path) -> None:
    value = document()
    value["recipe"]["kv"] = "none"
    for layer in value["layers"]:
        del layer["kv"]
    page = render_page(inspect(write_folder(tmp_path, value)))
    assert "leaves the KV cache as it is" in page
    assert "Calibrate again" not in page


def test_names_are_text_not_markup(tmp_path: Path) -> None:
    value = document()
    value["source"]["name"] = value["recipe"]["name"] = "<script>alert(1)</script>"
    value["warnings"] = ['"><img src=x onerror=alert(1)>']
    value["layers"][0]["modules"][0]["name"] = "model.layers.0.<b>$x$"
    page = render_page(inspect(write_folder(tmp_path, value)))
    check(page)
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>" not in page


def test_the_same_checkpoint_gives_the_same_page(page: str, full: Inspection) -> None:
    assert render_page(full) == page


class TestWritePage:
    def test_creates_folders_and_replaces_an_earlier_page(
        self, page: str, full: Inspection, tmp_path: Path
    ) -> None:
        output = tmp_path / "new" / "report.html"
        write_page(full, output)
        output.write_text("earlier")
        write_page(full, output)
        assert output.read_text() == page
        assert list(output.parent.iterdir()) == [output]

    def test_a_failure_leaves_the_earlier_page(
        self, full: Inspection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = tmp_path / "report.html"
        output.write_text("earlier")

        def full_disk(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full_disk)
        with pytest.raises(QuantKitError, match=r"report\.html: No space left on device; choose"):
            write_page(full, output)
        assert output.read_text() == "earlier"
        assert list(tmp_path.iterdir()) == [output]

    @pytest.mark.parametrize("name", ["report", "model.safetensors", "report.html.txt"])
    def test_only_a_page_may_be_written(self, full: Inspection, tmp_path: Path, name: str) -> None:
        with pytest.raises(QuantKitError, match=r"expected a name that ends in \.html"):
            write_page(full, tmp_path / name)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_is_refused(self, full: Inspection, tmp_path: Path) -> None:
        (tmp_path / "a.html").mkdir()
        with pytest.raises(QuantKitError, match=r"a\.html is a folder; give the name of a file"):
            write_page(full, tmp_path / "a.html")

    def test_a_parent_that_is_a_file_is_refused(self, full: Inspection, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(QuantKitError, match=r"cannot write .*a\.html: .*; choose another"):
            write_page(full, tmp_path / "file" / "a.html")

    def test_a_missing_extra_is_one_line_that_says_how_to_get_it(
        self, full: Inspection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name)
        )
        with pytest.raises(UnsupportedError, match=r"needs matplotlib; pip install 'quantkit\[re"):
            write_page(full, tmp_path / "a.html")
