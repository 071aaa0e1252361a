"""Child process of `tests.cuda.emulator`: loads one library and calls its functions on request.

A process of its own, because a kernel that does something wrong ends it, and because address
sanitizer must be there from the start. Every array is copied into a heap block of exactly its size,
so that one byte beyond it is an error. Imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
from typing import Any, BinaryIO

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
MAKE: dict[str, Any] = {"int": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}


def load(path: str, shared: list[tuple[int, int]]) -> ctypes.CDLL:
    """Load a library and tell it where its shared arrays are."""
    library = ctypes.CDLL(path)
    for distance, size in shared:
        library.qk_emulator_shared(ctypes.c_int64(distance), ctypes.c_int64(size))
    return library


def call(function: Any, arguments: list[tuple[str, Any]]) -> list[bytes]:
    """Call with (kind, value) arguments; return the bytes of all arrays as they are afterwards."""
    passed: list[Any] = []
    blocks: list[tuple[int, int]] = []
    for kind, value in arguments:
        if kind == "none":
            passed.append(ctypes.c_void_p(None))
        elif kind == "array":
            address = LIBC.malloc(len(value))
            ctypes.memmove(address, value, len(value))
            blocks.append((address, len(value)))
            passed.append(ctypes.c_void_p(address))
        else:
            passed.append(MAKE[kind](value))
    function.restype = None
    function(*passed)
    after = [ctypes.string_at(address, size) for address, size in blocks]
    for address, _ in blocks:
        LIBC.free(address)
    return after


def launched(library: ctypes.CDLL) -> list[int]:
    """Return which kernels the last call launched, as the library says it."""
    distances = (ctypes.c_int64 * 256)()
    library.qk_emulator_launched.restype = ctypes.c_int64
    count = library.qk_emulator_launched(distances, ctypes.c_int64(len(distances)))
    return distances[:count]


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    library = None
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        if library is None:
            library = load(*request)
            continue
        name, order, arguments = request
        library.qk_emulator_order(order)
        after = call(getattr(library, name), arguments)
        pickle.dump((after, launched(library)), replies, protocol=5)
        replies.flush()


if __name__ == "__main__":
    # What a kernel prints must not get between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)
