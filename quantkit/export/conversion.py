"""The tensors of an export, one after another, from those of a checkpoint.

Owns names and order. What happens to a weight is in `requantize`, what the result is to be in
`target`, how a format names and shapes scales in `containers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.checkpoint import BESIDE_WEIGHTS, Checkpoint
from quantkit.containers import Container
from quantkit.errors import UnsupportedError
from quantkit.export.requantize import Converted, Loss, convert_group
from quantkit.numerics import E4M3, amax_to_scale
from quantkit.quantized_weight import QuantizedWeight
from quantkit.scheme import QuantSpec, Scheme, fused_siblings

Named = tuple[str, Tensor]


@dataclass(slots=True)
class Conversion:
    """A checkpoint on its way into another container.

    `input_amax` gives the largest |input| of modules, for scales that the checkpoint does not have.
    `plain` are quantized modules that are not to be in the result: see `plain_modules`. `loss` sums
    up what rounding again has cost so far.
    """

    source: Checkpoint
    scheme: Scheme
    container: Container
    input_amax: Mapping[str, float]
    plain: Collection[str] = ()
    loss: Loss = field(default_factory=Loss)

    def tensors(self, advance: Callable[[], None]) -> Iterator[Named]:
        """Yield every tensor of the export once; `advance` counts the weights that are done."""
        quantized = set(self.source.quantized)
        done: set[str] = set()
        for name in self.source.names:
            module, _, leaf = name.rpartition(".")
            if module in self.plain:
                if leaf == "weight":
                    yield from self._dequantized(module)
                    advance()
                continue
            if module in quantized and module not in done:
                group = self._fused(module, quantized)
                yield from self._group(group)
                done.update(group)
                for _ in group:
                    advance()
            if not BESIDE_WEIGHTS.search(name) and not (module in quantized and leaf == "weight"):
                yield name, self.source.tensor(name)
        if self.scheme.kv is not None:
            yield from self._kv_scales(self.scheme.kv)

    def _dequantized(self, module: str) -> Iterator[Named]:
        """Yield the weight of a head in 16 bits; nothing if it is tied to the embedding."""
        text = self.source.config.get("text_config") or self.source.config
        if not text.get("tie_word_embeddings", True):
            yield f"{module}.weight", self.source.weight(module).dequantize(torch.bfloat16)

    def _fused(self, module: str, quantized: Collection[str]) -> list[str]:
        """Return the modules that share scales with `module`: itself alone in its own format."""
        same = self.container is self.source.container
        if same and self.scheme.weights == self.source.scheme.weights:
            return [module]
        return [sibling for sibling in fused_siblings(module) if sibling in quantized]

    def _group(self, modules: list[str]) -> Iterator[Named]:
        """Yield the tensors of modules that engines fuse."""
        weights = [self.source.weight(module) for module in modules]
        importance = self.source.input_mean_square(modules[0])
        converted = convert_group(weights, self.scheme.weights, importance)
        inputs = self._input_scales(dict(zip(modules, weights, strict=True)))
        for module, found in zip(modules, converted, strict=True):
            self.loss += found.loss
            yield f"{module}.weight", found.codes
            yield self._weight_scale(module, found)
            if module in inputs:
                yield f"{module}.{self.container.names.input_scale[0]}", inputs[module]

    def _weight_scale(self, module: str, found: Converted) -> Named:
        shapes = self.container.weight_scale_shapes(self.scheme.weights, *found.codes.shape)
        leaf = self.container.names.weight_scale[0]
        return f"{module}.{leaf}", found.scale.reshape(shapes[0])

    def _input_scales(self, weights: Mapping[str, QuantizedWeight]) -> dict[str, Tensor]:
        """Return the scale of each module's static input; modules that are fused share one."""
        if self.scheme.inputs is None or self.scheme.inputs.dynamic:
            return {}
        scales = [
            self._scale_from_amax(module) if weight.input_scale is None else weight.input_scale
            for module, weight in weights.items()
        ]
        shared = torch.stack([scale.reshape(()) for scale in scales]).max()
        return {m: shared.reshape(self.container.input_scale_shapes()[0]) for m in weights}

    def _scale_from_amax(self, module: str) -> Tensor:
        amax = self.input_amax.get(module)
        if not amax:
            raise UnsupportedError(
                f"{self.container.name} has a static scale for the input of {module}, and "
                f"{self.source.path} does not say how large that input gets; calibrate with "
                "--recipe fp8-static"
            )
        return amax_to_scale(torch.tensor(amax), E4M3)

    def _kv_scales(self, spec: QuantSpec) -> Iterator[Named]:
        """Yield the scales of keys and values of every layer that caches them."""
        names = self.container.names
        for layer, attention in self.source.kv_modules().items():
            leaves = (names.k_scale[0], names.v_scale[0])
            for leaf, scale in zip(leaves, self.source.kv_scales(layer), strict=True):
                shapes = self.container.kv_scale_shapes(spec, scale.numel())
                yield f"{attention}.{leaf}", self._kv_scale(scale, spec).reshape(shapes[0])

    def _kv_scale(self, scale: Tensor, spec: QuantSpec) -> Tensor:
        """Return the scale under which the format of the result reaches as far."""
        own = self.source.scheme.kv
        if own is None or own.format == spec.format:
            return scale
        return amax_to_scale(scale * own.fmt.max, spec.fmt)


def plain_modules(source: Checkpoint) -> list[str]:
    """Return the modules of a native checkpoint that no other format quantizes: the output head.

    It is not in a list of layers, so that no part of its name is a number.
    """
    if not source.scheme.native:
        return []
    return [m for m in source.quantized if not any(part.isdigit() for part in m.split("."))]
