"""Compiles CUDA kernels for the CPU (tests/cuda_emulator) and runs them, arrays in, arrays out.

A test gives C++ source that includes the .cuh files it is about and defines `extern "C"` functions,
each of which launches one kernel. Compiled libraries are kept under build/emulator and made again
when the source, a file that it includes, or the options change.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "emulator"
FLAGS = [
    *("-std=c++20", "-g1", "-fPIC", "-shared", "-DQK_EMULATOR"),
    *("-ffp-contract=off", "-fno-gnu-unique"),  # as nvcc's -fmad=false; several libraries at once
    *("-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-attributes"),
]
SANITIZERS = "address,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero"
SANITIZE = ["-Og", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"]
OPTIMIZE = ["-O2"]
LAUNCHED: dict[str, set[tuple[Any, ...]]] = {}
"""Kernels, instantiations by name, that ran in this process's tests; each with the shapes it met:
the numbers and the sizes of arrays that the test's function was called with."""
INCLUDE = [f"-I{ROOT / 'csrc/cuda'}", f"-I{ROOT / 'tests/cuda_emulator'}"]


class Order(IntEnum):
    """In which order threads of a block, and blocks, come to run."""

    ASCENDING = 0
    DESCENDING = 1
    RANDOM = 2


class EmulatorError(Exception):
    """A kernel did something wrong; the text is the emulator's or the sanitizer's report."""


class Library:
    """A source, compiled at the first call; `library.f(a, b, 3)` calls its function f."""

    def __init__(self, source: str, flags: list[str], sanitize: bool) -> None:
        self.source, self.flags, self.sanitize = source, flags, sanitize
        self.order = Order.ASCENDING
        self._process: subprocess.Popen[bytes] | None = None
        self._kernels: dict[int, str] = {}
        self._failure: RuntimeError | None = None
        self._report = tempfile.TemporaryFile()  # noqa: SIM115 - what the child says, all its life

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self.call(name, *arguments)

    @cached_property
    def path(self) -> Path:
        """The compiled library; what an earlier run, or another process, compiled is taken."""
        name = hashlib.sha256("\0".join([self.source, *self.flags]).encode()).hexdigest()[:24]
        library, record = CACHE / f"{name}.so", CACHE / f"{name}.json"
        CACHE.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(CACHE / f"{name}.lock"):
            if not (library.exists() and record.exists() and _is_current(record)):
                self._build(library, record)
        return library

    def _build(self, library: Path, record: Path) -> None:
        if self._failure is not None:
            raise self._failure  # once is enough
        try:
            _build(self.source, self.flags, library, record)
        except RuntimeError as error:
            self._failure = error
            raise

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; arrays and tensors are overwritten with what it leaves in them.

        Passed as: array or CPU tensor, contiguous -> pointer; None -> null pointer; int -> int64_t;
        float -> float; numpy.float64 -> double. Raises EmulatorError where the kernel is wrong.
        """
        arrays: list[np.ndarray[Any, Any]] = []
        passed: list[tuple[str, Any]] = []
        for value in arguments:
            if isinstance(value, (np.ndarray, torch.Tensor)):
                arrays.append(_bytes(value))
                passed.append(("array", arrays[-1].tobytes()))
            elif value is None:
                passed.append(("none", None))
            elif isinstance(value, np.float64):
                passed.append(("double", float(value)))
            elif isinstance(value, float):
                passed.append(("float", value))
            else:
                passed.append(("int", int(value)))
        contents, launched = self._ask(name, passed)
        for array, content in zip(arrays, contents, strict=True):
            array[:] = np.frombuffer(content, dtype=np.uint8)
        shape = tuple(len(value) if kind == "array" else value for kind, value in passed)
        for distance in launched:
            LAUNCHED.setdefault(self._kernels[distance], set()).add(shape)

    def close(self) -> None:
        """End the child process; the next call starts another."""
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()

    def _ask(self, name: str, passed: list[tuple[str, Any]]) -> tuple[list[bytes], list[int]]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process, (name, int(self.order), passed))
            answer: tuple[list[bytes], list[int]] = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.close()
            self._report.seek(0)
            report = self._report.read().decode(errors="replace")
            raise EmulatorError(f"{name}: {report}") from None
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        shared, self._kernels = _symbols(self.path)
        self._report.truncate(0)
        self._report.seek(0)
        environment = dict(os.environ)
        if self.sanitize:
            found = ["g++", "-print-file-name=libasan.so"]
            environment["LD_PRELOAD"] = subprocess.check_output(found, text=True).strip()
            environment["ASAN_OPTIONS"] = (
                "detect_leaks=0:detect_odr_violation=0:detect_stack_use_after_return=0"
                ":abort_on_error=0:allocator_may_return_null=1"
            )
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(ROOT / "tests/cuda/emulator_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._report,
            pipesize=2**20,  # few turns between the two processes
            env=environment,
        )
        _send(process, (str(self.path), shared))
        return process


def compile(source: str, *, sanitize: bool = True, sm80: bool = False) -> Library:
    """Compile C++ source that includes .cuh files by name, such as "rows.cuh", once it is called.

    `sanitize`: with address sanitizer and checks of alignment, slower by half or so. `sm80`: as for
    processors without FP8 conversions, where bits are moved instead.
    """
    flags = [
        *FLAGS,
        *(SANITIZE if sanitize else OPTIMIZE),
        *(["-DQK_EMULATE_SM80"] if sm80 else []),
    ]
    return Library(source, flags, sanitize)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Wait for other processes that compile the same."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(source: str, flags: list[str], library: Path, record: Path) -> None:
    unique = f"{library.stem}.{os.getpid()}"
    text, made, depends = (CACHE / f"{unique}{end}" for end in (".cpp", ".so", ".d"))
    text.write_text(source)
    command = ["g++", *flags, *INCLUDE, "-MMD", "-MF", str(depends), str(text), "-o", str(made)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"does not compile for the emulator:\n{result.stderr[:10000]}")
    words = depends.read_text().replace("\\\n", " ").split()[1:]
    files = [word for word in words if word.startswith(str(ROOT)) and word != str(text)]
    record.write_text(json.dumps({file: _digest(Path(file)) for file in files}))
    made.replace(library)
    text.unlink()
    depends.unlink()


def _is_current(record: Path) -> bool:
    files: dict[str, str] = json.loads(record.read_text())
    return all(Path(file).exists() and _digest(Path(file)) == was for file, was in files.items())


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _symbols(library: Path) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """Return all `__shared__` arrays, statics of functions, and the names of all functions.

    Both by their distance from an anchor; the arrays with their sizes.
    """
    listed = subprocess.check_output(["nm", "-S", str(library)], text=True)
    rows = [fields for fields in map(str.split, listed.splitlines()) if len(fields) == 4]
    (anchor,) = (int(fields[0], 16) for fields in rows if fields[-1] == "qk_emulator_order")
    arrays, functions = [], {}
    for address, size, kind, name in rows:
        if kind in "bBV" and name.startswith("_ZZ"):
            arrays.append((int(address, 16) - anchor, int(size, 16)))
        elif kind in "tTW":
            functions[int(address, 16) - anchor] = name
    return arrays, functions


def _bytes(value: np.ndarray[Any, Any] | torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of an array or tensor as bytes, not a copy."""
    if isinstance(value, torch.Tensor):
        if not value.is_contiguous():
            raise ValueError("tensors must be contiguous")
        return value.detach().reshape(-1).view(torch.uint8).numpy()
    if not value.flags.c_contiguous:
        raise ValueError("arrays must be contiguous")
    return value.reshape(-1).view(np.uint8)


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    pickle.dump(message, process.stdin, protocol=5)
    process.stdin.flush()
