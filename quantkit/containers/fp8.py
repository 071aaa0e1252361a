"""The `fp8` method: DeepSeek's blocks, and one scale per tensor of AutoFP8, Quark, transformers.

`weight_scale_inv` is, despite its name, the multiplier: `w = codes * weight_scale_inv`. Sources:
transformers integrations/finegrained_fp8.py (FP8Linear, Fp8Dequantize) and vLLM
model_executor/layers/quantization/fp8.py for names and shapes; AutoFP8 auto_fp8/quantize.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.containers.container import (
    SCALAR,
    Container,
    Names,
    Shape,
    check_readable,
    names_list,
)
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.scheme import Granularity, QuantSpec, Scheme

BLOCK_SHAPE = (128, 128)
"""The blocks that every engine has kernels for."""
KV_FP8 = "static"
"""What AutoFP8 and Quark write for an FP8 KV cache with scales in the file."""
_KNOWN: dict[str, tuple[str, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}


class Fp8(Container):
    """`quant_method: fp8`; blocks are written, one scale per tensor is read too."""

    name = "fp8-block"
    method = "fp8"
    names = Names(
        weight_scale=("weight_scale_inv", "weight_scale"),
        input_scale=("input_scale", "activation_scale"),
    )

    def to_config(self, scheme: Scheme) -> dict[str, Any]:
        """Return the block; both of the names that engines know for the list of ignored modules."""
        _check_blocks(scheme)
        config: dict[str, Any] = {
            "quant_method": self.method,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK_SHAPE),
            "modules_to_not_convert": list(scheme.ignore),
            "ignored_layers": list(scheme.ignore),
        }
        if scheme.kv is not None:
            config["kv_cache_scheme"] = KV_FP8
        return config

    def from_config(self, block: Mapping[str, Any]) -> Scheme:
        """Return the scheme."""
        _check_fp8(block)
        shape = _block_shape(block.get("weight_block_size"))
        dynamic = _is_dynamic(block.get("activation_scheme", "dynamic"))
        if shape is None:
            weights = QuantSpec(Granularity.TENSOR)
            inputs = QuantSpec(Granularity.TENSOR, dynamic=dynamic)
        elif dynamic:
            weights = QuantSpec(Granularity.BLOCK, block_shape=shape)
            inputs = QuantSpec(Granularity.GROUP, dynamic=True, group_size=shape[1])
        else:
            raise CheckpointError(
                "quantization_config has static inputs with weight_block_size; engines scale the "
                "inputs of blocks at run time"
            )
        ignore = names_list(block, "ignored_layers", "modules_to_not_convert")
        return check_readable(Scheme(weights, inputs, _kv(block.get("kv_cache_scheme")), ignore))

    def weight_scale_shapes(self, spec: QuantSpec, rows: int, columns: int) -> tuple[Shape, ...]:
        """Return the grid of blocks; a single scale is 0-d in AutoFP8, [1, 1] in transformers."""
        own = spec.scale_shape(rows, columns)
        return (*SCALAR, (1, 1)) if spec.granularity is Granularity.TENSOR else (own,)

    def kv_scale_shapes(self, spec: QuantSpec, heads: int) -> tuple[Shape, ...]:
        """Return the shapes of a scale per layer."""
        return SCALAR


def _check_blocks(scheme: Scheme) -> None:
    weights, inputs, kv = scheme.weights, scheme.inputs, scheme.kv
    if scheme.native or weights.block_shape != BLOCK_SHAPE:
        raise UnsupportedError(
            "fp8-block holds E4M3 weights with a scale per 128 x 128 block; calibrate with the "
            "recipe 'fp8-block', or export to compressed-tensors"
        )
    if inputs is None or not inputs.dynamic or inputs.group_size != BLOCK_SHAPE[1]:
        raise UnsupportedError(
            "fp8-block has inputs scaled per 128 features at run time; calibrate with the recipe "
            "'fp8-block', or export to compressed-tensors"
        )
    if kv is not None and kv.granularity is not Granularity.TENSOR:
        raise UnsupportedError(
            "fp8-block has one KV scale per layer, not per head; calibrate with kv 'fp8', or "
            "export to compressed-tensors"
        )


def _check_fp8(block: Mapping[str, Any]) -> None:
    """Raise CheckpointError for what the method also names, and is not E4M3 with plain scales."""
    for key, values in _KNOWN.items():
        value = block.get(key)
        if value is not None and value not in values:
            raise CheckpointError(
                f"quantization_config has {key}={value!r}; quantkit reads {' or '.join(values)}"
            )


def _block_shape(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(
        f"quantization_config has weight_block_size={value!r}, expected rows and columns"
    )


def _is_dynamic(scheme: object) -> bool:
    if scheme not in ("static", "dynamic"):
        raise CheckpointError(
            f"quantization_config has activation_scheme={scheme!r}; known: static, dynamic"
        )
    return scheme == "dynamic"


def _kv(value: object) -> QuantSpec | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return QuantSpec.from_config(value)
    if value != KV_FP8:
        raise CheckpointError(
            f"quantization_config has kv_cache_scheme={value!r}; quantkit reads {KV_FP8!r}"
        )
    return QuantSpec(Granularity.TENSOR)
