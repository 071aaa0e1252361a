"""How much memory there is for what a run keeps between layers."""

from __future__ import annotations

from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, within a container's limit; None where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = MEMINFO.read_text(encoding="utf-8").splitlines()
        free = next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    left = _left_to_container()
    return free if left is None else min(free, left)


def _left_to_container() -> int | None:
    """Return the limit of the control group less what it uses, but for pages that can go."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        fields = dict(x.split() for x in (CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(fields["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
