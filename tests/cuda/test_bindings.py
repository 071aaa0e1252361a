"""The C++ ops and their schemas in Python: registration does not compare them, so this does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SIGNATURES = {"CPU": "csrc/cpu/ops.h", "CUDA": "csrc/cuda/ops.h"}
BINDINGS = {"CPU": "csrc/bindings.cpp", "CUDA": "csrc/cuda/bindings.cpp"}
TYPES = {
    "Tensor": "Tensor",
    "std::vector<Tensor>": "List[Tensor]",
    "std::vector<int64_t>": "List[int]",
    "int64_t": "int",
    "double": "float",
    "bool": "bool",
    "std::string": "str",
    "ScalarType": "int",
}

for path in sorted((ROOT / "quantkit").glob("*ops.py")):
    importlib.import_module(f"quantkit.{path.stem}")
importlib.import_module("quantkit.bench.gpu_tiles")  # an op that only the bench needs


def schema_type(cpp: str) -> str:
    optional = re.fullmatch(r"std::optional<(.*)>", cpp)
    return f"Optional[{TYPES[optional[1]]}]" if optional else TYPES[cpp]


def returned(cpp: str) -> list[str]:
    if cpp == "void":
        return []
    several = re.fullmatch(r"std::tuple<(.*)>", cpp)
    return [schema_type(word) for word in (several[1].split(", ") if several else [cpp])]


def declarations(header: str) -> dict[str, tuple[list[str], list[tuple[str, str]]]]:
    """Return {op: (types returned, [(name, type) of each argument])} of a header."""
    text = re.sub(r"//.*", "", (ROOT / header).read_text())
    text = re.sub(r"torch::(stable|headeronly)::", "", text)
    found = {}
    for result, name, inside in re.findall(r"^([\w:<>, ]+?) (\w+)\(([^)]*)\);", text, re.M):
        arguments = [" ".join(word.split()).rpartition(" ") for word in inside.split(",")]
        found[name] = (returned(result), [(arg, schema_type(cpp)) for cpp, _, arg in arguments])
    return found


def registered(device: str) -> list[str]:
    return re.findall(
        r'impl\("(\w+)", TORCH_BOX\(&[\w:]*::\1\)', (ROOT / BINDINGS[device]).read_text()
    )


@pytest.mark.parametrize("device", SIGNATURES)
def test_every_declared_op_is_registered_once(device: str) -> None:
    assert sorted(registered(device)) == sorted(declarations(SIGNATURES[device]))
    assert (ROOT / BINDINGS[device]).read_text().count("library.impl") == len(registered(device))


@pytest.mark.parametrize(
    ("device", "name"), [(device, name) for device in SIGNATURES for name in registered(device)]
)
def test_an_op_has_the_signature_of_its_schema(device: str, name: str) -> None:
    schema = getattr(torch.ops.quantkit, name).default._schema
    returns, arguments = declarations(SIGNATURES[device])[name]
    assert [str(value.type) for value in schema.returns] == returns
    assert [(argument.name, str(argument.type)) for argument in schema.arguments] == arguments
