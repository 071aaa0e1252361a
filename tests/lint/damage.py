"""How a good checkpoint is damaged: a Case, and functions that return a Damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.lint.folders import ALL, Draft, plain_tensors, quantized

Damage = Callable[[Draft], Any]
VLLM, SGLANG, TRANSFORMERS, TENSORRT = ALL
SERVERS = (VLLM, SGLANG, TENSORRT)
PYDANTIC = (VLLM, SGLANG, TRANSFORMERS)


@dataclass(frozen=True)
class Case:
    """A fault: the base it is done to, how, and what must be found for whom.

    `also` are other rules that the same fault breaks.
    """

    rule: str
    base: str
    damage: Damage
    engines: tuple[str, ...]
    severity: str = "error"
    tensor_parallel: int = 1
    place: str = ""
    also: tuple[str, ...] = ()
    count: int = 1


def remove(name: str) -> Damage:
    return lambda draft: draft.tensors.pop(name)


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda draft: draft.tensors.update({name: make(draft.tensors[name])})


def rename(old: str, new: str) -> Damage:
    return lambda draft: draft.tensors.update({new: draft.tensors.pop(old)})


def add(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Damage:
    return lambda draft: draft.tensors.update({name: torch.ones(shape).to(dtype)})


def config(**changes: Any) -> Damage:
    return lambda draft: draft.config.update(changes)


def block(**changes: Any) -> Damage:
    return lambda draft: draft.quantization.update(changes)


def group(**changes: Any) -> Damage:
    return lambda draft: draft.group.update(changes)


def weights(**changes: Any) -> Damage:
    return lambda draft: draft.group["weights"].update(changes)


def inputs(**changes: Any) -> Damage:
    return lambda draft: draft.group["input_activations"].update(changes)


def kv(**changes: Any) -> Damage:
    return lambda draft: draft.quantization["kv_cache_scheme"].update(changes)


def drop(*path: str) -> Damage:
    def damage(draft: Draft) -> None:
        value = draft.config
        for key in path[:-1]:
            value = value[key]
        del value[path[-1]]

    return damage


def file(name: str, text: str | None) -> Damage:
    return lambda d: d.files.pop(name) if text is None else d.files.update({name: text})


def both(*damages: Damage) -> Damage:
    return lambda draft: [damage(draft) for damage in damages]


def sharded(change: Damage) -> Damage:
    return both(Draft.split, change)


def index(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return sharded(lambda draft: change(draft.index or {}))


def plain(module: str) -> Damage:
    """Store one linear in 16 bits."""
    return both(
        put(f"{module}.weight", lambda weight: weight.bfloat16()), remove(f"{module}.weight_scale")
    )


def narrow(module: str, rows: int) -> Damage:
    return put(f"{module}.weight", lambda weight: weight[:rows].clone())


def ignore(*entries: str) -> Damage:
    return lambda draft: draft.quantization["ignore"].extend(entries)


def all_scales(suffix: str, value: float) -> Damage:
    def damage(draft: Draft) -> None:
        for name, tensor in draft.tensors.items():
            if name.endswith(suffix):
                tensor.fill_(value)

    return damage


def no_kv(draft: Draft) -> None:
    for name in [name for name in draft.tensors if name.endswith(("k_scale", "v_scale"))]:
        del draft.tensors[name]


def unquantized(draft: Draft) -> None:
    draft.tensors = plain_tensors()
    del draft.config["quantization_config"]


def as_int8(draft: Draft) -> None:
    draft.group["weights"]["type"] = "int"
    for name in [name for name in draft.tensors if "_proj" in name]:
        del draft.tensors[name]


def experts(draft: Draft) -> None:
    """Replace the first MLP by two experts."""
    coded = quantized(lambda rows, columns: (rows, 1))
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        for part in ("weight", "weight_scale"):
            del draft.tensors[f"model.layers.0.mlp.{leaf}.{part}"]
            source = coded[f"model.layers.0.mlp.{leaf}.{part}"]
            for expert in range(2):
                name = f"model.layers.0.mlp.experts.{expert}.{leaf}.{part}"
                draft.tensors[name] = source.clone()
