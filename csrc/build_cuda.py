"""Builds `quantkit/_cuda.abi3.so` from csrc/cuda with nvcc: `python csrc/build_cuda.py`.

A source named `*_sm90a.cu` is compiled for that architecture alone, every other for all of
`QUANTKIT_CUDA_ARCHS` (by default those of `ARCHS`). No GPU is needed, nor a torch with CUDA: the
stable ABI of LibTorch is the same in both. Objects stay in build/cuda under a hash of all that went
into them, beside what ptxas said. `make cuda` and setup.py run this file; tests import it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ptxas_log import log_path, summary

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("80", "89", "90a", "100a", "120a")
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10; the same in setup.py

DEFINES = ("-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-DNDEBUG")
FLAGS = (
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas",
    *DEFINES,
)
# As on the CPU, products and sums are fused only where a kernel says so: then the emulator computes
# what the GPU does. CUTLASS is compiled as its authors test it.
OWN_FLAGS = ("-fmad=false", "-Xcompiler=-ffp-contract=off")

# What ops use of libtorch_cuda, which a CPU build of torch lacks. A stub with these functions lets
# the linker name that library as a needed one, so that loading finds the real one.
LIBTORCH_CUDA = ("aoti_torch_get_current_cuda_stream",)

CUTLASS_MEMORY = 4.0  # GB that compiling one file takes at most
OWN_MEMORY = 1.0


class BuildError(Exception):
    """The library cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Unit:
    """A source file with the architectures that it is compiled for."""

    source: Path
    archs: tuple[str, ...]

    @cached_property
    def files(self) -> list[Path]:
        """The source and every file of ours that it may include, in a stable order."""
        return included_files(self.source)

    @cached_property
    def uses_cutlass(self) -> bool:
        """Whether it includes the headers of CUTLASS."""
        pattern = re.compile(r'#\s*include\s*[<"](cutlass|cute)/')
        return any(pattern.search(path.read_text(encoding="utf-8")) for path in self.files)

    @property
    def memory(self) -> float:
        """GB that compiling it takes at most."""
        return CUTLASS_MEMORY if self.uses_cutlass else OWN_MEMORY


@dataclass(frozen=True)
class Tools:
    """The compiler and the libraries it compiles against."""

    nvcc: Path
    torch: Path  # the installed package
    cutlass: Path | None = None

    @cached_property
    def nvcc_version(self) -> str:
        """What nvcc says of itself."""
        result = subprocess.run(
            [self.nvcc, "--version"], capture_output=True, text=True, check=True
        )
        return result.stdout

    def versions(self, unit: Unit) -> str:
        """What, beside files and flags, decides the content of a unit's object."""
        names = ["torch", *(["nvidia-cutlass"] if unit.uses_cutlass else [])]
        return " ".join([self.nvcc_version, *(importlib.metadata.version(name) for name in names)])


def requested_archs(text: str | None = None) -> tuple[str, ...]:
    """Parse `QUANTKIT_CUDA_ARCHS`, e.g. "80,90a"; torch's way, "8.0;9.0a", is understood too."""
    text = os.environ.get("QUANTKIT_CUDA_ARCHS", "") if text is None else text
    archs = [word.replace(".", "") for word in re.split(r"[\s,;]+", text) if word]
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            raise BuildError(f"QUANTKIT_CUDA_ARCHS must be like {','.join(ARCHS)}, got {text!r}")
    return tuple(dict.fromkeys(archs)) or ARCHS


def only_arch(source: Path) -> str | None:
    """Return "90a" for scaled_mm_sm90a.cu, None for files of all architectures."""
    match = re.search(r"_sm(\d+[af]?)$", source.stem)
    return match and match[1]


def plan(folder: Path, archs: tuple[str, ...]) -> list[Unit]:
    """Return what to compile for these architectures, the most expensive first."""
    units = [Unit(folder / "bindings.cpp", ())]
    for source in sorted(folder.glob("*.cu")):
        only = only_arch(source)
        if only is None or only in archs:
            units.append(Unit(source, archs if only is None else (only,)))
    return sorted(units, key=lambda unit: -unit.memory)


def included_files(source: Path) -> list[Path]:
    """Return `source` and all files reachable through its `#include "..."` lines."""
    found: dict[Path, None] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():  # includes of libraries are not beside ours
            continue
        found[path] = None
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(encoding="utf-8"), re.M)
        waiting += [(path.parent / name).resolve() for name in names]
    return sorted(found)


def find_nvcc() -> Path:
    """Return nvcc of CUDA_HOME, of the PATH or of /usr/local/cuda."""
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = os.pathsep.join(f"{folder}/bin" for folder in folders[:2] if folder)
    path = os.pathsep.join([path, os.environ.get("PATH", ""), f"{folders[2]}/bin"])
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None:
        raise BuildError("nvcc was not found; install the CUDA toolkit, or set CUDA_HOME to it")
    return Path(nvcc)


def find_torch() -> Path:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed here (is pip using build isolation?)")
    return Path(spec.origin).parent


def find_cutlass() -> Path:
    """Return the source tree of CUTLASS that the nvidia-cutlass wheel carries."""
    # The folder that cutlass_library.source_path names, without the seconds of importing it.
    spec = importlib.util.find_spec("cutlass_library")
    folder = Path(spec.origin).parent / "source" if spec and spec.origin else None
    if folder is None or not (folder / "include/cutlass/cutlass.h").is_file():
        raise BuildError(
            "the CUTLASS headers are missing; pip install --no-deps 'nvidia-cutlass==4.2.*'"
        )
    return folder


def find_tools(units: Iterable[Unit]) -> Tools:
    """Find what these units need."""
    cutlass = find_cutlass() if any(unit.uses_cutlass for unit in units) else None
    return Tools(find_nvcc(), find_torch(), cutlass)


def arch_flags(archs: tuple[str, ...]) -> list[str]:
    """Return -gencode options; the newest portable architecture also serves GPUs yet to come."""
    portable = [arch for arch in archs if arch.isdigit()]
    flags = []
    for arch in archs:
        code = f"[sm_{arch},compute_{arch}]" if arch in portable[-1:] else f"sm_{arch}"
        flags += ["-gencode", f"arch=compute_{arch},code={code}"]
    return flags


def compile_command(unit: Unit, tools: Tools) -> list[str]:
    """Return the command that compiles a unit, but for its output.

    QK_HAS_SM90A and the like tell a file of all architectures which others have files of their own
    in the library.
    """
    command = [
        str(tools.nvcc),
        *FLAGS,
        *arch_flags(unit.archs),
        "-isystem",
        f"{tools.torch}/include",
    ]
    if unit.uses_cutlass:
        for folder in ("include", "tools/util/include"):
            command += ["-isystem", f"{tools.cutlass}/{folder}"]
    else:
        command += OWN_FLAGS
    command += [f"-DQK_HAS_SM{arch.upper()}" for arch in unit.archs]
    return [*command, "-c", str(unit.source)]


def object_path(unit: Unit, tools: Tools, folder: Path) -> Path:
    """Return the place of a unit's object: its name has a hash of all that decides the content."""
    words = [word.replace(str(ROOT), "") for word in compile_command(unit, tools)]
    digest = hashlib.sha256("\0".join([*words, tools.versions(unit)]).encode())
    for path in unit.files:
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return folder / f"{unit.source.stem}-{digest.hexdigest()[:16]}.o"


def compile_unit(unit: Unit, tools: Tools, target: Path) -> float:
    """Compile to `target`; return the seconds it took."""
    start = time.monotonic()
    partial = target.with_suffix(f".{os.getpid()}.o")
    command = [*compile_command(unit, tools), "-o", str(partial)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    output = result.stdout + result.stderr
    if result.returncode != 0:
        partial.unlink(missing_ok=True)
        lines = [line for line in output.splitlines() if not line.startswith(("ptxas info", " "))]
        raise BuildError("\n".join([f"{unit.source} does not compile", " ".join(command), *lines]))
    if object_path(unit, tools, target.parent) != target:
        partial.unlink()
        raise BuildError(f"{unit.source} or what it includes changed while it was compiled")
    log_path(target).write_text(f"seconds {seconds:.1f}\n{output}", encoding="utf-8")
    partial.rename(target)
    return seconds


def available_memory() -> float:
    """Return the GB that this machine, and the container if it is one, has free."""
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    free = 1024 * int(re.findall(r"MemAvailable:\s*(\d+) kB", meminfo)[0])
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free / 2**30


def job_count(units: list[Unit]) -> int:
    """Return how many of these may be compiled at a time, by cores and by memory."""
    fit = int(available_memory() / max((unit.memory for unit in units), default=1))
    return max(1, min(len(os.sched_getaffinity(0)), fit))


def compile_all(units: list[Unit], tools: Tools, folder: Path) -> dict[Unit, Path]:
    """Compile what is not there yet, as much at a time as cores and memory allow."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = {unit: object_path(unit, tools, folder) for unit in units}
    missing = [unit for unit in units if not objects[unit].exists()]
    say(f"{len(units)} files, {len(missing)} to compile")

    def work(unit: Unit) -> str:
        return f"{compile_unit(unit, tools, objects[unit]):.0f} s"

    failures = []
    with ThreadPoolExecutor(job_count(missing)) as pool:
        names = {pool.submit(work, unit): unit.source.name for unit in missing}
        try:
            for number, future in enumerate(as_completed(names), 1):
                error = future.exception()
                outcome = "failed" if error else future.result()
                say(f"[{number}/{len(missing)}] {names[future]} {outcome}")
                failures += [str(error)] if error else []
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failures:
        raise BuildError("\n\n".join(failures))
    return objects


def link(objects: Iterable[Path], tools: Tools, folder: Path, output: Path) -> None:
    """Link the library, with the CUDA runtime inside and every symbol but torch's entry hidden."""
    stub = write_stub(tools.nvcc, folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(f".{os.getpid()}")
    command: list[str | Path] = [tools.nvcc, "-shared", "-cudart=static", *objects, "-o", partial]
    command += ["-L", stub.parent, "-ltorch_cuda", "-L", tools.torch / "lib", "-ltorch_cpu"]
    command += ["-Xlinker=--no-undefined,--exclude-libs=ALL"]
    run_linker(command)
    partial.rename(output)


def write_stub(nvcc: Path, folder: Path) -> Path:
    """Build a libtorch_cuda.so that only the linker sees; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    source, stub = folder / "libtorch_cuda_stub.cpp", folder / "libtorch_cuda.so"
    source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in LIBTORCH_CUDA))
    run_linker(
        [nvcc, "-shared", "-cudart=none", f"-Xlinker=-soname={stub.name}", source, "-o", stub]
    )
    return stub


def run_linker(command: list[str | Path]) -> None:
    """Run a command of the linker, or raise BuildError with what it says."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        output = result.stdout + result.stderr
        missing = sorted(set(re.findall(r"undefined reference to .*", output)))
        raise BuildError("\n".join(["linking failed", *(missing or [output])]))


def build(sources: Path, archs: tuple[str, ...], folder: Path, output: Path) -> dict[Unit, Path]:
    """Build the library `output`, objects in `folder`; return the objects of all sources."""
    units = plan(sources, archs)
    tools = find_tools(units)
    objects = compile_all(units, tools, folder)
    link(objects.values(), tools, folder / "stub", output)
    return objects


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(f"cuda: {text}", flush=True)


def main() -> int:
    """Build, and print what was built."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "quantkit" / "_cuda.abi3.so")
    arguments = parser.parse_args()
    try:
        archs = requested_archs()
        say(f"architectures {' '.join(archs)}")
        objects = build(ROOT / "csrc/cuda", archs, ROOT / "build/cuda", arguments.output)
    except BuildError as error:
        print(f"quantkit: {error}", file=sys.stderr)
        return 1
    rows = [(unit.source, unit.archs, path) for unit, path in objects.items()]
    say(f"{arguments.output} {arguments.output.stat().st_size / 2**20:.1f} MB\n{summary(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
