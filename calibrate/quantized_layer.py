"""Quantize the linear modules of one decoder layer in place, and emulate what inference will do.

Weights become the values their codes stand for; inputs pass through the format on their way in.
The module computes in the source's floating-point type on exactly representable operands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log10
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.calibrate.moments import InputMoments, group_name
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.tiers import NO_TIERS, Tiers
from quantkit.calibrate.weight_tiers import TierChoice, choose_tiers
from quantkit.checkpoint import check_scale
from quantkit.numerics import Format, amax_to_scale, dequantize, fake_quantize, tile_amax
from quantkit.rounding_ops import round_rows
from quantkit.scheme import Granularity, QuantSpec


@dataclass(slots=True)
class QuantizedLinear:
    """What calibration found out about one linear module; `name` is its name on disk.

    spec: how the weight is quantized. codes [out, in]; weight_scale as `QuantSpec.scale_shape`;
    columns int64 [n] and exact bfloat16 [out, n] for input channels beside the codes; input_scale
    [1] for static inputs. The output errors are in dB, on tokens that no tier was fitted to; None
    without data.
    """

    name: str
    spec: QuantSpec
    codes: Tensor
    weight_scale: Tensor
    weight_sqnr_db: float
    outlier_ratio: float
    num_clipped: int
    zeroed_share: float = 0.0  # of the weights that are not zero, how many became zero
    tiers: tuple[str, ...] = ()
    plain_output_sqnr_db: float | None = None
    output_sqnr_db: float | None = None
    columns: Tensor | None = None
    exact: Tensor | None = None
    input_scale: Tensor | None = None
    input_amax: float | None = None
    input_range: float | None = None
    inputs_clipped: int | None = None  # of the calibration data; None without a static scale

    def set_input_range(self, largest: float, amax: float, spec: QuantSpec) -> None:
        """Fix the static input scale, of which `largest` becomes the largest code.

        `amax` is the largest input that was seen.
        """
        self.input_amax, self.input_range = amax, largest
        self.input_scale = amax_to_scale(torch.tensor([largest]), spec.fmt)
        self.inputs_clipped = 0

    def count_clipped(self, x: Tensor, fmt: Format) -> None:
        """Count the inputs that are beyond the static scale's largest code, if any can be."""
        if self.input_scale is None or self.input_amax is None or self.inputs_clipped is None:
            return
        limit = fmt.max * self.input_scale.item()
        # Weights quantized since, before it in the layer, move the inputs a little from those seen.
        if self.input_amax > limit / 2:
            self.inputs_clipped += int((x.abs() > limit).sum())

    def values(self) -> Tensor:
        """Return the weight that the codes stand for, exact columns in place. float32 [out, in]."""
        tile, grid = self.spec.tile(*self.codes.shape), self.spec.grid(self.weight_scale)
        values = dequantize(self.codes, grid, self.spec.fmt, tile)
        if self.columns is not None and self.exact is not None:
            values[:, self.columns.cpu()] = self.exact.cpu().float()
        return values

    def tensors(self) -> dict[str, Tensor]:
        """Return what is stored, by the last part of the tensor's name."""
        stored = {"weight": self.codes, "weight_scale": self.weight_scale}
        if self.input_scale is not None:
            stored["input_scale"] = self.input_scale
        if self.columns is not None and self.exact is not None:
            stored["outlier_columns"] = self.columns.to("cpu", torch.int32)
            stored["outlier_weight"] = self.exact.cpu().contiguous()
        return stored


def quantize_weights(
    skeleton: Skeleton,
    modules: Mapping[str, nn.Linear],
    spec: QuantSpec,
    tiers: Tiers = NO_TIERS,
    moments: Mapping[str, InputMoments] | None = None,
    changed: Collection[str] = (),
) -> dict[str, QuantizedLinear]:
    """Quantize the given, loaded modules; their weights become the dequantized values.

    `moments` of a module's inputs allow the tiers; a module without them is rounded plainly.
    Weights of the modules in `changed` are not the source's any more. With
    one scale a tensor, members of a fused group (q/k/v, gate/up) share it, so that an engine which
    fuses them need not round again; members also share their format and exact columns. Raises
    CalibrationError for a scale that is not finite and positive.
    """
    found: dict[str, QuantizedLinear] = {}
    for names in _stacks(modules, spec):
        weights = [_stored_weight(skeleton, name, name in changed) for name in names]
        known = (moments or {}).get(names[0])
        choice = choose_tiers(_stack(weights), known, spec, tiers)
        rows = [weight.shape[0] for weight in weights]
        for name, weight, part in zip(names, weights, choice.split(rows), strict=True):
            linear = _describe(skeleton.disk_name(name), weight, part)
            check_scale(f"{linear.name}.weight_scale", linear.weight_scale)
            found[name] = linear
            parameter = modules[name].weight
            parameter.data = part.chosen.values().to(parameter.dtype)
    return {name: found[name] for name in modules}


def _stacks(modules: Mapping[str, nn.Linear], spec: QuantSpec) -> list[list[str]]:
    """Group the modules that are quantized together: fused groups, unless blocks would straddle."""
    if spec.granularity is Granularity.BLOCK:
        return [[name] for name in modules]
    groups: dict[str, list[str]] = {}
    for name, module in modules.items():
        first = group_name(name, modules)
        same_input = modules[first].in_features == module.in_features
        groups.setdefault(first if same_input else name, []).append(name)
    return list(groups.values())


def _stack(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _stored_weight(skeleton: Skeleton, name: str, is_changed: bool) -> Tensor:
    """Return a weight in the source's own dtype: codes must not depend on the compute dtype.

    One that was changed after loading is only known as it is.
    """
    weight = f"{name}.weight"
    stored = skeleton.stored_name(weight)
    parameter: Tensor = skeleton.model.get_parameter(weight)
    if is_changed or stored is None or skeleton.source.dtype(stored) == parameter.dtype:
        return parameter
    return skeleton.source.tensor(stored).to(parameter.device)


def _describe(name: str, weight: Tensor, choice: TierChoice) -> QuantizedLinear:
    chosen = choice.chosen
    row_amax = weight.abs().amax(dim=1).float()
    middle = row_amax.median().item()
    has_data, values = chosen.judged_on_data, chosen.values()
    return QuantizedLinear(
        name=name,
        spec=chosen.spec,
        codes=chosen.codes.cpu(),
        weight_scale=chosen.scale.reshape(chosen.spec.scale_shape(*weight.shape)).cpu(),
        weight_sqnr_db=sqnr_db(weight, values),
        outlier_ratio=row_amax.max().item() / middle if middle > 0 else inf,
        num_clipped=int(chosen.num_clipped(weight).sum()),
        zeroed_share=_zeroed_share(weight, values),
        tiers=chosen.tiers,
        plain_output_sqnr_db=_decibels(choice.signal, choice.plain.error) if has_data else None,
        output_sqnr_db=_decibels(choice.signal, chosen.error) if has_data else None,
        columns=chosen.columns,
        exact=chosen.exact,
    )


def _zeroed_share(weight: Tensor, values: Tensor) -> float:
    nonzero = weight != 0
    count = int(nonzero.sum())
    return int((nonzero & (values == 0)).sum()) / count if count else 0.0


def _decibels(signal: Tensor, noise: Tensor) -> float:
    power, error = signal.sum().item(), noise.sum().item()
    if error <= 0:
        return inf
    return 10 * log10(power / error) if power > 0 else -inf


def sqnr_db(signal: Tensor, approximation: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio, `10 log10(sum x^2 / sum (x - x')^2)`, in dB.

    Infinite for an exact approximation, -infinite for an error on nothing. Shapes: any, equal.
    """
    power = torch.linalg.vector_norm(signal, dtype=torch.float32).item()
    noise = torch.linalg.vector_norm(torch.sub(approximation.float(), signal)).item()
    if noise == 0:
        return inf
    return 20 * log10(power / noise) if power > 0 else -inf


class InputQuantizers:
    """Forward hooks that pass the input of quantized modules through the 8-bit format.

    Siblings that read the same tensor share one conversion.
    """

    def __init__(self, modules: Mapping[str, nn.Linear], spec: QuantSpec) -> None:
        self._spec = spec
        self._linears: dict[str, QuantizedLinear] = {}
        self._scales: dict[str, Tensor | None] = {}
        self._last: tuple[Tensor, Tensor | None, Tensor] | None = None
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._hook(name)) for name, module in modules.items()
        ]

    def start(self, linears: Mapping[str, QuantizedLinear], device: torch.device) -> None:
        """Convert the inputs of these from now on; they are on `device`."""
        for name, linear in linears.items():
            scale = linear.input_scale
            self._linears[name] = linear
            self._scales[name] = None if scale is None else scale.to(device)

    def forget_clipped(self) -> None:
        """Count clipped inputs from here on."""
        for linear in self._linears.values():
            linear.inputs_clipped = None if linear.input_scale is None else 0

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._last = None

    def _hook(self, name: str) -> Any:
        def convert(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if name not in self._linears:
                return args
            self._linears[name].count_clipped(args[0], self._spec.fmt)
            return (self._convert(args[0], self._scales[name]), *args[1:])

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
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if scale is not None and scale.numel() == 1:
        return round_rows(rows, scale.view(1), spec.fmt).view(x.shape)
    tile = spec.tile(*rows.shape)
    if scale is None and tile[0] == 1 and rows.shape[1] % tile[1] == 0:
        return round_rows(rows.view(-1, tile[1]), None, spec.fmt).view(x.shape)
    grid = amax_to_scale(tile_amax(rows, tile), spec.fmt) if scale is None else spec.grid(scale)
    return fake_quantize(rows, grid, spec.fmt, tile).view(x.shape)
