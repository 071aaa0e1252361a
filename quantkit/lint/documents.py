"""JSON that others wrote: read with a readable error, and looked into without trusting types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError

MAX_DOCUMENT_BYTES = 500_000_000
"""An index of a million tensors has 100 MB."""
MAX_WHOLE = 2**63
"""Larger than any size or offset of a file."""


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError that says what is wrong with the file."""
    try:
        size = path.stat().st_size
        if not path.is_file() or size > MAX_DOCUMENT_BYTES:
            raise CheckpointError(f"{path} is no JSON file of a checkpoint ({size} bytes)")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise CheckpointError(f"{path} cannot be read: {fault.strerror or fault}") from None
    except (ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path} is no JSON: {fault}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Return a JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def strings(value: Any) -> list[str]:
    """Return the strings of a JSON list; anything else has none."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def whole_number(value: Any) -> int | None:
    """Return a number that can be a size, or None."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < MAX_WHOLE else None
