"""What the compiler said of a CUDA object: registers, memory and spills of every kernel.

Reads the logs that build_cuda.py keeps beside its objects. Used for the table of `make cuda` and by
tests/cuda/check_binaries.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel, by its mangled name, for one architecture; in bytes."""

    name: str
    arch: str
    registers: int
    shared: int
    stack: int
    spills: int  # stores and loads


def log_path(object_file: Path) -> Path:
    """Return where the messages of the compiler are: a line `seconds N`, then its output."""
    return object_file.with_suffix(".log")


def read_log(object_file: Path) -> tuple[float, list[Kernel]]:
    """Return the seconds that an object took to compile, and its kernels."""
    first, _, text = log_path(object_file).read_text(encoding="utf-8").partition("\n")
    return float(first.split()[1]), parse_ptxas(text)


def parse_ptxas(text: str) -> list[Kernel]:
    """Return the kernels that the output of `nvcc -Xptxas -v` tells of."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers([^\n]*)",
        re.S,
    )
    kernels = []
    for name, arch, stack, stores, loads, registers, rest in pattern.findall(text):
        shared = re.search(r"(\d+) bytes smem", rest)
        size = int(shared[1]) if shared else 0
        spills = int(stores) + int(loads)
        kernels.append(Kernel(name, arch, int(registers), size, int(stack), spills))
    return kernels


def summary(objects: Iterable[tuple[Path, tuple[str, ...], Path]]) -> str:
    """Return a table, a line for each file and architecture; takes (source, archs, object)."""
    lines = [f"{'file':44}{'arch':>6}{'seconds':>9}{'kernels':>9}{'registers':>11}{'spilled':>9}"]
    for source, archs, path in sorted(objects):
        seconds, kernels = read_log(path)
        shown = f"{seconds:.0f}"
        for arch in archs or ("host",):
            mine = [kernel for kernel in kernels if kernel.arch == arch]
            registers = max((kernel.registers for kernel in mine), default=0)
            spills = sum(kernel.spills for kernel in mine)
            lines.append(
                f"{source.name:44}{arch:>6}{shown:>9}{len(mine):>9}{registers:>11}{spills:>9}"
            )
            shown = ""  # one run of the compiler serves all architectures
    return "\n".join(lines)
