"""Find the pairs of a decoder layer that factors can be moved between, and prove each.

Owns who reads whose output. What reads a norm is seen by running the layer once; what lies between
two linears is guessed from names and widths. Either way a pair counts only after the layer, run
with random factors folded in, gave the output it gave without: names prove nothing, and neither
does the absence of a known obstacle. Linears that are left over are reported with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate.smoothing import HeadGroups, SmoothingPair, fold, restore

Run = Callable[[], Tensor]
"""Runs the loaded layer on a few tokens, the same each time, and returns its hidden states."""

MAX_LEAK = 1e-3
"""Largest change of the output by a whole fold, in units of the change by half a fold."""


@dataclass(frozen=True, slots=True)
class SkippedPair:
    """A pair, or linears (by names relative to the layer) without a source, not to be smoothed."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Ends:
    """Linears by the last part of their names, under one parent; `fused` sources hold more."""

    sources: tuple[str, ...]
    fused: tuple[str, ...]
    interleaved: tuple[str, ...]
    targets: tuple[str, ...]


_ATTENTION = _Ends(
    ("v_proj",),
    ("qkv_proj", "Wqkv"),
    ("query_key_value", "c_attn"),
    ("o_proj", "out_proj", "dense", "wo"),
)
_MLP = _Ends(
    ("up_proj", "fc1", "dense_h_to_4h", "w3"),
    ("gate_up_proj",),
    (),
    ("down_proj", "fc2", "dense_4h_to_h", "w2"),
)


@torch.no_grad()
def find_pairs(
    layer: nn.Module, config: Any, run: Run
) -> tuple[list[SmoothingPair], list[SkippedPair]]:
    """Return the proven pairs of a loaded decoder layer, and why its other linears are in none.

    Every linear is a target in one of the two lists. Names are relative to `layer`; `config` is the
    model's transformers config; `run` is called about three times a pair. Parameters are as before
    when it returns.
    """
    pairs, skipped = [], []
    for readers in _trace(layer, run):
        found = _candidate(layer, config, readers)
        if isinstance(found, SmoothingPair) and (reason := _disproof(layer, found, run)):
            found = SkippedPair(found.name, reason)
        if isinstance(found, SmoothingPair):
            pairs.append(found)
        else:
            skipped.append(found)
    return pairs, skipped


@torch.no_grad()
def leak(layer: nn.Module, pair: SmoothingPair, factors: Tensor, run: Run) -> float:
    """Return how far from exact a fold is: 0 for the same function, about 1 for a wrong pair.

    `|whole fold - nothing| / |source only - nothing|` over the layer's outputs; the denominator
    keeps a large residual stream from hiding what the pair does. NaN if the source has no effect.
    Shapes: factors [C]. Parameters are as before when it returns.
    """
    before = run().float()
    old = fold(layer, pair, factors).before
    try:
        whole = (run().float() - before).norm()
        ends = {f"{target}.weight" for target in pair.targets}
        restore(layer, {name: tensor for name, tensor in old.items() if name in ends})
        half = (run().float() - before).norm()
    finally:
        restore(layer, old)
    ratio: float = (whole / half).item()
    return ratio


def _disproof(layer: nn.Module, pair: SmoothingPair, run: Run) -> str | None:
    """Return why the pair must not be used, or None if folding keeps the layer's function."""
    weight = layer.get_parameter(f"{pair.source}.weight")
    start, stop = pair.rows or (0, weight.shape[0])
    # Powers of two: the comparison is exact in any type, unless a norm has an offset.
    generator = torch.Generator().manual_seed(0)
    factors = torch.exp2(torch.randint(-1, 2, (stop - start,), generator=generator).float())
    found = leak(layer, pair, factors, run)
    limit = max(MAX_LEAK, 4 * torch.finfo(weight.dtype).eps if pair.norm_offset else 0.0)
    if found <= limit:
        return None
    if found > limit:
        return (
            f"folding changes the layer's output ({found:.1g} of what it would without the "
            f"targets): something else reads {pair.source}, or what lies between is not linear"
        )
    return f"{pair.source} has no effect on the layer's output, so the fold cannot be checked"


@dataclass(slots=True)
class _Readers:
    """Modules that were given one tensor: linears, and `others` that may not be left out of it."""

    norm: str | None
    linears: list[str]
    others: list[str]


def _trace(layer: nn.Module, run: Run) -> list[_Readers]:
    """Run the layer and return who read what.

    One entry per tensor that a linear reads, or that a norm gives to other modules only, such as
    experts. Linears that did not run are one entry each, of the kind that no norm feeds.
    """
    by_tensor: dict[tuple[int, int], _Readers] = {}
    alive: list[Tensor] = []  # or the memory of one tensor would be given to another

    def entry(tensor: Tensor) -> _Readers:
        alive.append(tensor)
        key = (tensor.data_ptr(), tensor.numel())
        return by_tensor.setdefault(key, _Readers(None, [], []))

    def on_input(name: str, module: nn.Module, tensor: Tensor) -> None:
        readers = entry(tensor)
        names = readers.linears if isinstance(module, nn.Linear) else readers.others
        if name not in names:
            names.append(name)

    def on_output(name: str, tensor: Tensor) -> None:
        readers = entry(tensor)
        readers.norm = name

    with _hooks(layer, on_input, on_output):
        run()
    found = [r for r in by_tensor.values() if r.linears or (r.norm is not None and r.others)]
    ran = {name for readers in found for name in readers.linears}
    idle = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
    return found + [_Readers(None, [name], []) for name in idle if name not in ran]


@contextmanager
def _hooks(
    layer: nn.Module,
    on_input: Callable[[str, nn.Module, Tensor], None],
    on_output: Callable[[str, Tensor], None],
) -> Iterator[None]:
    """Report inputs of all modules that compute something, and outputs of norms with a weight."""

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    on_input(name, module, value)

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            channels = module.get_parameter("weight").numel()
            if isinstance(output, Tensor) and output.shape[-1] == channels:
                on_output(name, output)

        return hook

    handles = []
    for name, module in layer.named_modules():
        if _computes(module):
            handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        if _is_norm(module):
            handles.append(module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _computes(module: nn.Module) -> bool:
    """Whether a module reads its input itself, rather than hand it to its children or on."""
    passes_on = isinstance(module, nn.Identity | nn.Dropout)
    has_parameters = next(module.parameters(recurse=False), None) is not None
    return not passes_on and (has_parameters or next(module.children(), None) is None)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, Tensor)


def _candidate(layer: nn.Module, config: Any, readers: _Readers) -> SmoothingPair | SkippedPair:
    """Return the pair whose targets are these readers, yet to be proven."""
    targets = ", ".join(readers.linears)
    if readers.norm is None:
        if len(readers.linears) == 1:
            return _between_linears(layer, config, readers.linears[0])
        return SkippedPair(targets, "no norm with a weight feeds them directly")
    if readers.others:
        name = f"{readers.norm} -> {', '.join(readers.linears + readers.others)}"
        return SkippedPair(name, f"not linear modules: {', '.join(readers.others)}")
    offset = norm_offset(layer.get_submodule(readers.norm))
    if offset is None:
        reason = "how the norm uses its weight is not known"
        return SkippedPair(f"{readers.norm} -> {targets}", reason)
    return SmoothingPair(readers.norm, tuple(readers.linears), norm_offset=offset)


def norm_offset(norm: nn.Module) -> float | None:
    """Return what a norm adds to its weight before it multiplies by it: 0, or 1 in Gemma.

    None if the output is not proportional to `offset + weight`. Tried out on random numbers.
    """
    parameters = {name: parameter.data for name, parameter in norm.named_parameters(recurse=False)}
    weight = parameters["weight"]
    x = torch.randn(4, weight.numel(), generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype)
    outputs = []
    try:
        for value in (0.0, 1.0, 3.0):
            restore(norm, {name: torch.zeros_like(data) for name, data in parameters.items()})
            restore(norm, {"weight": torch.full_like(weight, value)})
            outputs.append(norm(x).float())
    finally:
        restore(norm, parameters)
    zero, one, three = outputs
    for offset in (0.0, 1.0):
        unit = one / (1 + offset)
        if torch.allclose(zero, offset * unit, rtol=0.02, atol=1e-6) and torch.allclose(
            three, (3 + offset) * unit, rtol=0.02, atol=1e-6
        ):
            return offset
    return None


def _between_linears(layer: nn.Module, config: Any, target: str) -> SmoothingPair | SkippedPair:
    """Return up -> down or v -> o, by names."""
    parent, _, leaf = target.rpartition(".")
    siblings = [name for name, _ in layer.get_submodule(parent).named_children()]
    for ends in (_ATTENTION, _MLP):
        if leaf not in ends.targets:
            continue
        for name in (name for name in siblings if name in ends.interleaved):
            reason = f"the rows of {name} for queries, keys and values are interleaved"
            return SkippedPair(target, reason)
        for name in siblings:
            if name in ends.sources + ends.fused:
                source = f"{parent}.{name}".removeprefix(".")
                fused = name in ends.fused
                if ends is _MLP:
                    return _up_down(layer, source, target, fused)
                return _value_out(layer, config, source, target, fused)
    return SkippedPair(target, "no norm feeds it directly, and no linear beside it is known to")


def _widths(layer: nn.Module, source: str, target: str) -> tuple[int, int]:
    """Return how many channels the source gives and the target reads."""
    given = layer.get_parameter(f"{source}.weight").shape[0]
    return given, layer.get_parameter(f"{target}.weight").shape[1]


def _up_down(
    layer: nn.Module, source: str, target: str, fused: bool
) -> SmoothingPair | SkippedPair:
    given, read = _widths(layer, source, target)
    if given != read * (2 if fused else 1):
        name = f"{source} -> {target}"
        return SkippedPair(name, f"it gives {given} channels and the target reads {read}")
    return SmoothingPair(source, (target,), rows=(read, given) if fused else None)


def _value_out(
    layer: nn.Module, config: Any, source: str, target: str, fused: bool
) -> SmoothingPair | SkippedPair:
    name, text_config = f"{source} -> {target}", config.get_text_config()
    if getattr(text_config, "num_kv_shared_layers", 0):
        return SkippedPair(name, "layers of this model read the values that others cached")
    given, read = _widths(layer, source, target)
    values = (given - read) // 2 if fused else given  # as many queries as the target reads
    attention = layer.get_submodule(target.rpartition(".")[0])
    head_dim = getattr(attention, "head_dim", None) or getattr(text_config, "head_dim", None)
    head_dim = head_dim or (values if values == read else None)
    if not head_dim or values < 1 or values % head_dim or read % values:
        return SkippedPair(
            name, f"{values} value channels and {read} of the target do not make equal heads"
        )
    heads = HeadGroups(read // head_dim, values // head_dim, head_dim)
    rows = (given - values, given) if fused else None
    return SmoothingPair(source, (target,), heads, rows=rows)
