"""What --device-map says: how a model is spread over several GPUs."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit.errors import UnsupportedError

HELP = "Layers over several GPUs: auto (as few as do), balanced (all), or a JSON file of modules."


def read_device_map(text: str | None) -> str | dict[str, str | int] | None:
    """Return what `load_fp8` takes as device_map.

    Raises UnsupportedError where the words for several GPUs meet fewer than two, and for a file
    that is not there or holds no names of modules with devices.
    """
    if text is None:
        return None
    import torch

    from quantkit.runtime.placement import KINDS

    if text not in KINDS:
        return _read_file(Path(text))
    count = torch.cuda.device_count()
    if count < 2:
        raise UnsupportedError(
            f"--device-map {text} is for several GPUs, and this machine has {count}; leave it out"
        )
    return text


def _read_file(path: Path) -> dict[str, str | int]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UnsupportedError(
            f"--device-map {path}: {reason}; give auto, balanced, or a JSON file like "
            '{"": 0, "model.layers.20": 1}'
        ) from None
    if not isinstance(places, dict) or not all(
        isinstance(place, str) or type(place) is int for place in places.values()
    ):
        raise UnsupportedError(
            f"--device-map {path} must be an object of names of modules and devices, such as "
            '{"": 0, "model.layers.20": 1}'
        )
    return places
