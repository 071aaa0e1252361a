"""A transformers model of a quantized checkpoint, its quantized linears swapped for ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quantkit.errors import CheckpointError, UnsupportedError, first_line
from quantkit.experts import FUSED, find_fused, split_experts
from quantkit.linears import is_linear
from quantkit.model_names import is_converted, names_in_model
from quantkit.quantized_weight import QuantizedWeight
from quantkit.runtime.layers import Linear
from quantkit.runtime.module_places import ModulePlaces
from quantkit.runtime.placement import DeviceMap
from quantkit.runtime.weights import WeightReader


class SwappedLinear(nn.Module):
    """Stands where transformers had an nn.Linear. Shapes: [..., in_features] in, any rank.

    `stored` is what `linear` was made of.
    """

    def __init__(
        self, linear: Linear, stored: QuantizedWeight, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = stored.codes.shape
        self._stored = stored
        self._dtype = dtype
        self._device = device

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, for models that multiply by it themselves, as Mamba does."""
        return self._stored.dequantize(self._dtype).to(self._device)

    @property
    def bias(self) -> Tensor | None:
        """The bias, for the same models."""
        bias = self._stored.bias
        return None if bias is None else bias.to(self._device, self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of x's rank."""
        rows = x.reshape(-1, self.in_features).contiguous()
        return self.linear(rows).view(*x.shape[:-1], self.out_features)


def load_model(reader: WeightReader, config: Any, device_map: str | DeviceMap | None = None) -> Any:
    """Return the transformers model of a checkpoint, its quantized linears swapped for ours.

    `device_map` spreads it over GPUs, with accelerate; see `quantkit.load_fp8`. Raises
    UnsupportedError if a quantized module is no nn.Linear there, and CheckpointError, with its
    name, if a tensor is missing.
    """
    model = _empty_model(config, reader.dtype)
    _split_experts(model, reader.checkpoint.names)
    names = names_in_model(model, reader.checkpoint.names)
    placed = ModulePlaces.of(model, device_map, reader, names)
    for module in reader.checkpoint.quantized:
        weight_name = names.get(f"{module}.weight")
        _swap(model, weight_name, module, reader, placed)
        # A head that is quantized is tied to its embedding no longer.
        model.all_tied_weights_keys.pop(weight_name, None)
    # A swapped linear has no tensors of its own left, so what remains is what was not quantized.
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plain = {
        inner: reader.on(placed.device_of(inner)).tensor(outer, shapes[inner])
        for outer, inner in names.items()
        if inner in shapes
    }
    model.load_state_dict(plain, strict=False, assign=True)
    model.tie_weights(recompute_mapping=False)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing and is_converted(model, missing[0]):
        raise UnsupportedError(
            f"{type(model).__name__} makes {missing[0]} of tensors that the checkpoint holds "
            "otherwise, as transformers does on loading; quantkit cannot run it, transformers can"
        )
    if missing:
        raise CheckpointError(
            f"{reader.checkpoint.path} lacks {len(missing)} tensors of {type(model).__name__}, the "
            f"first being {missing[0]}"
        )
    _report_unused(model, reader.unused())
    return placed.dispatch(model).eval()


def _report_unused(model: Any, names: Sequence[str]) -> None:
    if names:
        logging.getLogger("quantkit").warning(
            "%s does not use %d tensors of the checkpoint, the first being %s",
            type(model).__name__,
            len(names),
            names[0],
        )


def _empty_model(config: Any, dtype: torch.dtype) -> Any:
    """Build the model without memory for its weights; computed buffers are real."""
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # a class that its config does not fit raises of every kind
        raise UnsupportedError(
            f"transformers has no causal language model for {config.model_type!r} with this "
            f"config.json: {first_line(error)}"
        ) from error


def _split_experts(model: Any, names: Sequence[str]) -> None:
    """Give each expert linears of its own, but where the checkpoint has all of a layer in one."""
    stored = set(names_in_model(model, names).values())
    fused = [e for e in find_fused(model) if f"{e.name}.{FUSED[0]}" not in stored]
    split_experts(model, fused)


def _swap(
    model: Any,
    weight_name: str | None,
    module: str,
    reader: WeightReader,
    placed: ModulePlaces,
) -> None:
    target = (weight_name or module).removesuffix(".weight")
    old = model.get_submodule(target) if weight_name else None
    if old is None or not is_linear(old):
        kind = "missing" if old is None else f"a {type(old).__name__}"
        raise UnsupportedError(
            f"{module} is quantized and is {kind} in {type(model).__name__} of transformers; "
            "only linear layers can be served"
        )
    size = (old.out_features, old.in_features)
    source = reader.on(placed.device_of(target))
    linear = source.linear([module], [size[0]], size[1], bias=old.bias is not None)
    stored = reader.checkpoint.weight(module)
    model.set_submodule(target, SwappedLinear(linear, stored, reader.dtype, source.device))
