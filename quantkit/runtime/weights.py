"""Read the weights of a checkpoint as layers, by the names of their modules.

Checks every shape against what the model needs, names the tensor where they differ, and knows in
the end which tensors nobody asked for. Holds no layers itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from quantkit.checkpoint import (
    BESIDE_WEIGHTS,
    OUTLIER_COLUMNS,
    OUTLIER_WEIGHT,
    Checkpoint,
)
from quantkit.errors import CheckpointError
from quantkit.quantized_weight import QuantizedWeight
from quantkit.runtime.block_linear import BlockLinear, codes_from
from quantkit.runtime.kv_cache import Scales
from quantkit.runtime.layers import DenseLinear, Fp8Linear, Linear, check_codes
from quantkit.runtime.saturation import Saturation
from quantkit.runtime.scaled_linear import ScaledLinear
from quantkit.scheme import QuantSpec

_NOT_WEIGHTS = re.compile(rf"{BESIDE_WEIGHTS.pattern}|\.inv_freq$|^lm_head\.weight$")
"""Scales come with their weights, frequencies from the config, a tied head from the embedding."""


class WeightSource(Protocol):
    """Where a decoder takes its weights from, on one device and in one activation dtype."""

    device: torch.device
    dtype: torch.dtype

    def on(self, device: torch.device) -> WeightSource:
        """Return the same source, for weights on another device."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return an unquantized tensor in the activation dtype."""
        ...

    def linear(
        self, modules: Sequence[str], rows: Sequence[int], columns: int, bias: bool
    ) -> Linear:
        """Return linear layers that read the same input, stacked in order into one."""
        ...

    def head(self, module: str, embedding: Tensor, tied: bool) -> Linear:
        """Return the output head, which gives float32 logits; see WeightReader."""
        ...

    def check_all_used(self) -> None:
        """Raise CheckpointError if a weight was never asked for."""
        ...


class WeightReader:
    """Reads tensors of one checkpoint for one device and activation dtype.

    `inputs` says how to round the inputs of linears, if at all. They are multiplied in 8 bits where
    there are more than `few_rows` rows, and fewer are left alone; with None they are rounded to
    values of their own dtype. `saturation` counts inputs that static scales cannot hold.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        inputs: QuantSpec | None = None,
        few_rows: int | None = None,
        saturation: Saturation | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.inputs = inputs
        self.saturation = saturation
        self._few_rows = few_rows
        self._quantized = frozenset(checkpoint.quantized)
        self._used: set[str] = set()

    def on(self, device: torch.device) -> WeightReader:
        """Return the same reader, for weights on another device; both count what was read."""
        other = copy(self)
        other.device = device
        return other

    def stored_bytes(self) -> dict[str, int]:
        """Return how many bytes every tensor takes in the checkpoint, by name."""
        return {name: self.checkpoint.tensor(name).nbytes for name in self.checkpoint.names}

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in the activation dtype; memory-mapped if it is stored in that.

        One in FP8, as some tools store embeddings, is dequantized.
        """
        if name not in self.checkpoint:
            raise CheckpointError(f"{self.checkpoint.path} has no tensor {name}, which it needs")
        self._check_shape(name, shape)
        self._used.add(name)
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in self._quantized:
            stored = self.checkpoint.weight(module).dequantize()
        else:
            stored = self.checkpoint.tensor(name)
        if not stored.is_floating_point():
            if name.endswith((".weight", ".bias")):
                raise CheckpointError(
                    f"{name} of {self.checkpoint.path} is {stored.dtype}, expected floating point; "
                    "download the folder again"
                )
            return stored.to(self.device)
        loaded = stored.to(self.device, self.dtype)
        if self.dtype == torch.float16 and stored.dtype != torch.float16:
            _check_overflow(name, stored, loaded)
        return loaded

    def linear(
        self, modules: Sequence[str], rows: Sequence[int], columns: int, bias: bool
    ) -> Linear:
        """Return linear layers that read the same input, stacked in order into one.

        `rows[i]` is out_features of `modules[i]`. Raises CheckpointError if only some of them are
        quantized, or a bias is missing.
        """
        quantized = [module in self._quantized for module in modules]
        if all(quantized):
            weights = [
                self._quantized_weight(module, (count, columns), bias)
                for module, count in zip(modules, rows, strict=True)
            ]
            layer = Fp8Linear.stack(weights, self.inputs)
            if self.saturation is not None:
                layer = layer.counting(modules[0], self.saturation)
            return self._on_device(layer)
        if any(quantized):
            raise CheckpointError(
                f"{modules[quantized.index(True)]} is quantized and "
                f"{modules[quantized.index(False)]} is not; layers that read the same input must "
                "agree, so ignore all of them or none"
            )
        pairs = list(zip(modules, rows, strict=True))
        kernels = [self.tensor(f"{module}.weight", (count, columns)) for module, count in pairs]
        offsets = [self.tensor(f"{module}.bias", (count,)) for module, count in pairs if bias]
        return DenseLinear(
            kernels[0] if len(kernels) == 1 else torch.cat(kernels),
            torch.cat(offsets) if bias else None,
        )

    def head(self, module: str, embedding: Tensor, tied: bool) -> Linear:
        """Return the output head `module`; of a tied one, the embedding [vocab, hidden_size].

        A native checkpoint may hold a tied head in 8 bits beside the embedding; in others that
        would contradict the config. On a GPU, whose kernels round results to 16 bits, it is
        dequantized.
        """
        rows, columns = embedding.shape
        own = module in self._quantized and self.checkpoint.scheme.native
        if tied and not own:
            return DenseLinear(embedding)
        if self.device.type == "cuda":
            return DenseLinear(self.tensor(f"{module}.weight", (rows, columns)))
        return self.linear([module], [rows], columns, False)

    def _on_device(self, layer: Fp8Linear) -> Linear:
        layer = layer.to(self.device)
        if self._few_rows is None:
            return layer
        scaled = ScaledLinear.wrap(layer, self._few_rows)
        if scaled is not None:
            return scaled
        from_rows = codes_from(self._few_rows, self.device)
        blocks = None if from_rows is None else BlockLinear.wrap(layer, from_rows)
        if blocks is not None:
            return blocks
        return layer.without_input_quantizer() if self._few_rows else layer

    def kv_scales(self, layer: int) -> Scales | None:
        """Return (k_scale, v_scale) of a layer, on the device; None if its cache is plain."""
        if layer in self.checkpoint.scheme.kv_ignore:
            return None
        key, value = self.checkpoint.kv_scales(layer)
        return key.to(self.device), value.to(self.device)

    def unused(self) -> list[str]:
        """Return the names of weights that were never read, sorted."""
        weights = {name for name in self.checkpoint.names if not _NOT_WEIGHTS.search(name)}
        # A head in FP8 is no copy of the embedding that it is tied to.
        weights |= {f"{module}.weight" for module in self._quantized}
        return sorted(weights - self._used)

    def check_all_used(self) -> None:
        """Raise CheckpointError if a weight was never read: it would silently not count."""
        left = self.unused()
        if left:
            raise CheckpointError(
                f"{self.checkpoint.path} has {len(left)} tensors that a model of its config does "
                f"not use, the first being {left[0]}; check config.json"
            )

    def _quantized_weight(self, module: str, shape: tuple[int, int], bias: bool) -> QuantizedWeight:
        name, bias_name = f"{module}.weight", f"{module}.bias"
        self._check_shape(name, shape)
        weight = self.checkpoint.weight(module)
        check_codes(name, weight.codes, weight.spec.fmt)
        self._used.add(name)
        self._used |= {f"{module}.{leaf}" for leaf in (OUTLIER_COLUMNS, OUTLIER_WEIGHT)}
        if bias:
            if weight.bias is None:
                raise CheckpointError(f"{self.checkpoint.path} has no {bias_name}, which it needs")
            self._check_shape(bias_name, shape[:1])
            self._used.add(bias_name)
        return weight

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        shape = self.checkpoint.shape(name)
        if shape != expected:
            raise CheckpointError(
                f"{name} has shape {list(shape)}, the config asks for {list(expected)}"
            )


def _check_overflow(name: str, stored: Tensor, loaded: Tensor) -> None:
    if not bool(loaded.isfinite().all()):
        raise CheckpointError(
            f"{name} reaches {float(stored.abs().max()):.6g}, beyond float16; load with "
            "dtype='bfloat16' or 'float32'"
        )
