"""Quantize the linear modules of one decoder layer in place, and emulate what inference will do.

Weights become the values their codes stand for; inputs pass through the format on their way in.
The module computes in the source's floating-point type on exactly representable operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log10
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.calibrate.observers import AmaxObserver, amax_of, canonical_input
from quantkit.calibrate.skeleton import Skeleton
from quantkit.checkpoint import check_scale
from quantkit.errors import CalibrationError
from quantkit.numerics import amax_to_scale, dequantize, fake_quantize, quantize, tile_amax
from quantkit.scheme import Granularity, QuantSpec, fused_siblings


@dataclass(slots=True)
class QuantizedLinear:
    """What calibration found out about one linear module; `name` is its name on disk.

    codes [out, in]; weight_scale as `QuantSpec.scale_shape`; input_scale [1] for static inputs.
    """

    name: str
    codes: Tensor
    weight_scale: Tensor
    weight_sqnr_db: float
    input_scale: Tensor | None = None
    input_amax: float | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return what is stored, by the last part of the tensor's name."""
        stored = {"weight": self.codes, "weight_scale": self.weight_scale}
        if self.input_scale is not None:
            stored["input_scale"] = self.input_scale
        return stored


def quantize_weights(
    skeleton: Skeleton, modules: Mapping[str, nn.Linear], spec: QuantSpec
) -> dict[str, QuantizedLinear]:
    """Quantize the given, loaded modules; their weights become the dequantized values.

    With one scale a tensor, members of a fused group (q/k/v, gate/up) share the largest, so that
    an engine which fuses them need not round again. Raises CalibrationError for a scale that is
    not finite and positive.
    """
    weights = {name: _stored_weight(skeleton, name) for name in modules}
    amax = {name: tile_amax(w, spec.tile(*w.shape)) for name, w in weights.items()}
    if spec.granularity is Granularity.TENSOR:
        amax = {name: _shared_amax(name, amax) for name in amax}
    return {
        name: _quantize_weight(skeleton.disk_name(name), module, weights[name], amax[name], spec)
        for name, module in modules.items()
    }


def _stored_weight(skeleton: Skeleton, name: str) -> Tensor:
    """Return a weight in the source's own dtype: codes must not depend on the compute dtype."""
    weight = f"{name}.weight"
    stored = skeleton.source_name(weight)
    parameter: Tensor = skeleton.model.get_parameter(weight)
    if stored is None or skeleton.source.dtype(stored) == parameter.dtype:
        return parameter
    return skeleton.source.tensor(stored).to(parameter.device)


def _shared_amax(name: str, amax: Mapping[str, Tensor]) -> Tensor:
    group = [amax[sibling] for sibling in fused_siblings(name) if sibling in amax]
    return torch.stack(group).amax(dim=0)


def _quantize_weight(
    name: str, module: nn.Linear, weight: Tensor, amax: Tensor, spec: QuantSpec
) -> QuantizedLinear:
    scale, tile = amax_to_scale(amax, spec.fmt), spec.tile(*weight.shape)
    codes = quantize(weight, scale, spec.fmt, tile)
    values = dequantize(codes, scale, spec.fmt, tile)
    error = sqnr_db(weight, values)  # before `weight`, which may be the parameter itself, changes
    module.weight.data = values.to(module.weight.dtype)
    stored = scale.reshape(spec.scale_shape(*weight.shape)).cpu()
    check_scale(f"{name}.weight_scale", stored)
    return QuantizedLinear(name, codes.cpu(), stored, error)


def sqnr_db(signal: Tensor, approximation: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio, `10 log10(sum x^2 / sum (x - x')^2)`, in dB.

    Infinite for an exact approximation, -infinite for an error on nothing. Shapes: any, equal.
    """
    power = torch.linalg.vector_norm(signal, dtype=torch.float32).item()
    noise = torch.linalg.vector_norm(torch.sub(approximation.float(), signal)).item()
    if noise == 0:
        return inf
    return 20 * log10(power / noise) if power > 0 else -inf


class InputObservers:
    """Forward hooks that record the range of every module's input, for static scales.

    Siblings that read the same tensor share one observation of it.
    """

    def __init__(self, modules: Mapping[str, nn.Linear]) -> None:
        self._observers = {name: AmaxObserver() for name in modules}
        self._last: tuple[Tensor, Tensor] | None = None
        self._handles = [
            module.register_forward_pre_hook(self._hook(self._observers[name]))
            for name, module in modules.items()
        ]

    def _hook(self, observer: AmaxObserver) -> Any:
        def observe(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            if self._last is None or self._last[0] is not x:
                self._last = (x, amax_of(canonical_input(x)))
            observer.merge(self._last[1], x.numel() // max(x.shape[-1], 1))

        return observe

    def finish(self, linears: Mapping[str, QuantizedLinear], spec: QuantSpec) -> None:
        """Remove the hooks and set each module's input scale, shared within fused groups.

        Raises CalibrationError naming a module that never ran or whose input was not finite.
        """
        for handle in self._handles:
            handle.remove()
        amax = {}
        for name, observer in self._observers.items():
            if observer.amax is None:
                raise CalibrationError(
                    f"no calibration token reached {name}, so its input scale is unknown; add data "
                    "or use a recipe with dynamic inputs (fp8-dynamic)"
                )
            if not observer.amax.isfinite().all():
                raise CalibrationError(
                    f"the input of {name} has NaN or infinite values on the calibration data; "
                    "the model itself is broken at this layer"
                )
            amax[name] = observer.amax
        for name, linear in linears.items():
            shared = _shared_amax(name, amax)
            linear.input_amax = float(shared.item())
            linear.input_scale = amax_to_scale(shared.cpu(), spec.fmt)


class InputQuantizers:
    """Forward hooks that pass every module's input through the 8-bit format.

    Siblings that read the same tensor share one conversion.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Linear],
        linears: Mapping[str, QuantizedLinear],
        spec: QuantSpec,
    ) -> None:
        self._spec = spec
        self._last: tuple[Tensor, Tensor | None, Tensor] | None = None
        self._handles: list[RemovableHandle] = []
        for name, module in modules.items():
            scale = linears[name].input_scale
            placed = None if scale is None else scale.to(module.weight.device)
            self._handles.append(module.register_forward_pre_hook(self._hook(placed)))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._last = None

    def _hook(self, scale: Tensor | None) -> Any:
        def convert(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (self._convert(args[0], scale), *args[1:])

        return convert

    def _convert(self, x: Tensor, scale: Tensor | None) -> Tensor:
        if self._last is not None:
            source, used_scale, result = self._last
            same_scale = used_scale is scale or (
                scale is not None and used_scale is not None and torch.equal(scale, used_scale)
            )
            if source is x and same_scale:
                return result
        result = fake_quantize_input(x, scale, self._spec)
        self._last = (x, scale, result)
        return result


def fake_quantize_input(x: Tensor, scale: Tensor | None, spec: QuantSpec) -> Tensor:
    """Return what an engine's matmul sees of its input.

    Shapes: x [..., features]; scale [1] for static inputs, or None to derive it from x by token
    or by group, as `spec` says.
    """
    rows = x.reshape(-1, x.shape[-1])
    tile = spec.tile(*rows.shape)
    if scale is None:
        grid = amax_to_scale(tile_amax(rows, tile), spec.fmt)
    else:
        grid = spec.grid(scale)
    return fake_quantize(rows, grid, spec.fmt, tile).view(x.shape)
