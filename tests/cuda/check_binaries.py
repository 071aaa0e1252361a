"""`make cuda-check`: reads the compiled CUDA kernels, and fails where they are not what was meant.

No GPU is needed. Every kernel for every architecture must store something, must not spill beyond
what was reviewed, and must hold the instructions of its family: matrix instructions, wide loads,
hardware conversions. One experiment compiled without a warning to a kernel that did nothing at all.
The library must load beside a torch with CUDA, and need nothing that such a torch does not have.

Instruction counts are kept beside the objects, whose names have a hash of their sources.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import build_cuda
from ptxas_log import Kernel, read_log

LIBRARY = build_cuda.ROOT / "quantkit" / "_cuda.abi3.so"
TOOLS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"  # of two nvidia wheels

STORE = r"(ST|STG|UTMASTG|RED|REDG|ATOM|ATOMG)(\.|$)"
WIDE_LOAD = r"LDG\..*128"
READ_ONLY_LOAD = r"LDG\..*CONSTANT"
MATRIX = r"HMMA\.16816\.F32"
DECODE = r"F2FP\.F16\.E4M3\.UNPACK_B"
ENCODE = r"F2FP\.SATFINITE\.E4M3\.F32\.PACK_AB"
DOUBLE = r"(D(ADD|MUL|FMA|SETP)|MUFU\.\w+64H|[FI]2F\.(F64|\w+\.F64))"
START_NEXT, WAIT_FOR_PREVIOUS = "PREEXIT", "ACQBULK"  # griddepcontrol of PTX


@dataclass(frozen=True)
class Rule:
    """What kernels must contain, or must not."""

    file: str  # a pattern of file names
    kernel: str  # a regular expression, found in the mangled name
    instruction: str  # a regular expression of SASS
    first_arch: int = 80
    wanted: bool = True


RULES = (
    Rule("*", "", STORE),
    Rule("*", r"^(?!.*choose_(in|of)_parts)", DOUBLE, wanted=False),  # sampling compares doubles
    Rule("scaled_mm_*_sm89", "", r"QMMA\.16832\.F32\.E4M3\.E4M3"),
    Rule("scaled_mm_*_sm90a", "", r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3"),
    Rule("scaled_mm_*_sm90a", "", "UTMALDG"),
    Rule("block_scaled_mm_*_sm90a", "", r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3"),
    Rule("block_scaled_mm_*_sm90a", "", "UTMALDG"),
    Rule("block_scaled_mm_*_sm90a", "", "LDGSTS"),  # of the weights' scales
    Rule("gated_mm_*_sm90a", "", r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3"),
    Rule("gated_mm_*_sm90a", "", r"UTMALDG\.5D"),  # of gate and up rows in turn
    Rule("gated_mm_*_sm90a", "", r"STG\."),  # the epilogue's own
    Rule("scaled_mm_*_sm100a", "", r"UTC\w*MMA"),
    Rule("scaled_mm_*_sm100a", "", "UTMALDG"),
    Rule("scaled_mm_*_sm120a", "", r"QMMA\."),
    Rule("weight_linear*", r"\dweight_linearI", MATRIX),
    Rule("weight_linear*", r"\dweight_linearI", WIDE_LOAD),
    Rule("weight_linear_e4m3", "", DECODE, first_arch=89),
    Rule("qkv_linear*", r"\dqkv_linearI", MATRIX),
    Rule("qkv_linear*", r"\dqkv_linearI", WIDE_LOAD),
    Rule("qkv_linear_e4m3", "", DECODE, first_arch=89),
    Rule("qkv_linear_*", "", ENCODE, first_arch=89),  # of keys and values
    Rule("attention*", r"\dattendI", MATRIX),
    Rule("attention*", r"\dattendI.*4E4M3", DECODE, first_arch=89),
    # The read-only path is not for what a kernel before may still be writing.
    Rule("attention*", "", READ_ONLY_LOAD, wanted=False),
    Rule("kv_cache", "gather", READ_ONLY_LOAD, wanted=False),
    Rule("dequantize", r"dequantize_rows\w*I\w*4E4M3", DECODE, first_arch=89),
    Rule("rows", r"process_rowsI.*?ELb[01]ELb1E", ENCODE, first_arch=89),  # kCodes
    Rule("rows", r"map_rowsI.*?RowSourceE\dELb1E", ENCODE, first_arch=89),
    Rule("rows", r"process_rowsI|map_rowsI", WIDE_LOAD),
)


@dataclass(frozen=True)
class Reviewed:
    """Local memory of kernels, in bytes, that was looked at and accepted, and why."""

    file: str
    stack: int
    spills: int
    reason: str


REVIEWED = (
    Reviewed(
        "scaled_mm_64x64x128_sm120a", 24, 240, "scheduling and epilogue; one in the loop over K"
    ),
    Reviewed(
        "attention_float16",
        40,
        80,
        "heads of 256 with a float16 cache want more than 255 registers",
    ),
    Reviewed(
        "attention_plain",
        8,
        24,
        "sm_90a, sm_100a, sm_120a; the plain kernel is for sizes that no other takes",
    ),
    Reviewed("rows", 16, 12, "sm_100a, three of 124; a register or two around the loop over a row"),
)


@dataclass(frozen=True)
class Code:
    """One kernel for one architecture: what ptxas said of it, and its instructions, counted."""

    file: str
    kernel: Kernel
    counts: Counter[str]

    @property
    def where(self) -> str:
        """Which kernel it is, for messages."""
        name = f"{short_name(self.kernel.name)} ({self.kernel.name[:200]})"
        return f"{self.file}, sm_{self.kernel.arch}, {name}"

    def count(self, instruction: str) -> int:
        """Return how many instructions match a regular expression."""
        pattern = re.compile(instruction)
        return sum(number for name, number in self.counts.items() if pattern.match(name))


def short_name(mangled: str) -> str:
    """Return "twice" for _ZN8quantkit4cuda5twiceIfEEvPKT_PS2_l."""
    text, name = mangled.removeprefix("_ZN").removeprefix("_Z"), mangled
    while match := re.match(r"(\d+)", text):
        length = int(match[1])
        text = text[match.end() :]
        name, text = text[:length], text[length:]
    return name


def parse_sass(lines: Iterable[str]) -> list[tuple[str, str, Counter[str]]]:
    """Return (architecture, mangled name, instruction counts) from `cuobjdump -sass`."""
    arch = ""
    functions: list[tuple[str, str, Counter[str]]] = []
    for line in lines:
        if match := re.match(r"\s*arch = sm_(\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            functions.append((arch, match[1], Counter()))
        elif match := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            functions[-1][2][match[1]] += 1
    return functions


def disassemble(object_file: Path) -> dict[tuple[str, str], Counter[str]]:
    """Return the instruction counts of an object's kernels, by (architecture, mangled name)."""
    kept = object_file.with_suffix(".sass.json")
    if not kept.exists():
        result = subprocess.run(
            [TOOLS / "cuobjdump", "-sass", object_file],
            env=os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"},  # it looks for nvdisasm
            capture_output=True,
            text=True,
            check=True,
        )
        kept.write_text(json.dumps(parse_sass(result.stdout.splitlines())))
    rows = json.loads(kept.read_text())
    return {(arch, name): Counter(counts) for arch, name, counts in rows}


def read_codes(unit: build_cuda.Unit, object_file: Path) -> list[Code]:
    """Return all kernels of a unit; a kernel without code gets no instructions."""
    _, kernels = read_log(object_file)
    counts = disassemble(object_file) if kernels else {}
    return [
        Code(unit.source.stem, kernel, counts.get((kernel.arch, kernel.name), Counter()))
        for kernel in kernels
    ]


def number_of(arch: str) -> int:
    """Return 90 for 90a."""
    return int(arch.rstrip("af"))


def broken_rules(code: Code, rules: tuple[Rule, ...]) -> Iterator[str]:
    """Yield what a kernel has or lacks against the rules, in words."""
    for rule in rules:
        applies = fnmatch(code.file, rule.file) and re.search(rule.kernel, code.kernel.name)
        if not applies or number_of(code.kernel.arch) < rule.first_arch:
            continue
        if bool(code.count(rule.instruction)) != rule.wanted:
            yield f"{'no' if rule.wanted else 'has'} {rule.instruction}"


def problems_of(
    code: Code, rules: tuple[Rule, ...], reviewed: tuple[Reviewed, ...]
) -> Iterator[str]:
    """Yield what is wrong with a kernel, in words."""
    yield from broken_rules(code, rules)
    if code.count(START_NEXT) and not code.count(WAIT_FOR_PREVIOUS):
        yield "lets the next kernel start, but does not wait for the previous one"
    accepted = [entry for entry in reviewed if fnmatch(code.file, entry.file)]
    for what, size in (("stack", code.kernel.stack), ("spills", code.kernel.spills)):
        limit = max((getattr(entry, what) for entry in accepted), default=0)
        if size > limit:
            yield f"{what}: {size} bytes, reviewed were {limit}"


def undefined_symbols(library: Path) -> set[str]:
    """Return what a library expects of others, without versions; weak symbols may be absent."""
    result = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    )
    rows = (line.split() for line in result.stdout.splitlines())
    return {name for kind, name in rows if kind == "U"}


def library_problems(library: Path) -> list[str]:
    """Return which symbols would not be found beside a torch with CUDA."""
    system = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+$")
    names = {name for name in undefined_symbols(library) if not system.search(name)}
    strange = sorted(name for name in names if not name.startswith(("aoti_torch_", "torch_")))
    return [f"{library.name} needs {name}, which is none of torch's stable ABI" for name in strange]


LOADING = """
import ctypes, sys, torch
from quantkit.extension import load_extension
ctypes.CDLL(sys.argv[1])
assert load_extension(name="_cuda")
for name in sys.argv[2:]:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"quantkit::{name}", "CUDA"):
        print(f"the library loads, but without a CUDA kernel of {name}")
"""


def loading_problems(stub: Path) -> list[str]:
    """Return what is wrong with the library loaded beside a libtorch_cuda, or the linker's stub."""
    bindings = (build_cuda.ROOT / "csrc/cuda/bindings.cpp").read_text(encoding="utf-8")
    names = re.findall(r'impl\("(\w+)"', bindings)
    result = subprocess.run(
        [sys.executable, "-c", LOADING, stub, *names],
        cwd=build_cuda.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.splitlines() + ([result.stderr] if result.returncode else [])


def table(codes: list[Code]) -> str:
    """Return a table of what was read: one line a file and architecture."""
    columns = {
        "matrix": r"\w*MMA(\.|$)",
        "loads 128": WIDE_LOAD,
        "E4M3": r"F2FP.*E4M3",
        "stores": STORE,
    }
    head = "".join(
        f"{name:>11}" for name in ("kernels", "registers", "shared", "spilled", *columns)
    )
    lines = [f"{'file':44}{'arch':>6}{head}"]
    groups: dict[tuple[str, str], list[Code]] = {}
    for code in codes:
        groups.setdefault((code.file, code.kernel.arch), []).append(code)
    for (file, arch), group in sorted(groups.items()):
        kernels = [code.kernel for code in group]
        numbers = [
            len(group),
            max(kernel.registers for kernel in kernels),
            max(kernel.shared for kernel in kernels),
            sum(kernel.spills for kernel in kernels),
            *(sum(code.count(pattern) for code in group) for pattern in columns.values()),
        ]
        lines.append(f"{file:44}{arch:>6}" + "".join(f"{number:>11}" for number in numbers))
    return "\n".join(lines)


def main() -> int:
    """Check what `make cuda` built; print a table, then what is wrong."""
    units = build_cuda.plan(build_cuda.ROOT / "csrc/cuda", build_cuda.requested_archs())
    tools = build_cuda.find_tools(units)
    objects = {
        unit: build_cuda.object_path(unit, tools, build_cuda.ROOT / "build/cuda") for unit in units
    }
    if not LIBRARY.exists() or not all(path.exists() for path in objects.values()):
        sys.exit("the library is not built, or not from these sources: run `make cuda` first")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(read_codes, objects.keys(), objects.values())
        codes = [code for group in found for code in group]
    print(table(codes))
    problems = [
        f"{code.where}: {problem}"
        for code in codes
        for problem in problems_of(code, RULES, REVIEWED)
    ]
    problems += library_problems(LIBRARY)
    problems += loading_problems(build_cuda.ROOT / "build/cuda/stub/libtorch_cuda.so")
    print(*problems, sep="\n", file=sys.stderr)
    print(f"{len(codes)} kernels, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
