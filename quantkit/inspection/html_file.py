"""HTML pages of one file: house style, nothing fetched, written whole or not at all.

`base.html` holds the style and `macros.html` the tables; a page's own template extends the first.
Needs the optional extra `report` (matplotlib and jinja2).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from quantkit.errors import QuantKitError, UnsupportedError
from quantkit.staging import staged_file

SUFFIXES = (".html", ".htm")


def check_output(output: Path) -> None:
    """Raise before any work if the page cannot be made or must not be written there.

    UnsupportedError without the extra, QuantKitError for a name that is no page's.
    """
    absent = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if absent:
        raise UnsupportedError(
            f"an HTML report needs {' and '.join(absent)}; pip install 'quantkit[report]'"
        )
    if output.suffix.lower() not in SUFFIXES:
        raise QuantKitError(
            f"--output is {output}, expected a name that ends in .html; the report is a web page"
        )
    if output.is_dir():
        raise QuantKitError(f"--output {output} is a folder; give the name of a file in it")


def write_html(page: str, output: Path) -> None:
    """Write a page to `output`, replacing an earlier one only when the new one is complete.

    Raises QuantKitError if the place cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(output) as file:
            file.write(page.encode())
    except OSError as error:
        raise QuantKitError(
            f"cannot write {output}: {error.strerror}; choose another --output"
        ) from None


def render(package: str, template: str, values: Mapping[str, Any]) -> str:
    """Return a page from a template that lies in `package`, with the colours of the charts."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    from quantkit.inspection.drawing import PALETTE

    def load(name: str) -> str:
        folder = package if name == template else __package__
        return resources.files(folder).joinpath(name).read_text(encoding="utf-8")

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=FunctionLoader(load),
    )
    environment.globals["palette"] = PALETTE
    return environment.get_template(template).render(values)
