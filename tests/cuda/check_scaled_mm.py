"""Runs CUTLASS's side of scaled_mm on the CPU: part of `make cuda-check`.

`cutlass_host/epilogue.cpp` and `gated.cpp` compute whole outputs with the epilogues of the sm_90
kernels, `gated_loads.cpp` copies boxes of weights as TMA does, `arguments.cu` looks at what the
kernels hand to CUTLASS. Each takes half a minute to compile and is compiled again when a header or
source has changed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import build_cuda

HERE = Path(__file__).parent / "cutlass_host"
CUDA = build_cuda.ROOT / "csrc" / "cuda"
CACHE = build_cuda.ROOT / "build" / "cutlass_host"
PLAIN = (
    "-DQK_EMULATOR",
    "-DCUTLASS_SM90_COLLECTIVE_BUILDER_SUPPORTED",
    "-fpermissive",
    f"-include{HERE / 'words.h'}",
    f"-I{HERE}",
)
DEVICE = ("--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a")
PROGRAMS = ("arguments.cu", "gated_loads.cpp", "gated.cpp", "epilogue.cpp")


def digest(command: list[str], source: Path) -> str:
    """Return a hash of a command, of its source and of all headers."""
    total = hashlib.sha256("\0".join(command).encode())
    for path in sorted([source, *HERE.glob("*.h"), *CUDA.glob("*.h"), *CUDA.glob("*.cuh")]):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:16]


def toolkit_includes(nvcc: Path) -> list[str]:
    """Return the options that give g++ the headers of the CUDA toolkit."""
    command = [str(nvcc), "--dryrun", "-c", str(HERE / "arguments.cu")]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(r'"?-(?:I|isystem)"?\s*"?(/[^" ]+/include(?:/cccl)?)"', words)
    return [f"-I{folder}" for folder in dict.fromkeys(found)]


def compiled(name: str) -> Path:
    """Return the program of a source, compiled now or before."""
    nvcc, cutlass = build_cuda.find_nvcc(), build_cuda.find_cutlass()
    if name.endswith(".cu"):
        command = [str(nvcc), *DEVICE]
    else:  # without nvcc's front end, device functions are functions
        command = ["g++", *PLAIN, *toolkit_includes(nvcc)]
    folders = (CUDA, cutlass / "include", cutlass / "tools/util/include")
    command += ["-std=c++20", "-O1", "-w", *(f"-I{folder}" for folder in folders)]
    command += [str(HERE / name)]
    program: Path = CACHE / f"{Path(name).stem}-{digest(command, HERE / name)}"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([*command, "-o", str(program)], check=True)
    return program


def main() -> int:
    """Run all programs; print the lines of those that fail, or their number."""
    failed = 0
    for name in PROGRAMS:
        result = subprocess.run([compiled(name)], capture_output=True, text=True, check=False)
        lines = result.stdout.splitlines()
        failed += result.returncode != 0
        print(f"{name}: {len(lines)} lines, {'failed' if result.returncode else 'good'}")
        if result.returncode:
            print(result.stdout, result.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
