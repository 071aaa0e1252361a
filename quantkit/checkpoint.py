"""A quantized checkpoint on disk: what its tensors mean, and whether they can be trusted.

The format is that of any container that quantkit knows, in safetensors. Reading never guesses: a
tensor in FP8 without its scale, a declared KV cache without scales, or a scale that is not finite
and positive is an error that names the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.config_sizes import LAYERS, check_sizes
from quantkit.containers import IgnoreList, Shape, read_scheme
from quantkit.errors import CheckpointError
from quantkit.kv_scales import LayerScales, find_kv_scales, has_kv_scales, unit_kv_scales
from quantkit.quantized_weight import QuantizedWeight
from quantkit.scheme import QuantSpec, fused_siblings
from quantkit.shards import INDEX_NAME, ShardReader, read_json

AGAIN = "run 'quantkit calibrate' again, or download the folder again"
OUTLIER_COLUMNS, OUTLIER_WEIGHT = "outlier_columns", "outlier_weight"
"""Beside a weight: which input channels are not in its codes, int32 [n], and theirs [N, n]."""
INPUT_MEAN_SQUARE = "input_mean_square"
"""Beside the first weight of a fused group: E[x^2] of each input channel in calibration, float32
[K]. Native checkpoints have it, to be rounded to other formats with what their inputs carry."""
STORED_AS = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "e3m4": "U8"}
"""How safetensors calls the codes of each format; it has no name for E3M4."""
BESIDE_WEIGHTS = re.compile(
    r"\.(weight_scale|weight_scale_inv|input_scale|activation_scale|output_scale|prob_output_scale"
    r"|[qkv]_scale|kv_scale|outlier_columns|outlier_weight|input_mean_square)$"
)
"""Names of tensors that are part of how others are quantized, in any container."""
_EXPONENTS = "F8_E8M0"
"""What safetensors calls scales that are powers of two."""


class Checkpoint:
    """An open checkpoint: config, scheme, and tensors by name, memory-mapped until used."""

    def __init__(self, path: Path, kv: bool = True) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        check_sizes(self.config, path / "config.json")
        self.container, self.scheme = read_scheme(self.config, path)
        self._shards = ShardReader(path)
        self._check_no_strays()
        self._weight_scales = self._find_weights()
        self.quantized = list(self._weight_scales)
        for module in self.quantized:
            self._check_module(module)
        self._kv = self._read_kv_scales(self.scheme.kv) if kv and self.scheme.kv else {}

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return self._shards.names

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as stored, memory-mapped."""
        return self._shards.tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._shards.shape(name)

    def weight(self, module: str) -> QuantizedWeight:
        """Return the quantized linear layer `module` (a name from `quantized`)."""
        bias, columns = f"{module}.bias", f"{module}.{OUTLIER_COLUMNS}"
        spec, codes = self.scheme.weights_of(module), self.tensor(f"{module}.weight")
        scale = self.tensor(self._weight_scales[module]).float()
        inputs = self._scale_name(module, "input_scale")
        return QuantizedWeight(
            codes=codes,
            scale=scale.reshape(spec.scale_shape(*codes.shape)),
            spec=spec,
            bias=self.tensor(bias) if bias in self else None,
            input_scale=self.tensor(inputs).float().reshape(1) if inputs else None,
            columns=self.tensor(columns) if columns in self else None,
            exact=self.tensor(f"{module}.{OUTLIER_WEIGHT}") if columns in self else None,
        )

    def input_mean_square(self, module: str) -> Tensor | None:
        """Return E[x^2] of the input channels of `module`, if it was stored. float32 [K].

        Raises CheckpointError if it has another shape, or a value that is not finite and >= 0.
        """
        names = (f"{sibling}.{INPUT_MEAN_SQUARE}" for sibling in fused_siblings(module))
        name = next((name for name in names if name in self), None)
        if name is None:
            return None
        found, expected = self.tensor(name), (self.shape(f"{module}.weight")[1],)
        if tuple(found.shape) != expected or not bool((found.isfinite() & (found >= 0)).all()):
            raise CheckpointError(
                f"{name} is not {list(expected)} finite numbers of at least 0; {AGAIN}"
            )
        return found.float()

    def kv_scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return (k_scale, v_scale) of a decoder layer: float32, [1] or [num_kv_heads].

        Raises CheckpointError when the checkpoint declares no FP8 KV cache for that layer.
        """
        if layer not in self._kv:
            raise CheckpointError(
                f"{self.path} has no KV cache scales for layer {layer}; calibrate with --kv fp8"
            )
        return self._kv_scale(self._kv[layer].key), self._kv_scale(self._kv[layer].value)

    def kv_modules(self) -> dict[int, str]:
        """Return the decoder layers with KV scales, each with the name of its attention module.

        Raises CheckpointError if a layer whose scale is 1 has no module of such a name.
        """
        for layer, scales in self._kv.items():
            if not scales.attention:
                raise CheckpointError(f"{self.path} names no attention module of layer {layer}")
        return {layer: scales.attention for layer, scales in self._kv.items()}

    def _kv_scale(self, name: str | None) -> Tensor:
        return torch.ones(1) if name is None else self.tensor(name).float().reshape(-1)

    def _check_no_strays(self) -> None:
        used = set(self._shards.files)
        for file in sorted(self.path.glob("model*.safetensors")):
            if file.name not in used:
                raise CheckpointError(
                    f"{file} belongs to no index; remove it, or restore {INDEX_NAME}"
                )

    def _find_weights(self) -> dict[str, str]:
        """Return the modules with FP8 weights, each with the name of its scale."""
        found, ignored = {}, IgnoreList(self.scheme.ignore)
        for name in self.names:
            module, _, leaf = name.rpartition(".")
            if self._is_coded(name, leaf):
                self._check_kept(ignored, name, module)
                scale = self._scale_name(module, "weight_scale") if leaf == "weight" else None
                if scale is None:
                    missing = f"{module}.{self.container.names.weight_scale[0]}"
                    raise CheckpointError(
                        f"{self._where(name)} has {name} in FP8 without {missing}; {AGAIN}"
                    )
                found[module] = scale
        if not found:
            raise CheckpointError(f"{self.path} declares quantization but has no FP8 weight")
        return found

    def _is_coded(self, name: str, leaf: str) -> bool:
        dtype = self._shards.dtype(name)
        if dtype == _EXPONENTS and leaf in self.container.names.weight_scale:
            return False
        return dtype.startswith("F8_") or (dtype == "U8" and leaf == "weight")

    def _where(self, name: str) -> Path:
        return self.path / self._shards.file_of(name)

    def _check_kept(self, ignored: IgnoreList, name: str, module: str) -> None:
        entry = ignored.entry_for(module)
        if entry is not None:
            raise CheckpointError(
                f"{self._where(name)} has {name} in FP8, and config.json says that {entry!r} is "
                f"not quantized; {AGAIN}"
            )

    def _scale_name(self, module: str, kind: str) -> str | None:
        """Return the name of the stored weight_scale or input_scale of a module, if it has one."""
        leaves: tuple[str, ...] = getattr(self.container.names, kind)
        found = [f"{module}.{leaf}" for leaf in leaves if f"{module}.{leaf}" in self]
        if len(found) > 1:
            raise CheckpointError(
                f"{self._where(found[0])} has {found[0]} and {found[1]}; only one can be meant"
            )
        return found[0] if found else None

    def _check_module(self, module: str) -> None:
        name = f"{module}.weight"
        expected = STORED_AS[self.scheme.weights_of(module).format]
        if self._shards.dtype(name) != expected:
            raise CheckpointError(f"{name} is {self._shards.dtype(name)}, expected {expected}")
        shape = self.shape(name)
        if len(shape) != 2:
            raise CheckpointError(f"{name} has shape {list(shape)}, expected two dimensions")
        shapes = self.container.weight_scale_shapes(self.scheme.weights, shape[0], shape[1])
        self._check_scale(module, "weight_scale", shapes)
        if self.scheme.inputs is not None and not self.scheme.inputs.dynamic:
            shapes = self.container.input_scale_shapes()
            self._check_scale(module, "input_scale", shapes)
        self._check_outliers(module, shape[0], shape[1])

    def _check_outliers(self, module: str, rows: int, columns: int) -> None:
        names = [f"{module}.{leaf}" for leaf in (OUTLIER_COLUMNS, OUTLIER_WEIGHT)]
        found = [name for name in names if name in self]
        if not found:
            return
        if len(found) == 1:
            raise CheckpointError(f"{self.path} has {found[0]} alone; {AGAIN}")
        numbers = self.tensor(names[0])
        bad = numbers[(numbers < 0) | (numbers >= columns)]
        if bad.numel():
            raise CheckpointError(f"{names[0]} names column {int(bad[0])} of {columns}")
        if self.shape(names[1]) != (rows, numbers.numel()):
            raise CheckpointError(
                f"{names[1]} has shape {list(self.shape(names[1]))}, expected "
                f"{[rows, numbers.numel()]}"
            )

    def _check_scale(self, module: str, kind: str, expected: tuple[Shape, ...]) -> None:
        name = self._scale_name(module, kind)
        if name is None:
            raise CheckpointError(f"{self.path} has no {module}.{kind}; {AGAIN}")
        self._check_tensor(name, expected)

    def _check_tensor(self, name: str, expected: tuple[Shape, ...]) -> None:
        shape = self.shape(name)
        if shape not in expected:
            raise CheckpointError(f"{name} has shape {list(shape)}, expected {list(expected[0])}")
        check_scale(name, self.tensor(name))

    def _read_kv_scales(self, spec: QuantSpec) -> dict[int, LayerScales]:
        """Find the scales of the declared KV cache and check them."""
        names = self.container.names
        layers = [n for n in cached_layers(self.config) if n not in self.scheme.kv_ignore]
        if self.container.kv_scales_default_to_1 and not has_kv_scales(self.names, names):
            return unit_kv_scales(self.names, layers)
        try:
            found = find_kv_scales(self.names, names, layers)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.path} declares an FP8 KV cache but has {error}; calibrate again, or load "
                "with kv='none'"
            ) from None
        for scales in found.values():
            for name in (scales.key, scales.value):
                if name is not None:
                    heads = prod(self.shape(name))
                    self._check_tensor(name, self.container.kv_scale_shapes(spec, heads))
        return found


def check_scale(name: str, scale: Tensor) -> None:
    """Raise CheckpointError unless every element is finite and > 0, naming the tensor."""
    value = scale.float()
    bad = ~(value.isfinite() & (value > 0))
    if bad.any():
        first = value[bad].flatten()[0].item()
        raise CheckpointError(
            f"{name} has {int(bad.sum())} of {value.numel()} scales that are not finite and > 0 "
            f"(first: {first}); {AGAIN}"
        )


def cached_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the decoder layers that keep keys and values.

    Hybrid models name the kind of each layer in `layer_types`; convolution and linear-attention
    layers have a state, not a KV cache. The last `num_kv_shared_layers` read what earlier layers
    cached.
    """
    text = config.get("text_config") or config
    count = next((int(text[name]) for name in LAYERS if text.get(name)), 0)
    kinds = text.get("layer_types") or ["full_attention"] * count
    attention = {"full_attention", "sliding_attention", "chunked_attention"}
    own = len(kinds) - (text.get("num_kv_shared_layers") or 0)
    return [number for number, kind in enumerate(kinds[:own]) if kind in attention]


def open_checkpoint(path: str | Path, kv: bool = True) -> Checkpoint:
    """Open a quantized checkpoint folder.

    `kv=False` leaves the KV scales unread and unchecked, for use with an unquantized cache. Raises
    CheckpointError with the file or tensor at fault.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; expected a checkpoint from 'calibrate'")
    return Checkpoint(folder, kv)


def read_checkpoint(path: str | Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return {name: tensor} with every FP8 weight dequantized to `dtype` and no scales.

    Tensors that were not quantized come as stored. For anyone who wants plain weights.
    """
    checkpoint = open_checkpoint(path, kv=False)
    quantized = {f"{module}.weight": module for module in checkpoint.quantized}
    plain: dict[str, Tensor] = {}
    for name in checkpoint.names:
        if name in quantized:
            plain[name] = checkpoint.weight(quantized[name]).dequantize(dtype)
        elif not BESIDE_WEIGHTS.search(name):
            plain[name] = checkpoint.tensor(name)
    return plain
