"""Which device holds which part of a model: whole decoder layers, in their order.

Places only; who reads weights and moves activations is the decoder's concern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from quantkit.errors import UnsupportedError

DeviceMap = Mapping[str, "str | int | torch.device"]
"""Names of modules, each with the device of all that is in it, as accelerate writes them."""

KINDS: Final = ("auto", "balanced")
EMBEDDING, LAYERS, NORM, HEAD = "model.embed_tokens", "model.layers", "model.norm", "lm_head"
ROOM: Final = 0.7
"""The share of its free memory that "auto" fills with weights before it takes another GPU; the rest
is for caches, graphs and activations."""

_KNOWN: Final = re.compile(r"|model|model\.(embed_tokens|norm|rotary_emb|layers(\.\d+)?)|lm_head")


@dataclass(frozen=True, slots=True)
class Placement:
    """A device for the embedding, for each decoder layer, the final norm, and the output head."""

    embedding: torch.device
    layers: tuple[torch.device, ...]
    norm: torch.device
    head: torch.device

    @classmethod
    def on(cls, device: torch.device, num_layers: int) -> Placement:
        """Return the placement of everything on one device."""
        device = torch.empty(0, device=device).device  # the number of a GPU that has none
        return cls(device, (device,) * num_layers, device, device)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices, in the order in which activations come to them."""
        return tuple(dict.fromkeys((self.embedding, *self.layers, self.norm, self.head)))


def split(sizes: Sequence[int], capacities: Sequence[int]) -> list[int]:
    """Return which device takes each part: adjacent parts a device, the fullest as empty as can be.

    `sizes` are bytes of the parts, `capacities` those that each device has for them; full is meant
    in relation to that. Every part is placed, whether it fits or not: see `fullest`.
    """
    ends = [0, *accumulate(sizes)]
    count = len(sizes)
    # best[i]: the fullest of the devices so far, if they take the first i parts.
    best = [0.0] + [float("inf")] * count
    begins: list[list[int]] = []
    for capacity in capacities:
        options = [
            [max(best[i], (ends[j] - ends[i]) / max(capacity, 1)) for i in range(j + 1)]
            for j in range(count + 1)
        ]
        best = [min(choices) for choices in options]
        begins.append([choices.index(least) for choices, least in zip(options, best, strict=True)])
    placed: list[int] = [0] * count
    end = count
    for device in reversed(range(len(capacities))):
        begin = begins[device][end]
        placed[begin:end] = [device] * (end - begin)
        end = begin
    return placed


def fullest(sizes: Sequence[int], capacities: Sequence[int], placed: Sequence[int]) -> float:
    """Return the largest share of its capacity that a device is filled to."""
    used = [0] * len(capacities)
    for size, device in zip(sizes, placed, strict=True):
        used[device] += size
    return max(held / max(capacity, 1) for held, capacity in zip(used, capacities, strict=True))


def mapped_devices(device_map: str | DeviceMap) -> list[torch.device]:
    """Return the devices that a map may use: of "auto" and "balanced" all GPUs, or the CPU.

    Raises UnsupportedError for a map that is neither those nor a dict of devices with weights.
    """
    if not isinstance(device_map, str):
        return list(dict.fromkeys(_device(name, value) for name, value in device_map.items()))
    if device_map not in KINDS:
        raise UnsupportedError(
            f"device_map {device_map!r} is not known; use {', '.join(KINDS)}, or a dict of modules "
            "and devices"
        )
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return gpus or [torch.device("cpu")]


def place(device_map: str | DeviceMap, tensors: Mapping[str, int], num_layers: int) -> Placement:
    """Place a model whose `tensors` have so many bytes; see `place_by_bytes`, `place_by_name`."""
    if not isinstance(device_map, str):
        return place_by_name(device_map, num_layers)
    devices = mapped_devices(device_map)
    if devices[0].type == "cpu":
        return Placement.on(devices[0], num_layers)
    free = [torch.cuda.mem_get_info(device)[0] for device in devices]
    return place_by_bytes(device_map, part_sizes(tensors, num_layers), devices, free)


def place_by_bytes(
    kind: str, sizes: Sequence[int], devices: Sequence[torch.device], free: Sequence[int]
) -> Placement:
    """Place by size: `sizes` are bytes of the embedding, each layer, and norm with head.

    "balanced" uses all `devices`, of which `free` bytes are free; "auto" the first few that leave
    room beside the weights, see ROOM. Raises UnsupportedError if all of them are too small.
    """
    first = len(devices) if kind == "balanced" else 1
    for count in range(first, len(devices) + 1):
        placed = split(sizes, free[:count])
        share = fullest(sizes, free[:count], placed)
        if share <= ROOM:
            break
    if share > 1:
        raise UnsupportedError(
            f"the weights take {_gigabytes(sum(sizes))}, and {len(devices)} GPUs have "
            f"{_gigabytes(sum(free))} free; serve the exported checkpoint on more GPUs, or by an "
            "engine that offloads"
        )
    chosen = [devices[number] for number in placed]
    return Placement(chosen[0], tuple(chosen[1:-1]), chosen[-1], chosen[-1])


def place_by_name(device_map: DeviceMap, num_layers: int) -> Placement:
    """Place as `device_map` says; of several names that hold a part, the longest counts.

    Raises UnsupportedError for a name that is no part, for a part that no name holds, and for
    devices that hold no weights ("disk").
    """
    for name in device_map:
        if not _KNOWN.fullmatch(name):
            raise UnsupportedError(
                f"device_map names {name!r}; it places {EMBEDDING}, whole layers such as "
                f"{LAYERS}.0, {NORM} and {HEAD}, or all of them as ''"
            )
    devices = {name: _device(name, value) for name, value in device_map.items()}

    def of(part: str) -> torch.device:
        holders = [name for name in devices if _holds(name, part)]
        if not holders:
            raise UnsupportedError(f"device_map says nothing about {part}; name it, or '' for all")
        return devices[max(holders, key=len)]

    layers = tuple(of(f"{LAYERS}.{number}") for number in range(num_layers))
    return Placement(of(EMBEDDING), layers, of(NORM), of(HEAD))


def part_sizes(tensors: Mapping[str, int], num_layers: int) -> list[int]:
    """Return the bytes of the embedding, each layer, and norm with head, of those of all tensors.

    A head that is tied to the embedding is counted where it is, as if it were a copy.
    """
    sizes = [0] * (num_layers + 2)
    for name, size in tensors.items():
        number = re.match(rf"{re.escape(LAYERS)}\.(\d+)\.", name)
        if number and int(number[1]) < num_layers:
            sizes[1 + int(number[1])] += size
        elif name.startswith(f"{EMBEDDING}."):
            sizes[0] += size
        else:
            sizes[-1] += size
    if f"{HEAD}.weight" not in tensors:
        sizes[-1] += sizes[0]
    return sizes


def _holds(name: str, part: str) -> bool:
    return name in ("", part) or part.startswith(f"{name}.")


def _device(name: str, value: str | int | torch.device) -> torch.device:
    text = f"cuda:{value}" if isinstance(value, int) else str(value)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise UnsupportedError(
            f"device_map places {name!r} on {value!r}; use cpu, cuda:N or the number of a GPU"
        )
    return torch.device("cuda:0" if text == "cuda" else text)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
