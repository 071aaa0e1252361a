"""The direction of imports: the runtime never sees calibration, nor calibration the runtime."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = (
    "errors", "numerics", "scheme", "containers", "staging", "tensor_file", "shards", "side_files",
    "quantized_weight", "checkpoint", "config_sizes", "model_names", "experts", "linears",
    "tokenizer_check",
)  # fmt: skip
OPS = (
    "extension", "op_checks", "outliers", "gate_ops", "ops", "dense_ops", "attention_ops",
    "cache_ops", "row_ops", "scaled_ops", "block_ops", "sampling_ops", "decoder_ops", "head_ops",
    "expert_ops", "probe_ops", "qkv_ops", "rounding_ops", "moment_ops",
)  # fmt: skip
RUNTIME = (
    "errors", "numerics", "scheme", "shards", "quantized_weight", "checkpoint", "model_names",
    "experts", "linears", "tokenizer_check", *OPS, "runtime",
)  # fmt: skip
EVERYTHING = (
    *SHARED,
    "calibrate",
    *OPS,
    "runtime",
    "speculative",
    "load",
    "export",
    "evaluate",
    "inspection",
    "lint",
    "bench",
    "cli",
)

HEAVY = {"transformers", "datasets", "accelerate", "gguf", "huggingface_hub"}

ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "numerics": ("errors",),
    "scheme": ("errors", "numerics"),
    "staging": ("errors",),
    "tensor_file": ("errors", "staging"),
    "shards": ("errors", "staging", "tensor_file"),
    "side_files": ("staging",),
    "containers": ("errors", "numerics", "scheme", "shards", "containers"),
    "kv_scales": ("errors", "containers"),
    "config_sizes": ("errors",),
    "quantized_weight": ("numerics", "scheme"),
    "checkpoint": (
        "errors",
        "quantized_weight",
        "scheme",
        "containers",
        "kv_scales",
        "shards",
        "config_sizes",
    ),
    "model_names": (),
    "tokenizer_check": (),
    "experts": ("model_names",),
    "linears": ("errors",),
    "calibrate": (*SHARED, "rounding_ops", "moment_ops", "calibrate"),
    "extension": (),
    "op_checks": ("errors",),
    "outliers": ("op_checks",),
    "gate_ops": ("errors", "extension", "op_checks"),
    "ops": ("errors", "numerics", *OPS),
    "dense_ops": ("errors", "numerics", *OPS),
    "attention_ops": ("errors", "numerics", *OPS),
    "cache_ops": ("errors", "numerics", *OPS),
    "row_ops": ("errors", "numerics", *OPS),
    "scaled_ops": ("errors", "numerics", *OPS),
    "block_ops": ("errors", "numerics", *OPS),
    "sampling_ops": OPS,
    "decoder_ops": ("errors", "numerics", *OPS),
    "head_ops": OPS,
    "expert_ops": OPS,
    "probe_ops": OPS,
    "qkv_ops": OPS,
    "rounding_ops": ("numerics", "extension", "op_checks"),
    "moment_ops": ("extension", "op_checks"),
    "runtime": RUNTIME,
    "speculative": (*RUNTIME, "staging", "speculative"),
    "load": (*RUNTIME, "speculative"),
    "export": (*SHARED, "calibrate", "inspection", "lint", "export"),
    # The report is drawn in the style of the one that inspection makes.
    "evaluate": (*SHARED, "calibrate", *OPS, "runtime", "inspection", "evaluate"),
    "inspection": (
        "errors",
        "shards",
        "staging",
        "scheme",
        "containers",
        "checkpoint",
        "inspection",
    ),
    "lint": ("errors", "scheme", "shards", "tensor_file", "lint"),
    "bench": (*SHARED, "calibrate", *OPS, "runtime", "bench"),
    "cli": (*EVERYTHING, "__init__"),
    "__main__": ("cli",),
    "__init__": EVERYTHING,  # lazily, see the test of what importing loads
}
"""What the modules below quantkit.X may import, each an X of its own. A new edge is a decision."""


def source_files() -> list[Path]:
    """Files of the package; calibrate/ under its own folder, not through the link."""
    package = [
        path
        for path in sorted((ROOT / "quantkit").rglob("*.py"))
        if path.relative_to(ROOT / "quantkit").parts[0] != "calibrate"
    ]
    return package + sorted((ROOT / "calibrate").rglob("*.py"))


def part_of(path: Path) -> str:
    """Return X of quantkit.X for a file."""
    first, *rest = path.relative_to(ROOT).parts
    return "calibrate" if first == "calibrate" else Path(rest[0]).stem


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield all imported module names, those inside functions too, and none for type checkers."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, f"line {node.lineno}: relative import"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                yield from imported_modules(ast.Module(node.orelse, type_ignores=[]))
            case _:
                yield from imported_modules(node)


def parts_imported_by(path: Path) -> set[str]:
    names = imported_modules(ast.parse(path.read_text(encoding="utf-8")))
    parts = {name.split(".")[1] for name in names if name.startswith("quantkit.")}
    modules = {part_of(file) for file in source_files()}
    # `from quantkit import load_fp8` goes through the package's own __init__.
    return {part if part in modules else "__init__" for part in parts}


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_in_the_allowed_directions(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"quantkit.{part} is new: decide what it may import, in ALLOWED"
    new = parts_imported_by(path) - set(ALLOWED[part])
    assert not new, f"{path.relative_to(ROOT)} imports {sorted(new)} of quantkit"


def test_the_walk_sees_imports_in_functions_and_not_those_for_type_checkers() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import hidden\nelse:\n    import seen\n"
        "def f():\n    try:\n        from a.b import c\n    except ImportError:\n        import d\n"
    )
    assert set(imported_modules(tree)) == {"typing.TYPE_CHECKING", "seen", "a.b.c", "d"}


def test_calibrate_is_the_top_level_folder_under_one_name() -> None:
    module = importlib.import_module("quantkit.calibrate")
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / "calibrate"
    assert (ROOT / "quantkit" / "calibrate").is_symlink()
    assert (ROOT / "quantkit" / "calibrate").readlink() == Path("../calibrate")


@pytest.mark.parametrize("folder", ["quantkit", "calibrate", "examples", "tests"])
def test_no_file_imports_calibrate_under_another_name(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        names = set(imported_modules(ast.parse(path.read_text(encoding="utf-8"))))
        wrong = [name for name in names if name.split(".")[0] == "calibrate"]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}; say quantkit.calibrate"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("quantkit", {"torch", *HEAVY}),
        ("quantkit.cli.main", {"torch", *HEAVY}),
        ("quantkit.calibrate", HEAVY),
        ("quantkit.inspection", {*HEAVY, "matplotlib", "jinja2"}),
        ("quantkit.lint", {*HEAVY, "rich"}),
        ("quantkit.runtime.model", {*HEAVY, "quantkit.calibrate"}),
    ],
)
def test_importing_loads_no_library_before_it_is_needed(module: str, absent: set[str]) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert not absent & set(result.stdout.split())
