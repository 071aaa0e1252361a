"""Which linear modules stand or fall together, by their names.

Engines run q/k/v, gate/up and all experts of a layer as one each, so such a group is quantized as a
whole or not at all. Knows names only.
"""

from __future__ import annotations

import re
from collections.abc import Container

from quantkit.calibrate.moments import group_name

_EXPERT = re.compile(r"(?P<list>.*\bexperts)\.(?P<number>\d+)\.(?P<leaf>[^.]+)")


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Take the name of an expert's linear apart: all experts of the layer, number, last part.

    `layers.0.mlp.experts.3.up_proj` gives `layers.0.mlp.experts`, 3 and `up_proj`. None for the
    name of anything else.
    """
    found = _EXPERT.fullmatch(name)
    return (found["list"], int(found["number"]), found["leaf"]) if found else None


def engine_group(name: str, modules: Container[str]) -> str:
    """Return the name of the group of `name`: its list of experts, or the first fused sibling.

    `modules` says which siblings there are.
    """
    expert = expert_of(name)
    return expert[0] if expert else group_name(name, modules)


def kind_of(name: str) -> str:
    """Return what modules of a layer are summed up by: `up_proj`, or `experts.up_proj`."""
    expert = expert_of(name)
    return f"experts.{expert[2]}" if expert else name.rpartition(".")[2]
