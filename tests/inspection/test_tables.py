from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.measure import Measurement

from quantkit.inspection import Inspection, inspect
from quantkit.inspection.tables import make_tables
from tests.inspection.documents import document, write_folder


def shown(inspection: Inspection, show_all: bool = False, width: int = 200) -> list[str]:
    """Return the tables as lines of text."""
    console = Console(file=io.StringIO(), width=width, markup=False)
    for table in make_tables(inspection, show_all):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def row_of(lines: list[str], *cells: str) -> str:
    return next(line for line in lines if line.split()[: len(cells)] == list(cells))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return inspect(write_folder(tmp_path_factory.mktemp("large"), document(10)))


def test_a_small_model_is_shown_by_module(full: Inspection) -> None:
    lines = shown(full)
    assert row_of(lines, "1", "q_proj").split() == [
        *("1", "q_proj", "range", "+", "compensation", "e4m3"),
        *("31.0", "30.0", "->", "34.0", "5.0", "3", "0.00200"),
    ]
    assert row_of(lines, "1", "down_proj", "keep").split()[3:] == [*"-----", "0.00300"]
    assert row_of(lines, "1", "26.0").split() == [
        *("1", "26.0", "20.0", "31.0", "28.0", "105.0", "yes"),
    ]


def test_a_large_model_is_shown_by_kind_with_its_worst(large: Inspection) -> None:
    lines = shown(large)
    assert any(line.startswith("kinds of modules (SQNR: medians)") for line in lines)
    assert row_of(lines, "q_proj", "10").split()[-4:] == ["33.0", "0", "13.0", "30"]
    assert row_of(lines, "down_proj", "10", "(1)")
    assert sum("o_proj plain rounding" in line for line in lines) == 10
    assert sum(line.endswith(("yes", "no")) for line in lines) == 5  # worst layers, one flagged


def test_all_shows_every_module_of_a_large_model(large: Inspection) -> None:
    lines = shown(large, show_all=True)
    assert sum("e4m3" in line for line in lines) == 69
    assert sum(line.endswith(("yes", "no")) for line in lines) == 10


def test_an_older_file_has_the_same_tables_with_dashes(older: Inspection) -> None:
    assert row_of(shown(older), "0", "q_proj").split() == [
        *("0", "q_proj", "-", "-", "31.0", "-", "-", "-", "-")
    ]


def test_a_usual_model_fits_80_columns(tmp_path: Path) -> None:
    value = document(30)
    for layer in value["layers"]:
        for module in layer["modules"]:
            module |= {"shape": [1536, 576], "bytes": 887_040, "num_clipped": 90}
    lines = shown(inspect(write_folder(tmp_path, value)), width=80)
    assert not [line for line in lines if "…" in line]


def test_no_number_is_cut_however_narrow(large: Inspection) -> None:
    console = Console(width=1000)
    tables = make_tables(large)
    needed = max(Measurement.get(console, console.options, table).minimum for table in tables)
    lines = shown(large, width=needed)
    assert not [line for line in lines if "…" in line]
    assert row_of(lines, "q_proj", "10").split() == [
        *("q_proj", "10", "0.0026", "->", "0.0019", "31.0", "30.0", "->", "37.5"),
        *("33.0", "0", "13.0", "30"),
    ]


def test_modules_of_one_kind_in_a_layer_have_longer_names(tmp_path: Path) -> None:
    value = document(1)
    value["layers"][0]["modules"] = [
        {"name": f"model.layers.0.mlp.experts.{n}.up_proj", "shape": [2, 2]} for n in range(2)
    ]
    lines = shown(inspect(write_folder(tmp_path, value)))
    assert row_of(lines, "0", "mlp.experts.0.up_proj")
    assert row_of(lines, "0", "mlp.experts.1.up_proj")


def test_markup_in_a_name_is_text(tmp_path: Path) -> None:
    value = document()
    value["source"]["name"] = "[red]model[/red]"
    assert "[red]model[/red]" in shown(inspect(write_folder(tmp_path, value)))[0]
