"""An Inspection in a terminal: the overview, then kinds, modules and layers as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from quantkit.inspection import words
from quantkit.inspection.groups import KindRow, layer_label, tier_label, worst_modules
from quantkit.inspection.inspection import Inspection
from quantkit.inspection.overview import overview
from quantkit.inspection.record import LayerRecord, ModuleRecord

MAX_MODULES = 60
"""Models with more modules are shown by kind, unless all are asked for."""
WRAPPED = "tiers"
"""The one column that gives way in a narrow terminal."""
CAPTION = "output dB: with plain rounding -> with the tiers; higher is better"
NUM_WORST_MODULES, NUM_WORST_LAYERS = 10, 5


def make_tables(inspection: Inspection, show_all: bool = False) -> list[Table]:
    """Return what a terminal shows, in order; a large model is summed up unless `show_all`."""
    record = inspection.record
    places = [(layer, module) for layer in record.layers for module in layer.modules]
    tables = [_overview_table(inspection)]
    if record.version is None and not any(module.is_measured for _, module in places):
        tables.append(_kind_table(inspection.kinds))
    elif show_all or len(places) <= MAX_MODULES:
        tables.append(_module_table("modules (SQNR)", places))
        tables.append(_layer_table("layers (SQNR, FP8 KV cache)", record.layers))
    else:
        worst = worst_modules(record, NUM_WORST_MODULES)
        tables.append(_kind_table(inspection.kinds))
        tables.append(
            _module_table(f"the {len(worst)} modules with the largest error (SQNR)", worst)
        )
        layers = _worst_layers(record.layers)
        tables.append(_layer_table("the worst and the flagged layers (SQNR, FP8 KV cache)", layers))
    for table in tables[1:]:
        _fix_widths(table)
    return [table for table in tables if table.row_count]


def _fix_widths(table: Table) -> None:
    """Let no column but the wrapped one become narrower than what is in it."""
    for column in table.columns:
        texts = [str(column.header), *map(str, column.cells)]
        if column.header == WRAPPED:
            parts = [word for text in texts for word in text.split()]
        else:
            parts = [line for text in texts for line in text.split("\n")]
        column.min_width = max(map(len, parts))


def _overview_table(inspection: Inspection) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in overview(inspection):
        table.add_row(label, text)
    return table


def _new_table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", padding=0)
    table.box, table.show_edge = box.SIMPLE_HEAD, False
    for column in left:
        table.add_column(column, no_wrap=column != WRAPPED)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _kind_table(rows: Sequence[KindRow]) -> Table:
    numbers = ["count\n(kept)", "MB", "weight\ndB", "output\ndB", "worst\ndB"]
    numbers += ["in\nlayer", "outlier\nratio", "clipped"]
    table = _new_table("kinds of modules (SQNR: medians)", ["modules"], numbers)
    for row in rows:
        table.add_row(
            row.kind,
            words.count(row.count) + (f" ({row.kept})" if row.kept else ""),
            _change(words.megabytes(row.bytes_before), words.megabytes(row.bytes_after)),
            words.number(row.weight_sqnr_db),
            _errors(row),
            words.number(row.worst_sqnr_db),
            words.text(row.worst_layer),
            words.number(row.outlier_ratio),
            words.count(row.num_clipped),
        )
    return table


def _module_table(title: str, places: Sequence[tuple[LayerRecord, ModuleRecord]]) -> Table:
    numbers = ("weight\ndB", "output\ndB", "outlier\nratio", "clipped", "predicted\nKL")
    table = _new_table(title, ["layer", "module", WRAPPED, "type"], numbers)
    for layer, module in places:
        table.add_row(
            layer_label(layer),
            _short_name(layer, module),
            tier_label(module) if module.tiers is not None else words.UNKNOWN,
            words.text(module.format),
            words.number(module.weight_sqnr_db),
            _errors(module),
            words.number(module.outlier_ratio),
            words.count(module.num_clipped),
            words.small(module.predicted_kl),
        )
    table.caption, table.caption_justify = CAPTION, "left"
    return table


def _layer_table(title: str, layers: Sequence[LayerRecord]) -> Table:
    numbers = ["output\ndB", "keys\ndB", "values\ndB", "attention\noutput dB"]
    numbers += ["key channel\nratio", "flagged"]
    table = _new_table(title, ["layer"], numbers)
    for layer in layers:
        kv = layer.kv
        cells = [words.UNKNOWN] * 5
        if kv is not None:
            errors = (kv.key_error_db, kv.value_error_db, kv.output_error_db)
            cells = [*map(words.number, errors), words.number(kv.key_channel_ratio)]
            cells.append("yes" if kv.flagged else "no")
        table.add_row(layer_label(layer), words.number(layer.output_sqnr_db), *cells)
    return table


def _short_name(layer: LayerRecord, module: ModuleRecord) -> str:
    """Name a module within its layer, by its last name alone where that is unique."""
    alike = [other for other in layer.modules if other.kind == module.kind]
    return module.kind if len(alike) == 1 else module.name.removeprefix(f"{layer.name}.")


def _errors(row: KindRow | ModuleRecord) -> str:
    """Output SQNR with plain rounding and with the tiers."""
    return _change(words.number(row.plain_output_sqnr_db), words.number(row.output_sqnr_db))


def _change(before: str, after: str) -> str:
    return f"{before} -> {after:>4}" if {before, after} != {words.UNKNOWN} else words.UNKNOWN


def _worst_layers(layers: Sequence[LayerRecord]) -> list[LayerRecord]:
    """The layers with the least output SQNR, and those whose keys are flagged, in order."""
    measured = [layer for layer in layers if layer.output_sqnr_db is not None]
    worst = sorted(measured, key=lambda layer: layer.output_sqnr_db or 0.0)[:NUM_WORST_LAYERS]
    return [layer for layer in layers if layer in worst or (layer.kv and layer.kv.flagged)]
